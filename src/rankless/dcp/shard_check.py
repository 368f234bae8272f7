"""Refusal of shards that torch's planners would put in the wrong place: a storage writer or reader cannot move them.

DCP computes the place of the shard of a DTensor from the array of the mesh and from torch's rule of sizes.

The storage reader and writer call it on each rank before they read or write.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor, Partial

from rankless.dcp_versions import KNOWS_CHECKPOINTABLE_TENSORS
from rankless.errors import UnsupportedTensorError
from rankless.state.declared_boxes import is_checkpointable
from rankless.state.tensor_views import convert_layout, has_uneven_shard, local_tensor


def check_checkpointable(state_dict: Mapping[str, object]) -> None:
    """Raise ``UnsupportedTensorError`` if torch's planner would take a ``CheckpointableTensor`` for a whole tensor."""
    if KNOWS_CHECKPOINTABLE_TENSORS:
        return
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor) and is_checkpointable(value):
            raise UnsupportedTensorError(
                f"{name!r} is a CheckpointableTensor, which torch.distributed.checkpoint knows from torch 2.14 on; "
                f"this is {torch.__version__}, which would store one rank's part: use rankless.save_checkpoint and "
                "load_checkpoint"
            )


def check_shards(planner: object) -> None:
    """Raise ``UnsupportedTensorError`` if a planner of torch places shards of its state dict wrongly.

    Planners without a ``state_dict`` are not checked.
    """
    state_dict = getattr(planner, "state_dict", None)
    if not isinstance(state_dict, Mapping):
        return
    check_checkpointable(state_dict)
    for name, value in state_dict.items():
        if isinstance(value, DTensor) and not any(isinstance(placement, Partial) for placement in value.placements):
            _check_dtensor(value, repr(name))


def _check_dtensor(tensor: DTensor, subject: str) -> None:
    local = local_tensor(tensor)
    if hasattr(local, "__create_chunk_list__"):
        return
    layout = convert_layout(tensor, subject)
    reason = ""
    if layout.mesh.ranks != tuple(tensor.device_mesh.mesh.flatten().tolist()):
        reason = f"the ranks of its device mesh {tensor.device_mesh.mesh.tolist()} are not in the order of their groups"
    elif has_uneven_shard(tensor, subject):
        reason = f"its shard {list(local.shape)} of {list(tensor.shape)} has another size than torch's rule gives it"
    if reason:
        raise UnsupportedTensorError(
            f"{subject}: {reason}, and torch.distributed.checkpoint would put the shard in the wrong place: use "
            "rankless.save_checkpoint and load_checkpoint, which do not"
        )
