"""Opening an engine: this rank's part of each parameter, and the tensors that hold it.

Source: ``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py``, ``runtime/bf16_optimizer.py`` and
``runtime/fp16`` of DeepSpeed 0.19.8.

:mod:`rankless.deepspeed.engine_calls` opens an engine on each rank. The places of parameters are DeepSpeed's: a wrong
one would store the elements of another parameter.
"""
# ruff: noqa: SLF001 - DeepSpeed has no public interface for the flat tensors of its optimizers

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from rankless.deepspeed.engine_state import EngineState, WeightCopy
from rankless.errors import InvalidArgumentError, StateError
from rankless.state.model.flat_model import FlatModel
from rankless.state.model.flat_shards import FlatShard
from rankless.state.model.fsdp1 import named_modules


@dataclass(frozen=True)
class RankPlace:
    """The place of this rank among the ranks that share a flat tensor; all have all of it if ``is_replicated``."""

    rank: int
    ranks: tuple[int, ...]
    is_replicated: bool = False


@dataclass(frozen=True)
class FlatGroup:
    """A flat tensor. Each rank has a part of it.

    Attributes:
        flat: The part of this rank, which its optimizer holds.
        length: The number of elements of each rank's part of the divided group of parameters, or of one parameter.
        place: The place of this rank.
        start: The offset in ``flat`` of the divided group or parameter.
    """

    flat: torch.Tensor
    length: int
    place: RankPlace
    start: int = 0

    def make_shard(self, names: Sequence[str], shape: tuple[int, ...], offset: int) -> FlatShard:
        """Return the shard of a parameter that begins at element ``offset`` of the divided group."""
        first = self.place.rank * self.length
        low, high = (min(max(edge - first, 0), self.length) for edge in (offset, offset + math.prod(shape)))
        low, high = self.start + low, self.start + high
        name, *tied = names
        ranks = self.place.ranks
        mesh_shape = (len(ranks), 1) if self.place.is_replicated else (len(ranks),)
        local = self.flat.detach()[low:high]
        return FlatShard(
            name,
            tuple(tied),
            self.flat,
            shape,
            local.dtype,
            local,
            low,
            offset,
            self.length,
            mesh_shape,
            ranks,
        )


#: The names of each parameter, by its identity.
_Names = Mapping[int, list[str]]


