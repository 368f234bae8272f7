"""The differences between the supported versions of torch in ``torch.distributed.checkpoint``.

They are apart from ``torch_versions`` because importing torch's package takes longer than a small save. Each entry
names the first version that does not need it.

:mod:`rankless.dcp` imports it.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem

__all__ = ["DCP_VERSION", "KNOWS_CHECKPOINTABLE_TENSORS", "SerializationFormat"]

#: The version in the metadata of DCP folders. Not needed from torch 2.9 on; 2.7 and 2.8 write none, and ignore it.
DCP_VERSION: str = getattr(filesystem, "CURRENT_DCP_VERSION", "1.0.0")

#: Whether torch's planners know the protocol ``CheckpointableTensor``. Not needed from torch 2.14 on.
KNOWS_CHECKPOINTABLE_TENSORS = hasattr(dcp, "CheckpointableTensor")

if TYPE_CHECKING or hasattr(filesystem, "SerializationFormat"):
    from torch.distributed.checkpoint.filesystem import SerializationFormat
else:

    class SerializationFormat(Enum):
        """torch's formats of the records in DCP's files. Not needed from torch 2.8 on."""

        TORCH_SAVE = "torch_save"
        SAFETENSORS = "safetensors"
