"""The tensors that loaded states of an optimizer are read into, also before the optimizer has taken a step.

:mod:`rankless.state.optimizer.optimizer_restore` asks it on each rank while it matches: new tensors reach the optimizer
only when values are put in place.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from rankless.engine.io.tensor_sources import order_dimensions
from rankless.errors import OptimizerMismatchError
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import FLOATING
from rankless.ondisk.validation import state_key
from rankless.state.model.flat_shards import blank_flat_state
from rankless.state.model.model_view import ParamRef
from rankless.state.optimizer.adapters import TorchOptimizer
from rankless.state.optimizer.optimizer_view import GroupMember, ParamGroup, place_states
from rankless.state.optimizer.probe import probe_states
from rankless.state.optimizer.state_strides import describe_order, make_ordered, saved_order
from rankless.state.tensor_views import DTYPES, TensorView, local_tensor, shares_elements


def addresses_of(groups: Sequence[ParamGroup]) -> set[int]:
    """Return the addresses of the parameters of some groups on this rank."""
    keys = (member.key for group in groups for member in group.members)
    return {local_tensor(key).data_ptr() for key in keys if isinstance(key, torch.Tensor)}


def provide_state_buffer(  # noqa: PLR0911
    group: ParamGroup,
    member: GroupMember,
    ref: ParamRef,
    state: str,
    info: TensorInfo,
    *,
    occupied: Collection[int],
    described: Any = None,
) -> torch.Tensor:
    """Return the tensor that a state is kept in: the existing one if it fits, else a new one.

    ``described`` is the value that the checkpoint has under the state's name. At ``occupied`` addresses are parameters,
    which get values of their own.
    """
    dtype = DTYPES[info.dtype]
    existing = group.adapter.get_states(member.key).get(state)
    order = None if ref.flat is not None or ref.tensor.declared is not None else saved_order(described, len(info.shape))
    if (
        isinstance(existing, torch.Tensor)
        and existing.dtype == dtype
        and _fits_state(ref, existing, info)
        and (
            order_dimensions(existing.shape, existing.stride()) == order
            if order
            else not describe_order(member.key, existing)
        )
        and not shares_elements(existing)
        and not (existing.numel() and local_tensor(existing).data_ptr() in occupied)
    ):
        return existing
    if info.shape == ref.tensor.shape and isinstance(member.key, torch.Tensor):
        if ref.flat is not None:
            return blank_flat_state(ref.flat, dtype)
        if ref.tensor.declared is not None:  # padding is not loaded
            return torch.zeros_like(member.key, dtype=dtype, requires_grad=False)
        return make_ordered(member.key, dtype, order)
    if info.shape == ():
        on_device = bool(group.settings.get("fused") or group.settings.get("capturable"))
        device = member.key.device if on_device and isinstance(member.key, torch.Tensor) else "cpu"
        return torch.empty((), dtype=dtype, device=device)
    if order is not None and isinstance(member.key, torch.Tensor) and not ref.tensor.is_divided():
        return torch.empty_permuted(info.shape, order, dtype=dtype, device=member.key.device)
    return _probe_buffer(group, member, ref, state, info)


def _fits_state(ref: ParamRef, existing: torch.Tensor, info: TensorInfo) -> bool:
    if ref.flat is not None and existing.ndim:
        return info.shape == ref.tensor.shape and existing.shape == ref.flat.parameter.shape
    if ref.tensor.declared is not None and existing.ndim:
        return info.shape == ref.tensor.shape and tuple(existing.shape) == ref.tensor.declared.local_shape
    return tuple(existing.shape) == info.shape


def _probe_buffer(group: ParamGroup, member: GroupMember, ref: ParamRef, state: str, info: TensorInfo) -> torch.Tensor:
    """Return a tensor like the optimizer creates at its first step; a whole one if the parameter is not sharded."""
    if not isinstance(member.key, torch.Tensor):
        return torch.empty(info.shape, dtype=DTYPES[info.dtype])
    if not ref.tensor.is_divided():
        return torch.empty(info.shape, dtype=DTYPES[info.dtype], device=member.key.device)
    if not isinstance(group.adapter, TorchOptimizer):
        raise _unknown_layout(ref, state, info)
    try:
        probed = probe_states(group.adapter.optimizer, member.key).get(state)
    except OptimizerMismatchError as error:
        raise OptimizerMismatchError(f"optimizer state {state_key(ref.name, state)!r}: {error}") from error
    if probed is None or probed.shape != info.shape or (probed.mesh is None and probed.numel() > 1):
        raise _unknown_layout(ref, state, info)
    return probed.make_empty().to(DTYPES[info.dtype])


def cast_with_parameter(ref: ParamRef, info: TensorInfo, saved_dtype: str | None) -> TensorInfo:
    """Return a state as it is loaded for a parameter that was saved with ``saved_dtype`` and has another dtype here.

    A state of the parameter's dtype is cast with it, as ``Optimizer.load_state_dict`` does: for example, ``exp_avg`` of
    a parameter that was saved as float32 and is bfloat16 here becomes bfloat16. A number, such as the count of steps,
    keeps its dtype. :class:`OptimizerRestore` calls it if dtypes may be cast.
    """
    dtype = ref.tensor.dtype
    is_cast = info.shape != () and saved_dtype == info.dtype and {dtype, info.dtype} <= FLOATING
    return TensorInfo(dtype, info.shape) if is_cast else info


def view_target(ref: ParamRef, state: str, buffer: torch.Tensor, info: TensorInfo) -> TensorView:
    """Return the part of a state tensor that a checkpoint's tensor is loaded into."""
    target = place_states(ref, state, buffer)
    if (target.shape, target.dtype) != (info.shape, info.dtype):
        raise _unknown_layout(ref, state, info)
    return target


def _unknown_layout(ref: ParamRef, state: str, info: TensorInfo) -> OptimizerMismatchError:
    return OptimizerMismatchError(
        f"optimizer state {state_key(ref.name, state)!r} has shape {list(info.shape)}, its parameter "
        f"{list(ref.tensor.shape)}: its layout is unknown before the optimizer's first step"
    )
