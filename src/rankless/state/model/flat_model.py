"""A model with trained parameters in tensors that another system keeps and divides among ranks.

:mod:`rankless.deepspeed` passes such models to saves and loads, on each rank;
:mod:`rankless.state.model.model_traversal` views them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import nn

from rankless.state.model.flat_shards import FlatShard


class FlatModel(msgspec.Struct, frozen=True):
    """A model with parameters that are stored as other tensors: as fp32 master weights, whole or divided.

    Attributes:
        module: The module, which provides all other tensors.
        shards: The parameters that are divided, each once, in the same order on all ranks.
        replaced: Whole tensors by the names of the parameters that they stand for. An optimizer holds them.
        tied: Further names of the parameters in ``replaced``.
    """

    module: nn.Module
    shards: Sequence[FlatShard]
    replaced: Mapping[str, torch.Tensor] = msgspec.field(default_factory=dict)
    tied: Mapping[str, str] = msgspec.field(default_factory=dict)
