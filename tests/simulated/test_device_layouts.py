"""Tests that every layout of shards on an accelerator gives the files that it gives in memory, and loads them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import rankless
from tests.helpers.layout_checkpoints import assert_same_files, save_layout
from tests.helpers.layouts import (
    LAYOUTS,
    LayoutRun,
    Net,
    blank_run,
    fill_run,
    local_tensor,
    make_mesh,
    make_run,
    named_tensors,
    shard_fsdp2,
)
from tests.helpers.pairwise import first_of
from tests.helpers.simulated.streams import SCHEDULER, at_random
from tests.simulated.conftest import DeviceRanks

#: The first six are those of ``make test``: of each kind of shards one, and a pipeline.
CASES = [
    ("plain", 2),
    ("fsdp", 3),
    ("mixed", 2),
    ("tp", 3),
    ("hsdp_tp", 4),
    ("pp_fsdp", 4),
    ("plain", 1),
    ("fsdp", 1),
    ("hsdp", 4),
    ("tp", 2),
    ("fsdp_tp", 4),
    ("pp", 2),
]


def fsdp(**options: Any) -> LayoutRun:
    """FSDP2 over a mesh of CPUs: without one, torch makes one of its accelerator, for which there is no gloo."""
    return make_run(shard_fsdp2(Net(), make_mesh(dist.get_world_size(), names=("shard",)), **options))


MADE = {name: make for name, (make, _) in LAYOUTS.items()} | {
    "fsdp": fsdp,
    "mixed": partial(fsdp, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
}


def move(run: LayoutRun, *, keep_states: bool = False) -> LayoutRun:
    """Move the shards of a run to the device. ``keep_states``: but not those of the optimizer."""
    for part in run.parts:
        for module in part.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = move_tensor(tensor)
    if not keep_states:
        for optimizer in run.optimizers:
            for states in optimizer.state.values():
                for name in states.keys() - {"step"}:
                    states[name] = move_tensor(states[name])
    return run


def move_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the device: the same object, so that it stays the optimizer's."""
    if isinstance(tensor, DTensor):
        tensor._local_tensor = tensor._local_tensor.to("sim")
        return tensor
    if not isinstance(tensor, torch.nn.Parameter):
        return tensor.to("sim")
    torch.utils.swap_tensors(tensor, torch.nn.Parameter(tensor.detach().to("sim"), tensor.requires_grad))
    return tensor


def set_late(run: LayoutRun) -> None:
    """Let all tensors have other values until the device has run what is enqueued."""
    moved = [local for _, tensor in named_tensors(run) if (local := local_tensor(tensor).detach()).device.type == "sim"]
    values = [tensor.clone() for tensor in moved]
    for tensor in moved:
        tensor.fill_(-1)
    SCHEDULER.run_all()
    for tensor, value in zip(moved, values, strict=True):
        tensor.copy_(value)


def save_moved(path: str, layout: str, staging: str, keep_states: bool) -> None:
    run = move(fill_run(MADE[layout]()), keep_states=keep_states)
    set_late(run)
    SCHEDULER.order = at_random(7)
    content = {"user_content": {"a": 1}, "max_shard_size": 4000}
    if staging == "synchronous":
        rankless.save_checkpoint(path, "s", run.model, run.optimizer, **content)
        return
    save = rankless.save_checkpoint(path, "s", run.model, run.optimizer, **content, async_save=True, staging=staging)
    if staging == "eager":
        for _, tensor in named_tensors(run):
            local_tensor(tensor).detach().fill_(-1)
    save.wait()


def in_turns(values: list[str], name: str) -> pytest.MarkDecorator:
    """Parametrize a test by all cases and values; ``make test`` runs the first six, with the values in turns."""
    every = [(*case, value) for case in CASES for value in values]
    by_day = [(*case, values[number % len(values)]) for number, case in enumerate(CASES[:6])]
    return first_of(6, ("layout", "n", name), [*by_day, *(case for case in every if case not in by_day)])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    save_layout(str(path), "plain")
    return path


@in_turns(["synchronous", "eager", "overlapped"], "staging")
def test_files_are_those_of_shards_in_memory(
    device_ranks: DeviceRanks, tmp_path: Path, expected: Path, layout: str, n: int, staging: str
) -> None:
    device_ranks(n, save_moved, str(tmp_path), layout, staging, False)
    assert_same_files(layout, tmp_path, expected)


@pytest.mark.parametrize("staging", ["synchronous", "eager", "overlapped"])
def test_files_are_the_same_if_states_are_kept_in_memory(
    device_ranks: DeviceRanks, tmp_path: Path, expected: Path, staging: str
) -> None:
    device_ranks(2, save_moved, str(tmp_path), "fsdp", staging, True)
    assert_same_files("fsdp", tmp_path, expected)


def load_moved(path: str, layout: str, share_reads: str) -> list[str]:
    run = move(blank_run(fill_run(MADE[layout]())))
    SCHEDULER.order = at_random(7)
    rankless.load_checkpoint(path, model=run.model, optimizer=run.optimizer, share_reads=share_reads)
    oracle = dict(named_tensors(fill_run(MADE[layout]())))
    return [
        name
        for name, tensor in named_tensors(run)
        if not torch.equal(local_tensor(tensor).cpu(), local_tensor(oracle[name]))
    ]


@in_turns(["never", "always"], "share_reads")
def test_every_layout_loads_them(
    device_ranks: DeviceRanks, expected: Path, layout: str, n: int, share_reads: str
) -> None:
    assert device_ranks(n, load_moved, str(expected), layout, share_reads) == [[]] * n
