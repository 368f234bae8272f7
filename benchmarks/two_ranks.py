"""The case of many small tensors on two gloo ranks, each with the whole state dict."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import spawn

from benchmarks import cases
from benchmarks.measure import Contender, Timing


def small(folder: Path, rounds: int) -> dict[str, dict[str, Timing]]:
    """As :func:`benchmarks.cases.small`, saved and loaded by two ranks together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    spawn(_rank, (port, folder, rounds, results), nprocs=2)
    found: dict[str, dict[str, Timing]] = results.get()
    return {f"{case}, 2 ranks": timings for case, timings in found.items()}


def _rank(rank: int, port: int, folder: Path, rounds: int, results: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    found = cases.small(folder, rounds, around=together)
    if rank == 0:
        results.put(found)
    dist.destroy_process_group()


def together(contender: Contender) -> Contender:
    """Prepared by rank 0 alone, started by both at once, and done when both are."""

    def prepare() -> None:
        if dist.get_rank() == 0:
            contender.prepare()
        dist.barrier()

    def run() -> None:
        contender.run()
        dist.barrier()

    return Contender(run, prepare)
