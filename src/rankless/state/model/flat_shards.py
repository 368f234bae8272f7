"""Parameters that are parts of flat parameters, which are divided among ranks: under FSDP1 and DeepSpeed's ZeRO.

:mod:`rankless.state.model.fsdp1` and :mod:`rankless.deepspeed` make them on each rank when a model is viewed;
:mod:`rankless.state.optimizer.optimizer_view` finds states by them.
"""

from __future__ import annotations

import msgspec
import torch

from rankless.errors import UnsupportedTensorError


class FlatShard(msgspec.Struct, frozen=True):
    """One parameter that is a part of a flat parameter, and the shard of it on this rank.

    The rank with coordinate ``i`` in the last dimension of the mesh holds, of the parameter's elements in row-major
    order, the range ``[i * length - offset, (i + 1) * length - offset)``, clipped to the parameter. For example, with
    ``length`` 16 and ``offset`` 10, ranks 0 and 1 hold elements 0 to 5 and 6 to 11 of a parameter with 12 elements.
    FSDP1's HYBRID_SHARD has a replicating dimension before it. NO_SHARD, and a single rank, have the mesh
    ``(ranks, 1)``.

    ``local`` are those elements, live, 1-D and of full precision; ``start_in_shard`` is their offset in the rank's
    shard of the flat parameter. ``parameter`` is the object that an optimizer holds: the parameter itself, or the flat
    parameter that it shares with others (under FSDP1 with ``use_orig_params=False``, and under ZeRO). ``tied`` are
    further names of the parameter.
    """

    fqn: str
    tied: tuple[str, ...]
    parameter: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    local: torch.Tensor
    start_in_shard: int
    offset: int
    length: int
    mesh_shape: tuple[int, ...]
    mesh_ranks: tuple[int, ...]


def flat_elements(shard: FlatShard, state: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's elements, live and 1-D, of a state tensor that an optimizer keeps for ``shard.parameter``.

    Returns ``None`` for a 0-d state such as ``step``, which is one value of all parameters that share the flat
    parameter. Raises ``UnsupportedTensorError`` if the state does not have the parameter's shape.
    """
    if state.ndim == 0:
        return None
    if state.shape != shard.parameter.shape:
        raise UnsupportedTensorError(
            f"an optimizer state of {shard.fqn!r} has shape {list(state.shape)}, the shard of the parameter on this "
            f"rank {list(shard.parameter.shape)}; under FSDP1 and ZeRO a state can be stored only if it has a value "
            "for each element"
        )
    is_shared = shard.parameter.numel() != shard.local.numel()
    start = shard.start_in_shard if is_shared else 0
    return state.view(-1)[start : start + shard.local.numel()]


def blank_flat_state(shard: FlatShard, dtype: torch.dtype) -> torch.Tensor:
    """Return a state tensor as an optimizer keeps it for ``shard.parameter``: zeros, padding included.

    Parameters that share a flat parameter share its states: create one, and fill the :func:`flat_elements` of each.
    """
    return torch.zeros_like(shard.parameter, dtype=dtype, requires_grad=False)
