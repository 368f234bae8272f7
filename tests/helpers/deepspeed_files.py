"""DeepSpeed's files, written with plain torch, and checkpoints that DeepSpeed 0.19.8 wrote.

``write_zero`` divides known tensors as DeepSpeed's documentation and source say, so the tensors are the oracle. The
archive has a checkpoint of each kind, with what the training held when it was saved.
"""

from __future__ import annotations

import enum
import math
import sys
import tarfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

GOLDEN = Path(__file__).parents[1] / "interop/deepspeed/deepspeed.tar.xz"

_SCALERS, _CONFIG = "deepspeed.runtime.fp16.loss_scaler", "deepspeed.runtime.zero.config"

#: What a value of the padding is, which DeepSpeed leaves uninitialized.
GARBAGE = 5.9e36


class _LossScaler:
    """Stands for DeepSpeed's."""

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale, self.dynamic = cur_scale, False


class _ZeroStageEnum(enum.IntEnum):
    """Stands for DeepSpeed's. It is pickled as a call with a number."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


@contextmanager
def deepspeed_modules() -> Iterator[None]:
    """As much of DeepSpeed as a pickle looks for."""
    _LossScaler.__module__, _LossScaler.__qualname__, _LossScaler.__name__ = _SCALERS, "LossScaler", "LossScaler"
    _ZeroStageEnum.__module__, _ZeroStageEnum.__qualname__ = _CONFIG, "ZeroStageEnum"
    _ZeroStageEnum.__name__ = "ZeroStageEnum"
    parts = {name.rsplit(".", number)[0] for name in (_SCALERS, _CONFIG) for number in range(name.count(".") + 1)}
    before = {name: sys.modules.get(name) for name in parts}
    sys.modules |= {name: ModuleType(name) for name in parts}
    sys.modules[_SCALERS].LossScaler = _LossScaler  # type: ignore[attr-defined]
    sys.modules[_CONFIG].ZeroStageEnum = _ZeroStageEnum  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def extract_golden(folder: Path) -> Path:
    with tarfile.open(GOLDEN) as file:
        file.extractall(folder, filter="data")
    return folder


@dataclass
class ZeroSave:
    """A training state, and how DeepSpeed divides it.

    ``states`` are the optimizer's by name and parameter; ``step`` is a tensor or an integer in the states, or with
    ``step_in_groups`` in the groups. ``alignment`` is that of each parameter, in elements.
    """

    masters: Mapping[str, torch.Tensor]
    states: Mapping[str, Mapping[str, torch.Tensor]]
    groups: list[list[str]]
    stage: int = 1
    ranks: int = 2
    dtype: torch.dtype = torch.float32
    step: Any = None
    step_in_groups: bool = False
    settings: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.5})
    elastic: bool = False
    round_robin: bool = False
    alignment: int = 1
    sub_group_size: int = 10**9
    frozen: Mapping[str, torch.Tensor] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    client_state: Mapping[str, Any] = field(default_factory=dict)
    scheduler: Any = None
    save_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def number_groups(self) -> list[list[str]]:
        """The parameters in the order of the flat tensors; of ZeRO-3 by sub-group."""
        if self.stage == 3:
            return [names for group in self.groups for names in self._sub_groups(group)]
        return [self._flat_order(group) for group in self.groups]

    def _flat_order(self, group: list[str]) -> list[str]:
        if not self.round_robin:
            return group
        return [name for first in range(self.ranks) for name in group[first :: self.ranks]]

    def _sub_groups(self, group: list[str]) -> list[list[str]]:
        rows: list[list[str]] = [[]]
        size = 0
        for name in group:
            rows[-1].append(name)
            size += -(-self.masters[name].numel() // self.ranks)
            if size >= self.sub_group_size:
                rows.append([])
                size = 0
        return [row for row in rows if row]


def write_zero(save_dir: Path, save: ZeroSave, tag: str = "global_step7") -> Path:
    """Write a folder as ``DeepSpeedEngine.save_checkpoint`` does, and return the folder of the tag."""
    folder = save_dir / tag
    folder.mkdir(parents=True)
    with deepspeed_modules():
        for rank in range(save.ranks if save.stage == 3 else 1):
            name = f"zero_pp_rank_{rank}_mp_rank_00" if save.stage == 3 else "mp_rank_00"
            torch.save(_model_states(save, rank), folder / f"{name}_model_states.pt", **save.save_options)
        for rank in range(save.ranks):
            path = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            state = _divided_state(save, rank) if save.stage == 3 else _flat_state(save, rank)
            torch.save({"optimizer_state_dict": state, "ds_version": "0.19.8"}, path, **save.save_options)
    (save_dir / "latest").write_text(tag)
    return folder


def _model_states(save: ZeroSave, rank: int) -> dict[str, Any]:
    trained = {name: tensor.to(save.dtype) for name, tensor in save.masters.items()}
    module = {**save.buffers, **trained, **save.frozen}
    fragments: dict[str, torch.Tensor] = dict(save.frozen)
    if save.stage == 3:
        fragments = {name: _share(tensor, rank, save.ranks) for name, tensor in save.frozen.items()}
        module |= {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in {**trained, **save.frozen}.items()}
    module |= {name: module[stored] for name, stored in save.shared.items()}
    shapes = [OrderedDict((name, save.masters[name].shape) for name in group) for group in save.number_groups]
    return {
        "module": OrderedDict(module),
        "buffer_names": list(save.buffers),
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": OrderedDict((name, tensor.shape) for name, tensor in save.frozen.items()),
        "shared_params": dict(save.shared),
        "frozen_param_fragments": OrderedDict(fragments),
        "lr_scheduler": save.scheduler,
        "data_sampler": None,
        "sparse_tensor_module_names": set(),
        "skipped_steps": 1,
        "global_steps": 7,
        "dp_world_size": save.ranks,
        "ds_version": "0.19.8",
        **save.client_state,
    }


def _share(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The part of a tensor that a rank of ZeRO-3 has, with garbage where there is no element."""
    size = -(-tensor.numel() // ranks)
    padded = torch.full((size * ranks,), GARBAGE).to(tensor.dtype)
    padded[: tensor.numel()] = tensor.reshape(-1)
    return padded[rank * size : (rank + 1) * size].clone()


def _paddings(save: ZeroSave, names: list[str]) -> list[int]:
    """The elements of padding after each parameter; none after the last."""
    end, paddings = 0, []
    for name in names:
        end += save.masters[name].numel()
        paddings.append(-end % save.alignment)
        end += paddings[-1]
    return [*paddings[:-1], 0]


def _flatten(save: ZeroSave, names: list[str], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    rows = []
    for name, padding in zip(names, _paddings(save, names), strict=True):
        rows += [tensors[name].reshape(-1), torch.full((padding,), GARBAGE)]
    flat = torch.cat(rows)
    tail = -len(flat) % (2 * save.ranks)
    return torch.cat([flat, torch.full((tail,), GARBAGE)])


def _flat_state(save: ZeroSave, rank: int) -> dict[str, Any]:
    masters, states, tails = [], [], []
    for names in save.number_groups:
        flat = _flatten(save, names, save.masters)
        part = len(flat) // save.ranks
        used = sum(save.masters[name].numel() for name in names) + sum(_paddings(save, names))
        tail = min(part, max(0, (rank + 1) * part - used))
        tails.append(tail)
        masters.append(flat[rank * part : (rank + 1) * part].clone()[: part - tail])
        rows = {
            state: _flatten(save, names, tensors)[rank * part : (rank + 1) * part].clone()
            for state, tensors in save.states.items()
        }
        if save.elastic:
            rows = {state: row[: part - tail] for state, row in rows.items()}
        states.append({**_step_of(save), **rows} if save.states else {})
    base: Any = states if save.elastic else {"state": dict(enumerate(states)), "param_groups": _groups(save)}
    return {
        "loss_scaler": _LossScaler(1.0),
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": masters,
        "zero_stage": _ZeroStageEnum(save.stage),
        "group_paddings": tails,
        "param_alignment_paddings": [_paddings(save, names) for names in save.number_groups],
        "partition_count": [save.ranks] * len(masters),
        **({"base_optimizer_state_step": save.step} if save.elastic and save.step_in_groups else {}),
    }


def _divided_state(save: ZeroSave, rank: int) -> dict[str, Any]:
    def concatenate(names: list[str], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([_share(tensors[name], rank, save.ranks) for name in names])

    states = {
        number: {**_step_of(save), **{state: concatenate(names, row) for state, row in save.states.items()}}
        for number, names in enumerate(save.number_groups)
    }
    return {
        "zero_stage": _ZeroStageEnum(3),
        "loss_scaler": _LossScaler(1.0),
        "partition_count": save.ranks,
        "optimizer_state_dict": {"state": states if save.states else {}, "param_groups": _groups(save)},
        "fp32_flat_groups": [concatenate(names, save.masters) for names in save.number_groups],
    }


def _step_of(save: ZeroSave) -> dict[str, Any]:
    return {} if save.step is None or save.step_in_groups else {"step": save.step}


def _groups(save: ZeroSave) -> list[dict[str, Any]]:
    """The groups of the inner optimizer, whose parameters are the flat tensors."""
    groups, number = [], 0
    for index, names in enumerate(save.groups):
        count = sum(row[0] in names for row in save.number_groups)
        step = {"step": save.step} if save.step_in_groups else {}
        groups.append({**save.settings, "weight_decay": index / 10, **step, "params": [*range(number, number + count)]})
        number += count
    return groups


def random_save(
    shapes: Mapping[str, tuple[int, ...]], groups: list[list[str]], states: tuple[str, ...], **options: Any
) -> ZeroSave:
    """A state of random values, of which no two tensors are alike."""
    generator = torch.Generator().manual_seed(sum(map(math.prod, shapes.values())))

    def draw() -> dict[str, torch.Tensor]:
        return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    return ZeroSave(draw(), {state: draw() for state in states}, groups, **options)
