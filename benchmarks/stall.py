"""``python -m benchmarks.stall``: how long an asynchronous save keeps the training waiting, and when it is durable.

A model with AdamW, 2 GB in all, plain and over two ranks under DDP and FSDP2, saved by us (eager and overlapped) and by
PyTorch's ``dcp.async_save``, beside a warm memcpy (one thread) of the bytes that this rank writes, in turn, in one
run. The first round, in which memory is fresh, does not count.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import holdfast

NBYTES = 2 * 10**9
LAYERS = 8

#: Layouts, with the number of ranks.
CASES = {"plain": 1, "ddp": 2, "fsdp2": 2}

#: What a call gives: how it began, and a way to wait until it is durable.
Begin = Callable[[Path], Callable[[], object]]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stall", description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where to write; the disk that is measured")
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=options.folder))
    print("| layout, ranks | contender | stall, s | x memcpy | x DCP | durable after, s |")
    print("|---|---|---:|---:|---:|---:|")
    try:
        for case in options.cases:
            mp.spawn(_rank, (case, folder, options.rounds), nprocs=CASES[case])
    finally:
        shutil.rmtree(folder)


def _rank(rank: int, case: str, folder: Path, rounds: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ranks = CASES[case]
    store = dist.FileStore(f"{folder}/store-{case}", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    contenders = _contenders(*training(case))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    order = random.Random(0)
    for number in range(rounds):
        for name in order.sample(list(contenders), len(contenders)):
            path = folder / f"{case}-{name}" / f"step{number}"
            path.parent.mkdir(exist_ok=True)
            dist.barrier()
            found[name].append(_time(contenders[name], path))
            dist.barrier()
            if rank == 0:
                shutil.rmtree(path.parent)
    if rank == 0:
        _print(f"{case}, {ranks}", {name: times[1:] for name, times in found.items()})
    dist.destroy_process_group()


def _print(case: str, found: dict[str, list[tuple[float, float]]]) -> None:
    median = {name: [statistics.median(column) for column in zip(*times, strict=True)] for name, times in found.items()}
    for name, (stall, durable) in median.items():
        ratios = f"{stall / median['memcpy'][1]:.2f} | {stall / median['DCP'][0]:.3f}"
        row = f"{durable:.3f} | 1.00 | |" if name == "memcpy" else f"{stall:.3f} | {ratios} | {durable:.2f}"
        print(f"| {case} | {name} | {row} |", flush=True)


def _contenders(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Begin]:
    state = _state_dict(model, optimizer)
    # Under DDP the ranks share the writing; under FSDP2 each has a part.
    shares = dist.get_world_size() if isinstance(model, DistributedDataParallel) else 1
    local = [t._local_tensor if isinstance(t, DTensor) else t for t in state.values()]  # noqa: SLF001
    source = np.concatenate([tensor.detach().numpy().ravel() for tensor in local])
    source = source[: len(source) // shares].copy()
    copy = source.copy()

    def save(path: Path, staging: str) -> Callable[[], object]:
        return holdfast.save_checkpoint(
            path.parent, path.name, model, optimizer, async_save=True, staging=staging, rng=False
        ).wait

    return {
        "memcpy": lambda _: lambda: np.copyto(copy, source),
        "holdfast, eager": partial(save, staging="eager"),
        "holdfast, overlapped": partial(save, staging="overlapped"),
        "DCP": lambda path: _dcp(state, path),
    }


def training(layout: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, which has stepped; parameters and states have :data:`NBYTES` in all."""
    width = int((NBYTES / 3 / 4 / LAYERS) ** 0.5)
    model: nn.Module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    if layout == "ddp":
        model = DistributedDataParallel(model)
    if layout == "fsdp2":
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items() if value.numel() > 1}
    return found


def _dcp(state: dict[str, torch.Tensor], path: Path) -> Callable[[], object]:
    future = dcp.async_save(state, checkpoint_id=path)
    if not isinstance(future, Future):
        raise TypeError(f"dcp.async_save gave a {type(future).__name__}, not a Future")
    return future.result


def _time(begin: Begin, path: Path) -> tuple[float, float]:
    started = time.perf_counter()
    wait = begin(path)
    stall = time.perf_counter() - started
    wait()
    return stall, time.perf_counter() - started


if __name__ == "__main__":
    main()
