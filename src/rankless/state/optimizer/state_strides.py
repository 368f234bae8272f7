"""Orders of dimensions in memory, for states with another order than their parameter.

A step reads the elements in that order, so that sums of another order differ in the last bits.

A save describes orders on each rank (:mod:`rankless.state.optimizer.optimizer_view`). Each rank of a load compares and
restores them (:mod:`rankless.state.optimizer.state_buffers`), and drops the descriptions
(:mod:`rankless.state.optimizer.optimizer_restore`), as writers of other formats do
(:mod:`rankless.state.optimizer.whole_states`). The description is in ``state.json``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rankless.engine.io.tensor_sources import order_dimensions
from rankless.ondisk.value_files import DIMENSION_ORDER
from rankless.state.tensor_subclasses import is_wrapper


def describe_order(parameter: Any, state: torch.Tensor) -> dict[str, list[int]] | None:
    """Return the value that a checkpoint has besides a state, under its name; ``None`` if its order is the usual one.

    The usual order is the parameter's order for a state of the parameter's shape, else the order of a contiguous
    tensor. For example, ``exp_avg`` of a convolution in ``channels_last`` has the usual order if it is in
    ``channels_last``, too. A load asks it whether a state that exists has the usual order.
    """
    has_one_order = state.ndim <= 1
    if has_one_order or not isinstance(parameter, torch.Tensor) or is_wrapper(state):
        return None
    if (state.shape, state.stride()) == (parameter.shape, parameter.stride()):  # as most states have
        return None
    order = order_dimensions(state.shape, state.stride())
    usual = parameter if state.shape == parameter.shape else torch.empty(state.shape, device="meta")
    return None if order == order_dimensions(usual.shape, usual.stride()) else {DIMENSION_ORDER: order}


def saved_order(described: Any, ndim: int) -> list[int] | None:
    """Return the order in the value that a checkpoint has under a state's name, if it is one."""
    order = described.get(DIMENSION_ORDER) if isinstance(described, dict) else None
    return order if isinstance(order, list) and sorted(order) == list(range(ndim)) else None


def is_order(described: Any) -> bool:
    """Return whether a value under a state's name only describes its order of dimensions."""
    return isinstance(described, dict) and described.keys() == {DIMENSION_ORDER}


def make_ordered(parameter: torch.Tensor, dtype: torch.dtype, order: list[int] | None) -> torch.Tensor:
    """Return a new state of a parameter's shape and layout, with its dimensions in memory in ``order``, if given."""
    if order is None:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if not isinstance(parameter, DTensor):
        return torch.empty_permuted(parameter.shape, order, dtype=dtype, device=parameter.device)
    local = parameter._local_tensor  # noqa: SLF001
    whole = torch.empty_permuted(parameter.shape, order, dtype=dtype, device="meta")
    return DTensor.from_local(
        torch.empty_permuted(local.shape, order, dtype=dtype, device=local.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=whole.stride(),
    )