def open_engine(engine: Any) -> EngineState:
    """Return the state of an engine. Use it as a context manager: ZeRO-3 gathers parameters again at its end.

    Raises ``StateError`` if the engine has a form that rankless does not store, and ``InvalidArgumentError`` if it is
    no engine.

    Each rank calls it in the vote "reading the engine's state" of a save or load.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise InvalidArgumentError(f"pass the engine that deepspeed.initialize returned; got {type(engine).__name__}")
    _check_engine(engine)
    for kind, view in _VIEWS.items():
        if type(engine.optimizer) is kind:
            return view(engine, _name_parameters(engine.module))
    if isinstance(engine.optimizer, torch.optim.Optimizer):
        return EngineState(FlatModel(engine.module, []), engine.optimizer)
    raise StateError(
        f"the engine's optimizer is a {type(engine.optimizer).__name__}, whose state rankless does not know: use "
        "engine.save_checkpoint"
    )


def _check_engine(engine: Any) -> None:
    problems = {
        "a PipelineEngine": isinstance(engine, PipelineEngine),
        "experts (deepspeed.moe, AutoEP)": engine.has_moe_layers,
        "tensor parallelism": engine.mp_world_size > 1,
        "curriculum learning": engine.curriculum_learning_enabled(),
        "random-LTD": engine.random_ltd_enabled(),
        "a gradient scaler of torch.autocast": getattr(engine.optimizer, "torch_autocast_gradscaler", None) is not None,
        "no optimizer": engine.optimizer is None,
    }
    for what, is_there in problems.items():
        if is_there:
            raise StateError(
                f"the engine has {what}, which rankless does not store: use engine.save_checkpoint (rankless reads its "
                "files)"
            )
    if engine.micro_steps % engine.gradient_accumulation_steps():
        raise StateError(
            f"the engine has accumulated the gradients of {engine.micro_steps % engine.gradient_accumulation_steps()} "
            "micro-steps, which are not stored: save and load right after a step of the optimizer"
        )
    if getattr(engine.optimizer, "offloaded_states", None):
        raise StateError("the engine's states are offloaded: call engine.reload_states() first")


def _name_parameters(module: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for prefix, submodule in named_modules(module):
        for key, parameter in submodule._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), []).append(f"{prefix}.{key}" if prefix else key)
    return names


def _find_names(names: _Names, parameter: torch.Tensor) -> list[str]:
    if id(parameter) not in names:
        raise StateError(
            f"the optimizer trains a parameter of the shape {list(getattr(parameter, 'ds_shape', parameter.shape))} "
            "that the engine's module does not have: remove it from the optimizer"
        )
    return names[id(parameter)]


def _place_of(group: Any) -> RankPlace:
    """Return the place of this rank in a process group. Raises ``StateError`` if it is not of all ranks."""
    if dist.get_world_size(group) != dist.get_world_size():
        raise StateError(
            f"ZeRO divides parameters among {dist.get_world_size(group)} of {dist.get_world_size()} ranks (MiCS, or "
            "model parallelism), which rankless does not store: use engine.save_checkpoint"
        )
    return RankPlace(dist.get_rank(group), tuple(dist.get_process_group_ranks(group)))


def _view_stage12(engine: Any, names: _Names) -> EngineState:
    optimizer = engine.optimizer
    groups = []
    for number, flat in enumerate(optimizer.single_partition_of_fp32_groups):
        parameters = optimizer.round_robin_bit16_groups[number]
        offsets = dict(zip(map(id, parameters), optimizer.round_robin_bit16_offsets[number], strict=True))
        place = _place_of(optimizer.real_dp_process_group[number])
        group = FlatGroup(flat, int(optimizer.partition_size[number]), place)
        groups += [(group, parameter, offsets[id(parameter)]) for parameter in optimizer.bit16_groups[number]]
    return _join_flat_groups(engine, names, groups)


def _view_bf16(engine: Any, names: _Names) -> EngineState:
    optimizer = engine.optimizer
    groups = []
    for number, flat in enumerate(optimizer.fp32_groups_flat_partition):
        group = FlatGroup(flat, flat.numel(), _place_of(optimizer.real_dp_process_group[number]))
        parameters = optimizer.bf16_groups[number]
        groups += [(group, parameter, offset) for parameter, offset in _iterate_offsets(parameters)]
    return _join_flat_groups(engine, names, groups)


def _iterate_offsets(parameters: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, int]]:
    offset = 0
    for parameter in parameters:
        yield parameter, offset
        offset += parameter.numel()


def _join_flat_groups(engine: Any, names: _Names, groups: list[tuple[FlatGroup, Any, int]]) -> EngineState:
    optimizer = engine.optimizer
    shards, copies = [], []
    for group, parameter, offset in groups:
        shard = group.make_shard(_find_names(names, parameter), tuple(parameter.shape), offset)
        shards.append(shard)
        start = max(0, group.place.rank * group.length - offset)
        weight = parameter.detach().view(-1)[start : start + shard.local.numel()]
        copies.append(WeightCopy(shard.fqn, shard.local, weight))

    def update_weights() -> None:
        optimizer.update_lp_params()
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()

    return EngineState(FlatModel(engine.module, shards), optimizer.optimizer, copies, update_weights)


def _view_stage3(engine: Any, names: _Names) -> EngineState:
    optimizer = engine.optimizer
    if optimizer.swap_optimizer or optimizer.params_in_nvme_and_cpu:
        raise StateError(
            "ZeRO-3 has the optimizer or the parameters on NVMe, from where rankless does not read them: offload to "
            "the CPU, or use engine.save_checkpoint"
        )
    if getattr(optimizer, "partial_offload", 1.0) < 1.0 and optimizer.offload_optimizer:
        raise StateError("a part of the optimizer is offloaded (ratio), which rankless does not store: offload all")
    place = _place_of(optimizer.dp_process_group)
    optimizer.checkpoint_event_prologue()
    shards: list[FlatShard] = []
    copies: list[WeightCopy] = []
    for parameters, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        offset = 0
        for parameter in parameters:
            part = parameter.partition_numel()
            group = FlatGroup(flat, part, place, start=offset)
            shards.append(group.make_shard(_find_names(names, parameter), tuple(parameter.ds_shape), 0))
            weight = parameter.ds_tensor.detach().view(-1)[: shards[-1].local.numel()]
            copies.append(WeightCopy(shards[-1].fqn, shards[-1].local, weight))
            offset += part
    trained = {shard.fqn for shard in shards}
    shards += _view_untrained(engine.module, names, trained, place)

    def update_weights() -> None:
        for number in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)

    def begin() -> None:
        optimizer._set_fp32_optimizer_param_groups()

    def end() -> None:
        optimizer._clear_fp32_optimizer_param_groups()
        optimizer.checkpoint_event_epilogue()

    model = FlatModel(engine.module, shards)
    return EngineState(model, optimizer.optimizer, copies, update_weights, begin, end)


def _view_untrained(module: nn.Module, names: _Names, trained: set[str], place: RankPlace) -> Iterator[FlatShard]:
    """Yield the divided parameters of ZeRO-3 that the optimizer does not train."""
    parameters: Iterator[Any] = module.parameters()  # DeepSpeed adds attributes to them
    for parameter in parameters:
        own_names = _find_names(names, parameter)
        if own_names[0] in trained or not hasattr(parameter, "ds_tensor"):
            continue
        tensor = parameter.ds_tensor
        part = parameter.partition_numel()
        if tensor.dtype != parameter.dtype or tensor.numel() < min(part, math.prod(parameter.ds_shape)):
            raise StateError(
                f"the frozen parameter {own_names[0]!r} is quantized or on NVMe, which rankless does not store: use "
                "engine.save_checkpoint"
            )
        flat = tensor.detach().view(-1)
        yield FlatGroup(flat, part, place).make_shard(own_names, tuple(parameter.ds_shape), 0)


def _view_unfused(engine: Any, names: _Names) -> EngineState:
    optimizer = engine.optimizer
    pairs = [
        (_find_names(names, weight), master, weight)
        for masters, weights in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True)
        for master, weight in zip(masters, weights, strict=True)
    ]

    def update_weights() -> None:
        for _, master, weight in pairs:
            weight.data.copy_(master.data)

    replaced = {own_names[0]: master for own_names, master, _ in pairs}
    tied = {alias: own_names[0] for own_names, *_ in pairs for alias in own_names[1:]}
    copies = [WeightCopy(own_names[0], master.detach(), weight.detach()) for own_names, master, weight in pairs]
    model = FlatModel(engine.module, [], replaced, tied)
    return EngineState(model, optimizer.optimizer, copies, update_weights)


def _view_fused(engine: Any, names: _Names) -> EngineState:
    optimizer = engine.optimizer
    shards, copies = [], []
    everywhere = RankPlace(0, tuple(range(dist.get_world_size())), is_replicated=True)
    for flat, weights in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True):
        group = FlatGroup(flat, flat.numel(), everywhere)
        for weight, offset in _iterate_offsets(weights):
            shards.append(group.make_shard(_find_names(names, weight), tuple(weight.shape), offset))
            copies.append(WeightCopy(shards[-1].fqn, shards[-1].local, weight.detach().view(-1)))

    def update_weights() -> None:
        for copy in copies:
            copy.weight.copy_(copy.master)

    return EngineState(FlatModel(engine.module, shards), optimizer.optimizer, copies, update_weights)


#: How the state of an engine is found, by the class of its optimizer.
_VIEWS: Mapping[type, Callable[[Any, _Names], EngineState]] = {
    DeepSpeedZeroOptimizer: _view_stage12,
    DeepSpeedZeroOptimizer_Stage3: _view_stage3,
    BF16_Optimizer: _view_bf16,
    FP16_UnfusedOptimizer: _view_unfused,
    FP16_Optimizer: _view_fused,
}
