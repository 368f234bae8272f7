"""A training loop that saves in the background: the time of 50 steps, against the same steps without saves.

It saves every 10 steps. The training uses one CPU core, or all of them, so that saves have none to themselves.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import rankless
from benchmarks import raw
from benchmarks.measure import Contender, SelfTimed, Table, time_interleaved
from benchmarks.peers import DCP, OURS
from benchmarks.setting import Setting

STEPS, EVERY = 50, 10
WIDTH, BATCH = 2048, 96

#: The bytes of a layer with AdamW, and the most layers (0.6 GB): larger steps take too long on a CPU.
_LAYER, _MOST = 12 * (WIDTH + 1) * WIDTH, 12

#: The lower limit of a loop that saves.
NO_SAVES = "no saves"


@dataclass(frozen=True)
class Saver:
    """A way to save into a directory at a step, and to wait for the last save."""

    save: Callable[[Path, int], object]
    finish: Callable[[], object] = lambda: None


def measure_loop(setting: Setting) -> Iterator[Table]:
    """Measure with and without free CPU cores."""
    layers = max(1, min(_MOST, setting.nbytes // _LAYER))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    size = f"{layers * _LAYER / 1e9:.1f} GB"
    before = torch.get_num_threads()
    for free, threads in (("one processor trains", 1), ("all processors train", os.cpu_count() or 1)):
        torch.set_num_threads(threads)
        clock = time_interleaved(_build_contenders(setting.folder, model, optimizer), setting.rounds)
        yield clock.build_table(f"loop of {STEPS} steps, a save every {EVERY}, {size}, {free}", (NO_SAVES,))
    torch.set_num_threads(before)


def _build_contenders(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Contender]:
    peer = DcpSaver(model, optimizer)
    savers = {
        NO_SAVES: Saver(lambda *_: None),
        OURS: Saver(partial(_save_rankless, model, optimizer, "eager"), rankless.finalize),
        f"{OURS}, overlapped": Saver(partial(_save_rankless, model, optimizer, "overlapped"), rankless.finalize),
        DCP: Saver(peer.save, peer.finish),
    }
    return {
        name: Contender(
            partial(_time_steps, saver, folder / name, model, optimizer), partial(raw.remove_path, folder / name)
        )
        for name, saver in savers.items()
    }


def _time_steps(saver: Saver, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> SelfTimed:
    """Time the steps, without waiting for the save after the last one."""
    started = time.perf_counter()
    _train_steps(model, optimizer, partial(saver.save, folder))
    timed = SelfTimed(time.perf_counter() - started)
    saver.finish()
    return timed


def _save_rankless(model: nn.Module, optimizer: torch.optim.Optimizer, staging: str, path: Path, step: int) -> None:
    rankless.save_checkpoint(path, f"step_{step}", model, optimizer, async_save=True, staging=staging)


class DcpSaver:
    """``dcp.async_save``, whose caller waits for the previous save."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._before: Future[object] | None = None

    def save(self, path: Path, step: int) -> None:
        """Start a save."""
        self.finish()
        state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        begun = dcp.async_save(state, checkpoint_id=path / f"step_{step}")
        self._before = begun if isinstance(begun, Future) else None

    def finish(self) -> None:
        """Wait for the previous save."""
        if self._before is not None:
            self._before.result()


def _train_steps(model: nn.Module, optimizer: torch.optim.Optimizer, save: Callable[[int], object]) -> None:
    data = torch.ones(BATCH, WIDTH)
    for step in range(1, STEPS + 1):
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            save(step)
