"""Fine-tuning: a frozen base in bfloat16, and adapters with AdamW of a hundredth of the checkpoint's bytes.

Each save comes after a step that changes all adapters and their moments. It is compared with a full save and with other
systems, which all write everything. The tables also have the bytes that one save writes, as the kernel counts them, and
the disk space of ten checkpoints.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import rankless
from benchmarks import peers, raw, states
from benchmarks.measure import Contender, Figure, Table, time_interleaved
from benchmarks.parallel import run_on_ranks, run_together
from benchmarks.setting import Setting

#: Layouts, with the number of ranks.
CASES = (("plain", 1), ("FSDP2", 2), ("FSDP2", 4), ("TP", 2))

#: The contenders: a full save, the default, and the default with files for the frozen parameters.
FULL, MIXED, APART = "rankless, full", "rankless", 'rankless, frozen="apart"'

#: The bytes of a trained parameter: itself and two moments, in float32.
_TRAINED_BYTES = 12

#: The number of checkpoints whose disk space is measured.
_CHECKPOINTS = 10


class AdaptedBlock(states.Block):
    """A frozen layer in bfloat16 with an adapter of ``rank`` rows in float32."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__(width)
        self.to(torch.bfloat16).requires_grad_(requires_grad=False)
        self.adapter = nn.ModuleDict({"a": nn.Linear(width, rank, bias=False), "b": nn.Linear(rank, width, bias=False)})


class Adapted(nn.Module):
    """A model of about ``nbytes`` of frozen parameters."""

    def __init__(self, nbytes: int, width: int = 2048) -> None:
        super().__init__()
        frozen = 2 * sum(parameter.numel() for parameter in states.Block(width).parameters())
        rank = max(1, frozen // 99 // (2 * width * _TRAINED_BYTES))
        self.layers = nn.ModuleList(AdaptedBlock(width, rank) for _ in range(max(1, nbytes // frozen)))


def measure_incremental(setting: Setting) -> Iterator[Table]:
    """Measure each layout."""
    for layout, ranks in CASES:
        yield from run_on_ranks(ranks, setting, partial(_measure_layout, layout))
        raw.empty_directory(setting.folder)


def _measure_layout(layout: str, setting: Setting) -> list[Table]:
    torch.manual_seed(0)  # replicas must be equal
    model = _shard_model(Adapted(setting.nbytes), layout)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    state = states.list_tensors(model, optimizer)
    run = partial(_Run, setting.folder, model, optimizer)
    runs = {FULL: run(FULL, incremental=False), MIXED: run(MIXED), APART: run(APART, frozen="apart")}
    for one in runs.values():
        one.save()
        one.save()
    saves = {name: _save_after_training(one) for name, one in runs.items()}
    build_others = peers.build_saves if layout == "plain" else peers.build_dcp_saves
    others = {name: save for name, save in build_others(setting.folder, state).items() if name != peers.OURS}
    case = f"{layout}, {dist.get_world_size()} ranks, {setting.gigabytes} frozen"
    clock = time_interleaved({**saves, **run_together(others)}, setting.rounds)
    return [
        clock.build_table(f"save of adapters and base, {case}"),
        *_measure_bytes(runs, case),
        *(_measure_stalls(runs, case, setting.rounds, staging) for staging in ("eager", "overlapped")),
    ]


def _save_after_training(run: _Run) -> Contender:
    """Return a contender that trains on all ranks, untimed, and saves."""

    def train() -> None:
        run.train()
        dist.barrier()

    def save() -> None:
        run.save()
        dist.barrier()

    return Contender(save, train)


class _Run:
    """Saves of one state into a run directory."""

    def __init__(
        self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, name: str, **options: object
    ) -> None:
        self.path = folder / name
        self._model, self._optimizer = model, optimizer
        self._checkpointer = rankless.RunDirectory(self.path, keep=2, **options)  # type: ignore[arg-type]
        self._number = 0

    def train(self) -> None:
        """Change the adapters and their moments."""
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, float(self._number + 1))
        self._optimizer.step()
        self._optimizer.zero_grad()

    def save(self, *, keep: int = 2, staging: str | None = None) -> Callable[[], object]:
        """Save the state under a new tag, asynchronously if ``staging`` is given. Return a function that waits."""
        self._number += 1
        saved = self._checkpointer.save(
            f"step_{self._number:03d}",
            self._model,
            self._optimizer,
            keep=keep,
            async_save=staging is not None,
            staging=staging or "eager",
            rng=False,
        )
        return saved.wait


def _measure_bytes(runs: Mapping[str, _Run], case: str) -> Iterator[Table]:
    """Measure the bytes that one save of all ranks writes, and the disk space of ten checkpoints."""
    written: dict[str, Figure] = {}
    space: dict[str, Figure] = {}
    for name, run in runs.items():
        run.train()
        before = _written_bytes()
        run.save()
        written[name] = Figure((float(_written_bytes() - before),))
        for _ in range(_CHECKPOINTS):
            run.train()
            run.save(keep=_CHECKPOINTS)
        dist.barrier()
        space[name] = Figure((float(_used_bytes(run.path)),))
        run.save(keep=1)
    yield Table(f"bytes written by one save, {case}", "bytes", written)
    yield Table(f"disk space of {_CHECKPOINTS} checkpoints, {case}", "bytes", space)


def _measure_stalls(runs: Mapping[str, _Run], case: str, rounds: int, staging: str) -> Table:
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    for _ in range(rounds + 1):
        for name in order.sample(list(runs), len(runs)):
            runs[name].train()
            dist.barrier()
            started = time.perf_counter()
            wait = runs[name].save(staging=staging)
            times[name].append(time.perf_counter() - started)
            wait()
            dist.barrier()
    figures = {name: Figure(tuple(seconds[1:])) for name, seconds in times.items()}
    return Table(f"stall of an asynchronous save ({staging}) of adapters and base, {case}", "s", figures)


def _written_bytes() -> int:
    """Return the bytes that all ranks have written to disks, or made the kernel write."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    counts = dict(line.split(": ") for line in lines)
    written = torch.tensor(int(counts["write_bytes"]))
    dist.all_reduce(written)
    return int(written)


def _used_bytes(path: Path) -> int:
    """Return the disk space of a directory, each shared file counted once."""
    du = shutil.which("du") or "du"
    return int(subprocess.check_output([du, "-s", "--block-size=1", path], text=True).split()[0])


def _shard_model(model: Adapted, layout: str) -> nn.Module:
    """Shard the model in place, and return it."""
    if layout == "plain":
        return model
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if layout == "FSDP2":
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    columns, rows = ("q", "k", "v", "gate", "up"), ("o", "down")
    plan: dict[str, ParallelStyle] = {f"layers.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"layers.*.{name}": RowwiseParallel() for name in rows}
    return parallelize_module(model, mesh, plan)
