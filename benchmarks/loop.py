"""``python -m benchmarks.loop``: how much slower a training loop is for saving in the background.

50 steps of a model that with AdamW comes to about 0.6 GB, a save every 10 steps, one processor for the training. With
``--busy`` all processors train, and the saves have none to themselves.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import holdfast

STEPS, EVERY = 50, 10
WIDTH, LAYERS, BATCH = 2048, 12, 96


@dataclass(frozen=True)
class Saver:
    """Saves into a folder at a step, and waits for the last one."""

    save: Callable[[Path, int], object]
    finish: Callable[[], object] = lambda: None


def main() -> None:
    """Print a table."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loop", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where to write; the disk that is measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="no processor is free")
    options = parser.parse_args()
    torch.set_num_threads((os.cpu_count() or 1) if options.busy else 1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    _steps(model, optimizer, 2, lambda _: None)
    peer = Dcp(model, optimizer)
    savers = {
        "no saves": Saver(lambda *_: None),
        "holdfast, eager": Saver(partial(_holdfast, model, optimizer, "eager"), holdfast.finalize),
        "holdfast, overlapped": Saver(partial(_holdfast, model, optimizer, "overlapped"), holdfast.finalize),
        "DCP": Saver(peer.save, peer.finish),
    }
    seconds: dict[str, list[float]] = {name: [] for name in savers}
    order = random.Random(0)
    for _ in range(options.rounds):
        for name in order.sample(list(savers), len(savers)):
            folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=options.folder))
            started = time.perf_counter()
            _steps(model, optimizer, STEPS, partial(savers[name].save, folder))
            seconds[name].append(time.perf_counter() - started)
            savers[name].finish()
            shutil.rmtree(folder)
    print("| saves | 50 steps, s | slower by |")
    print("|---|---:|---:|")
    bare = statistics.median(seconds["no saves"])
    for name, found in seconds.items():
        print(f"| {name} | {statistics.median(found):.2f} | {statistics.median(found) / bare - 1:.1%} |")


def _holdfast(model: nn.Module, optimizer: torch.optim.Optimizer, staging: str, path: Path, step: int) -> None:
    holdfast.save_checkpoint(path, f"step_{step}", model, optimizer, async_save=True, staging=staging)


class Dcp:
    """``dcp.async_save``, whose user waits for the save before."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._before: Future[object] | None = None

    def save(self, path: Path, step: int) -> None:
        """Begin to save."""
        self.finish()
        state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        begun = dcp.async_save(state, checkpoint_id=path / f"step_{step}")
        self._before = begun if isinstance(begun, Future) else None

    def finish(self) -> None:
        """Wait for the save before."""
        if self._before is not None:
            self._before.result()


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, save: Callable[[int], object]) -> None:
    data = torch.ones(BATCH, WIDTH)
    for step in range(1, number + 1):
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            save(step)


if __name__ == "__main__":
    main()
