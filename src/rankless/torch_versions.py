"""The differences between the supported versions of torch: 2.7 and newer.

Only this module and ``dcp_versions`` depend on the version of torch. Each entry names the first version that does not
need it, and may be removed as soon as ``pyproject.toml`` requires that version.

:mod:`rankless.state.model.materialize` and :mod:`rankless.liveness.watch` import it, on each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rankless.torch_import import check_version

check_version(torch)  # before anything is imported from torch that older versions lack

from torch.distributed.distributed_c10d import Store  # noqa: E402 - after the check

__all__ = ["clone_store", "fsdp_param_groups"]


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
