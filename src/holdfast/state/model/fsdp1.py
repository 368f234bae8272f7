"""FSDP1 (``FullyShardedDataParallel``): its flat parameters, read and filled where they are, without communication.

FSDP1 puts the parameters of a unit one after another into a flat parameter and cuts that into shards of equal length,
so a rank holds one contiguous range of each. ``state_dict()`` of such a model gathers; nothing here calls it.
Source: ``torch/distributed/fsdp/_flat_param.py``; torch makes none of this public.
"""
# ruff: noqa: SLF001

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParameter, FlatParamHandle
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import StateError, UnsupportedTensorError
from holdfast.ondisk.validation import WRAPPERS


@dataclass(frozen=True, slots=True)
class FlatShard:
    """One parameter of an FSDP1 unit, and the part of it on this rank.

    The rank with coordinate ``i`` in the last dimension of the mesh holds, of the parameter's elements in row-major
    order, those of ``[i * length - offset, (i + 1) * length - offset)`` that there are. HYBRID_SHARD has a replicating
    dimension before it; the mesh of NO_SHARD, and of a single rank, is ``(ranks, 1)``.

    ``local`` is those elements, live, 1-D and of full precision; ``start_in_shard`` is where they begin in the rank's
    shard. ``parameter`` is what an optimizer holds: the parameter itself, or, with ``use_orig_params=False``, the flat
    parameter that it shares with others. ``tied`` are further names of the parameter.
    """

    fqn: str
    tied: tuple[str, ...]
    parameter: nn.Parameter
    shape: tuple[int, ...]
    dtype: torch.dtype
    local: torch.Tensor
    start_in_shard: int
    offset: int
    length: int
    mesh_shape: tuple[int, ...]
    mesh_ranks: tuple[int, ...]


def wrapped_modules(module: nn.Module) -> bool:
    """Whether FSDP1 is anywhere in a module."""
    return any(isinstance(part, FullyShardedDataParallel) for part in module.modules())


