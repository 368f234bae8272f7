"""``python -m benchmarks.stall``: how long an asynchronous save keeps the training waiting, and when it is durable.

Beside PyTorch's ``dcp.async_save`` and a warm memcpy (one thread) of the same bytes, in turn, in one run. 2 GB over
one process and over two ranks; the first round, in which memory is fresh, does not count.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import holdfast

NBYTES = 2 * 10**9
NUMBER = 8
COLUMNS = 1000

#: What a call gives: how it began, and a way to wait until it is durable.
Begin = Callable[[Path], Callable[[], object]]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stall", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where to write; the disk that is measured")
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=options.folder))
    print("| ranks | contender | stall, s | durable after, s |")
    print("|---:|---|---:|---:|")
    try:
        for ranks in (1, 2):
            mp.spawn(_rank, (ranks, folder, options.rounds), nprocs=ranks)
    finally:
        shutil.rmtree(folder)


def _rank(rank: int, ranks: int, folder: Path, rounds: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store{ranks}", ranks), rank=rank, world_size=ranks)
    state = _state()
    source = np.concatenate([tensor._local_tensor.numpy().ravel() for tensor in state.values()])  # noqa: SLF001
    copy = source.copy()
    contenders: dict[str, Begin] = {
        "memcpy": lambda _: lambda: np.copyto(copy, source),
        "holdfast": lambda path: holdfast.save_checkpoint(path.parent, path.name, state, async_save=True).wait,
        "PyTorch DCP": lambda path: _dcp(state, path),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, begin in contenders.items():
            path = folder / f"{name}{ranks}" / f"step{number}"
            path.parent.mkdir(exist_ok=True)
            dist.barrier()
            found[name].append(_time(begin, path, copies=name == "memcpy"))
            dist.barrier()
            if rank == 0:
                shutil.rmtree(path.parent)
    if rank == 0:
        for name, times in found.items():
            stall, durable = (statistics.median(column) for column in zip(*times[1:], strict=True))
            print(f"| {ranks} | {name} | {stall:.3f} | {'' if name == 'memcpy' else f'{durable:.2f}'} |", flush=True)
    dist.destroy_process_group()


def _dcp(state: dict[str, DTensor], path: Path) -> Callable[[], object]:
    future = dcp.async_save(state, checkpoint_id=path)
    if not isinstance(future, Future):
        raise TypeError(f"dcp.async_save gave a {type(future).__name__}, not a Future")
    return future.result


def _time(begin: Begin, path: Path, *, copies: bool) -> tuple[float, float]:
    started = time.perf_counter()
    wait = begin(path)
    stall = time.perf_counter() - started
    wait()
    durable = time.perf_counter() - started
    return (durable, durable) if copies else (stall, durable)


def _state() -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = NBYTES // 4 // NUMBER // COLUMNS // dist.get_world_size()
    return {
        str(n): DTensor.from_local(torch.rand(rows, COLUMNS), mesh, [Shard(0)], run_check=False) for n in range(NUMBER)
    }


if __name__ == "__main__":
    main()
