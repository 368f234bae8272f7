"""Very many tensors: 100,000 of one process, and the parameters of a module with AdamW on one and four ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

import rankless
from benchmarks import peers, raw, states
from benchmarks.measure import Contender, Table, time_interleaved
from benchmarks.parallel import run_on_ranks, run_together
from benchmarks.peers import DCP, OURS, SAFETENSORS, TORCH
from benchmarks.setting import Setting

#: The number of tensors of one process.
_TENSORS = 100_000

#: The number of parameters of the module. AdamW has three tensors for each.
_PARAMETERS = 20_000

#: The numbers of one layer of the module: a weight of 32 x 32 and a bias.
_WIDTH = 32


def measure_many_tensors(setting: Setting) -> Iterator[Table]:
    """Measure 100,000 tensors of 4 KiB."""
    folder, state = setting.folder, states.build_small_tensors(_TENSORS)
    every = peers.build_saves(folder, state)
    saves = {name: every[name] for name in (OURS, TORCH, SAFETENSORS, DCP)}
    case = f"{_TENSORS:,} x 4 KiB, one process"
    yield time_interleaved(saves, setting.rounds).build_table(f"save, {case}")
    loads = {name: peers.make_cold(folder, load) for name, load in peers.build_loads(folder, state).items()}
    yield time_interleaved(loads, setting.rounds).build_table(f"load, {case}")


def measure_many_parameters(setting: Setting) -> Iterator[Table]:
    """Measure a module of 20,000 parameters with AdamW on one rank, and sharded by FSDP2 over four."""
    for ranks in (1, 4):
        yield from run_on_ranks(ranks, setting, _measure_parameters)
        raw.empty_directory(setting.folder)


def _measure_parameters(setting: Setting) -> list[Table]:
    folder, (model, optimizer) = setting.folder, _build_training()
    state = states.list_tensors(model, optimizer)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    saves = {
        OURS: peers.make_fresh(
            folder / OURS, lambda path: rankless.save_checkpoint(path, "s", model, optimizer, rng=False)
        ),
        DCP: peers.build_dcp_saves(folder, state)[DCP],
    }
    loads: dict[str, Callable[[], object]] = {
        OURS: lambda: rankless.load_checkpoint(folder / OURS, model=model, optimizer=optimizer),
        DCP: lambda: dcp.load(dict(target), checkpoint_id=folder / DCP),
    }
    cold: dict[str, Contender] = {name: peers.make_cold(folder, load) for name, load in loads.items()}
    case = f"{_PARAMETERS:,} parameters with AdamW, {dist.get_world_size()} rank(s)"
    time = partial(time_interleaved, rounds=setting.rounds)
    return [
        time(run_together(saves)).build_table(f"save, {case}"),
        time(run_together(cold)).build_table(f"load, {case}"),
    ]


def _build_training() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the module and its AdamW after a step."""
    torch.manual_seed(0)  # replicas must be equal
    model: nn.Module = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_PARAMETERS // 2)))
    if dist.get_world_size() > 1:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer
