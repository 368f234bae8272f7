"""The differences between the supported versions of torch: 2.7 and newer.

Only this module depends on the version of torch. Each entry says from which version on it is not needed, and may be
removed as soon as ``pyproject.toml`` requires that version.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import filesystem
from torch.distributed.distributed_c10d import Store

__all__ = ["DCP_VERSION", "SerializationFormat", "clone_store", "fsdp_param_groups"]

#: The version in the metadata of DCP folders. Not needed from torch 2.9 on; 2.7 and 2.8 write none, and ignore it.
DCP_VERSION: str = getattr(filesystem, "CURRENT_DCP_VERSION", "1.0.0")

if TYPE_CHECKING or hasattr(filesystem, "SerializationFormat"):
    from torch.distributed.checkpoint.filesystem import SerializationFormat
else:

    class SerializationFormat(Enum):
        """torch's formats of the records in DCP's files. Not needed from torch 2.8 on."""

        TORCH_SAVE = "torch_save"
        SAFETENSORS = "safetensors"


def fsdp_param_groups(fsdp_state: Any) -> Sequence[Any]:
    """Return the groups of parameters of a module with FSDP2. In torch 2.7 a module has at most one."""
    if hasattr(fsdp_state, "_fsdp_param_groups"):
        groups: Sequence[Any] = fsdp_state._fsdp_param_groups  # noqa: SLF001
        return groups
    group = fsdp_state._fsdp_param_group  # noqa: SLF001
    return [] if group is None else [group]


def clone_store(store: Store) -> Store:
    """Return another connection to a key-value store. In torch 2.7 it is the same connection."""
    return store.clone() if hasattr(store, "clone") else store