def named_modules(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module under its clean name, in the order of ``state_dict``: at each of its places, wrappers included."""
    yield name, module
    for part, child in module._modules.items():
        wraps = part in WRAPPERS or (isinstance(module, DistributedDataParallel) and part == "module")
        if child is not None:
            yield from named_modules(child, name if wraps else _join(name, part))


def flat_parts(module: nn.Module) -> Iterator[FlatShard]:
    """Every parameter that FSDP1 manages in a module, each once, on all ranks in the same order.

    Raises ``StateError`` inside a forward, a backward or ``summon_full_params``, and ``UnsupportedTensorError`` for
    what is not laid out row by row or is a DTensor.
    """
    names: dict[nn.Module, list[str]] = {}
    for name, part in named_modules(module):
        names.setdefault(part, []).append(name)
    for unit in names:
        if isinstance(unit, FullyShardedDataParallel) and unit._handle is not None:
            yield from _unit_parts(unit, unit._handle, names)


def reshard(module: nn.Module) -> None:
    """Free what a forward without a backward left gathered: to call before :func:`flat_parts` are written to.

    The next forward would use what was gathered, and not see what was written.
    """
    for unit in FullyShardedDataParallel.fsdp_modules(module):
        handle = unit._handle
        if handle is not None and handle._training_state.name == "IDLE" and hasattr(handle.flat_param, "_local_shard"):
            _reshard(unit, handle, handle.uses_sharded_strategy)


def flat_elements(part: FlatShard, state: torch.Tensor) -> torch.Tensor | None:
    """The elements on this rank, live and 1-D, of a state tensor that an optimizer keeps for ``part.parameter``.

    ``None`` for a 0-d state such as ``step``: one value, of all parameters that share the flat parameter. Raises
    ``UnsupportedTensorError`` where the state is not of the parameter's shape.
    """
    if state.ndim == 0:
        return None
    if state.shape != part.parameter.shape:
        raise UnsupportedTensorError(
            f"an optimizer state of {part.fqn!r} has shape {list(state.shape)}, the part of the parameter on this rank "
            f"{list(part.parameter.shape)}; under FSDP1 only states with a value for each element can be stored"
        )
    start = part.start_in_shard if isinstance(part.parameter, FlatParameter) else 0
    return state.view(-1)[start : start + part.local.numel()]


def blank_flat_state(part: FlatShard, dtype: torch.dtype) -> torch.Tensor:
    """A state tensor as an optimizer keeps it for ``part.parameter``: zeros, padding included.

    Parameters that share a flat parameter share its states: make one, and fill the :func:`flat_elements` of each.
    """
    return torch.zeros_like(part.parameter, dtype=dtype, requires_grad=False)


def _unit_parts(
    unit: FullyShardedDataParallel, handle: FlatParamHandle, names: dict[nn.Module, list[str]]
) -> Iterator[FlatShard]:
    flat = handle.flat_param
    known = {(info.module, info.param_name): list(names[info.module]) for info in flat._param_infos}
    known = {key: [_join(name, key[1]) for name in owners] for key, owners in known.items()}
    for shared in flat._shared_param_infos:
        same = known[shared.prim_module, shared.prim_param_name]
        same += [_join(name, shared.param_name) for name in names[shared.module]]
    _check_at_rest(handle, next(iter(known.values()))[0])
    mesh_shape, mesh_ranks = _mesh(unit, handle)
    shard, length = flat.detach(), flat._sharded_size.numel()
    begin = handle.rank * length if handle.uses_sharded_strategy else 0
    starts = (start for start, _ in handle._get_flat_param_offsets())
    offsets = itertools.compress(starts, (not padding for padding in flat._is_padding_mask))
    for i, (offset, (fqn, *tied)) in enumerate(zip(offsets, map(dict.fromkeys, known.values()), strict=True)):
        shape, parameter = tuple(flat._shapes[i]), flat._params[i] if flat._params is not None else flat
        low, high = (min(max(edge - begin, 0), length) for edge in (offset, offset + math.prod(shape)))
        local = shard[low:high]
        _check(flat, i, local, fqn)
        yield FlatShard(
            fqn, tuple(tied), parameter, shape, flat.dtype, local, low, offset, length, mesh_shape, mesh_ranks
        )


def _check_at_rest(handle: FlatParamHandle, fqn: str) -> None:
    # Before the first forward there is no _local_shard, and the flat parameter is the shard.
    flat = handle.flat_param
    address = getattr(flat, "_local_shard", flat).data_ptr()
    idle = handle._training_state.name == "IDLE" and not handle._skipped_use_sharded_views
    if not idle or flat.data_ptr() != address:
        raise StateError(
            f"the FSDP1 unit that holds {fqn!r} is not sharded now: save and load between steps, after the backward "
            "and outside of summon_full_params; evaluate under torch.no_grad()"
        )


def _check(flat: FlatParameter, i: int, local: torch.Tensor, fqn: str) -> None:
    if flat._param_extensions[i] is not None:
        raise UnsupportedTensorError(f"{fqn!r} is a DTensor inside FSDP1; shard the model with FSDP2's fully_shard")
    if not torch.empty_strided(flat._shapes[i], flat._strides[i], device="meta").is_contiguous():
        raise UnsupportedTensorError(
            f"{fqn!r} is not laid out row by row, and FSDP1 flattens it as it lies in memory; "
            "make it contiguous() before it is wrapped"
        )
    if flat._params is not None:
        info, parameter = flat._param_infos[i], flat._params[i]
        moved = local.numel() > 0 and parameter.data_ptr() != local.data_ptr()
        if moved or getattr(info.module, info.param_name) is not parameter:
            raise StateError(
                f"{fqn!r} was given other memory than FSDP1's, which takes it over in the next forward only; "
                "change parameters in place, with copy_()"
            )


def _mesh(unit: FullyShardedDataParallel, handle: FlatParamHandle) -> tuple[tuple[int, ...], tuple[int, ...]]:
    # vars(): a missing attribute of the unit would be looked up in the module that it wraps.
    row, rank = dist.get_process_group_ranks(unit.process_group), dist.get_rank()
    replicas, mesh = vars(unit).get("_inter_node_pg"), vars(unit).get("_device_mesh")
    grid = [row]
    if replicas is not None:
        # A rank knows its own groups only: those of a mesh of ranks at equal distances tell the others.
        column = dist.get_process_group_ranks(replicas)
        told = [[other + first - rank for other in row] for first in column]
        grid = told if mesh is None else mesh.mesh.tolist()
    ranks = tuple(itertools.chain(*grid))
    if row not in grid or len({*ranks} & {*range(dist.get_world_size())}) < len(ranks):
        raise UnsupportedTensorError("the process groups of FSDP1's HYBRID_SHARD make no mesh; pass it a device_mesh")
    if not handle.uses_sharded_strategy:
        return (len(ranks), 1), ranks
    return (len(row),) if replicas is None else (len(grid), len(row)), ranks


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
