"""The price of looking for unchanged bytes where there are none: every byte changes between two saves.

The call of an overlapped save is timed with ``incremental=True``, which compares samples with the checkpoint before,
and with ``incremental=False``. Both take turns.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial

import torch

import rankless
from benchmarks.measure import Figure, Table
from benchmarks.parallel import run_on_ranks
from benchmarks.setting import Setting
from benchmarks.states import build_training

#: The contenders, by the value of ``incremental``.
NAMES = {True: "rankless, incremental", False: "rankless, full"}


def measure_dense(setting: Setting) -> Iterator[Table]:
    """Measure one process, and two ranks under FSDP2."""
    for layout, ranks in (("plain", 1), ("FSDP2", 2)):
        yield from run_on_ranks(ranks, setting, partial(_measure_layout, layout))


def _measure_layout(layout: str, setting: Setting) -> list[Table]:
    model, optimizer = build_training(layout, setting.nbytes)
    runs = {
        incremental: rankless.RunDirectory(
            setting.folder / f"{layout}-{incremental}", keep=2, incremental=incremental, staging="overlapped"
        )
        for incremental in NAMES
    }
    seconds: dict[str, list[float]] = {name: [] for name in NAMES.values()}
    order = random.Random(0)
    for number in range(setting.rounds + 3):
        for incremental in order.sample(list(NAMES), len(NAMES)):
            _change_everything(model, optimizer)
            started = time.perf_counter()
            handle = runs[incremental].save(f"step{number}", model, optimizer, async_save=True)
            seconds[NAMES[incremental]].append(time.perf_counter() - started)
            handle.wait()
    figures = {name: Figure(tuple(row[3:])) for name, row in seconds.items()}
    title = f"call of an overlapped save after all bytes have changed, {layout}, {setting.gigabytes}"
    return [Table(title, "s", figures)]


def _change_everything(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
