"""FSDP1 (``FullyShardedDataParallel``): its flat parameters are read and filled in place, without communication.

FSDP1 concatenates the parameters of a unit into a flat parameter and divides that into shards of equal length, so a
rank holds one contiguous range of each. ``state_dict()`` of such a model gathers; nothing here calls it. Source:
``torch/distributed/fsdp/_flat_param.py``; torch makes none of this public.

:mod:`rankless.state.model.model_traversal` views such models on each rank, for saves and loads; a load calls
:func:`reshard` while it matches. Nothing here may communicate.
"""
# ruff: noqa: SLF001

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParameter, FlatParamHandle
from torch.distributed.fsdp._runtime_utils import _reshard

from rankless.errors import StateError, UnsupportedTensorError
from rankless.state.mesh_order import order_mesh
from rankless.state.model.flat_shards import FlatShard
from rankless.state.model.wrapper_modules import wrapped_name


def uses_fsdp1(module: nn.Module) -> bool:
    """Return whether FSDP1 wraps a module or one of its submodules."""
    return any(isinstance(submodule, FullyShardedDataParallel) for submodule in module.modules())


def named_modules(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield every module under its clean name, at each of its paths, in the order of ``state_dict``; wrappers too."""
    yield name, module
    for child_name, child in module._modules.items():
        if child is not None:
            yield from named_modules(
                child, name if child_name == wrapped_name(module) else _join_names(name, child_name)
            )


def flat_shards(module: nn.Module) -> Iterator[FlatShard]:
    """Yield every parameter that FSDP1 manages in a module, each once, in the same order on all ranks.

    Raises ``StateError`` inside a forward, a backward or ``summon_full_params``, and ``UnsupportedTensorError`` if a
    parameter is not contiguous in row-major order or is a DTensor.
    """
    names: dict[nn.Module, list[str]] = {}
    for name, submodule in named_modules(module):
        names.setdefault(submodule, []).append(name)
    for unit in names:
        if isinstance(unit, FullyShardedDataParallel) and unit._handle is not None:
            yield from _unit_shards(unit, unit._handle, names)


def reshard(module: nn.Module) -> None:
    """Free the gathered parameters that a forward without a backward left.

    Call it before :func:`flat_shards` are written to. Otherwise the next forward would use the gathered parameters,
    without the values written.
    """
    for unit in FullyShardedDataParallel.fsdp_modules(module):
        handle = unit._handle
        if handle is not None and handle._training_state.name == "IDLE" and hasattr(handle.flat_param, "_local_shard"):
            _reshard(unit, handle, handle.uses_sharded_strategy)


def _unit_shards(
    unit: FullyShardedDataParallel, handle: FlatParamHandle, names: dict[nn.Module, list[str]]
) -> Iterator[FlatShard]:
    flat = handle.flat_param
    fqns = {(info.module, info.param_name): list(names[info.module]) for info in flat._param_infos}
    fqns = {key: [_join_names(name, key[1]) for name in owners] for key, owners in fqns.items()}
    for shared in flat._shared_param_infos:
        aliases = fqns[shared.prim_module, shared.prim_param_name]
        aliases += [_join_names(name, shared.param_name) for name in names[shared.module]]
    _check_resharded(handle, next(iter(fqns.values()))[0])
    mesh_shape, mesh_ranks = _unit_mesh(unit, handle)
    flat_shard, length = flat.detach(), flat._sharded_size.numel()
    shard_start = handle.rank * length if handle.uses_sharded_strategy else 0
    starts = (start for start, _ in handle._get_flat_param_offsets())
    offsets = itertools.compress(starts, (not padding for padding in flat._is_padding_mask))
    for i, (offset, (fqn, *tied)) in enumerate(zip(offsets, map(dict.fromkeys, fqns.values()), strict=True)):
        shape, parameter = tuple(flat._shapes[i]), flat._params[i] if flat._params is not None else flat
        low, high = (min(max(edge - shard_start, 0), length) for edge in (offset, offset + math.prod(shape)))
        local = flat_shard[low:high]
        _check_parameter(flat, i, local, fqn)
        yield FlatShard(
            fqn, tuple(tied), parameter, shape, flat.dtype, local, low, offset, length, mesh_shape, mesh_ranks
        )


def _check_resharded(handle: FlatParamHandle, fqn: str) -> None:
    # Before the first forward there is no _local_shard, and the flat parameter is the shard.
    flat = handle.flat_param
    address = getattr(flat, "_local_shard", flat).data_ptr()
    idle = handle._training_state.name == "IDLE" and not handle._skipped_use_sharded_views
    if not idle or flat.data_ptr() != address:
        raise StateError(
            f"the FSDP1 unit that holds {fqn!r} is not sharded now: save and load between steps, after the backward "
            "and outside of summon_full_params; evaluate under torch.no_grad()"
        )


def _check_parameter(flat: FlatParameter, i: int, local: torch.Tensor, fqn: str) -> None:
    if flat._param_extensions[i] is not None:
        raise UnsupportedTensorError(f"{fqn!r} is a DTensor inside FSDP1; shard the model with FSDP2's fully_shard")
    if not torch.empty_strided(flat._shapes[i], flat._strides[i], device="meta").is_contiguous():
        raise UnsupportedTensorError(
            f"{fqn!r} is not in row-major order, and FSDP1 flattens it in memory order; "
            "make it contiguous() before you wrap the model"
        )
    if flat._params is not None:
        info, parameter = flat._param_infos[i], flat._params[i]
        is_replaced = local.numel() > 0 and parameter.data_ptr() != local.data_ptr()
        if is_replaced or getattr(info.module, info.param_name) is not parameter:
            raise StateError(
                f"{fqn!r} was assigned memory outside of FSDP1's flat parameter, which FSDP1 copies only in the next "
                "forward; change parameters in place, with copy_()"
            )


def _unit_mesh(unit: FullyShardedDataParallel, handle: FlatParamHandle) -> tuple[tuple[int, ...], tuple[int, ...]]:
    # vars(): FSDP1 looks up attributes that the unit lacks in the module that it wraps.
    row, rank = dist.get_process_group_ranks(unit.process_group), dist.get_rank()
    replicas, mesh = vars(unit).get("_inter_node_pg"), vars(unit).get("_device_mesh")
    grid = [row]
    if replicas is not None:
        # A rank knows only its own groups. The others follow if the ranks of the mesh are at equal distances.
        column = dist.get_process_group_ranks(replicas)
        inferred = [[other + first - rank for other in row] for first in column]
        grid = inferred if mesh is None else _order_grid(mesh)
    ranks = tuple(itertools.chain(*grid))
    if row not in grid or len({*ranks} & {*range(dist.get_world_size())}) < len(ranks):
        raise UnsupportedTensorError(
            "the process groups of FSDP1's HYBRID_SHARD do not form a mesh; pass it a device_mesh"
        )
    if not handle.uses_sharded_strategy:
        return (len(ranks), 1), ranks
    return (len(row),) if replicas is None else (len(grid), len(row)), ranks


def _order_grid(mesh: DeviceMesh) -> list[list[int]]:
    """Return the ranks of a mesh of HYBRID_SHARD: the shards of each row in the order of their process group."""
    ordered = order_mesh(mesh, frozenset({1}), "a parameter under FSDP1")
    width = ordered.shape[1]
    return [list(ordered.ranks[start : start + width]) for start in range(0, len(ordered.ranks), width)]


def _join_names(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
