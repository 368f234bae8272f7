"""The blocking time of an asynchronous save, and the time until it is durable.

A model with AdamW is saved by rankless (eager and overlapped) and by ``dcp.async_save``. The limits are warm memcpys
(one thread) of the bytes that this rank writes into large pages: from its tensors, which torch allocates in small
pages, and from large pages. The first round, in which memory is fresh, does not count.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankless
from benchmarks import raw, states
from benchmarks.measure import Figure, Table
from benchmarks.parallel import run_on_ranks
from benchmarks.peers import DCP, OURS
from benchmarks.setting import Setting

#: The limit of an eager copy, and the one if tensors were in large pages.
MEMCPY, LARGE = "memcpy of the tensors, one thread", "memcpy of large pages, one thread"

#: Layouts, with the number of ranks.
CASES = {"plain": 1, "DDP": 2, "FSDP2": 2}

#: The result of a call: its start, and a function that waits until it is durable.
Begin = Callable[[Path], Callable[[], object]]


def measure_stall(setting: Setting) -> Iterator[Table]:
    """Measure each layout."""
    for layout, ranks in CASES.items():
        yield from run_on_ranks(ranks, setting, partial(_measure_layout, layout))
        raw.empty_directory(setting.folder)


def _measure_layout(layout: str, setting: Setting) -> list[Table]:
    contenders = _build_contenders(*states.build_training(layout, setting.nbytes))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    order = random.Random(0)
    for number in range(setting.rounds + 1):
        for name in order.sample(list(contenders), len(contenders)):
            path = setting.folder / name / f"step{number}"
            path.parent.mkdir(exist_ok=True)
            dist.barrier()
            times[name].append(_time_save(contenders[name], path))
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(path.parent)
    case = f"asynchronous save, {layout}, {dist.get_world_size()} ranks, {setting.gigabytes}"
    stalls, durable = (
        {name: Figure(tuple(row[column] for row in rows[1:])) for name, rows in times.items()} for column in (0, 1)
    )
    return [
        Table(f"stall of an {case}", "s", stalls, (MEMCPY,)),
        Table(f"until durable: {case}", "s", durable, (MEMCPY,)),
    ]


def _build_contenders(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Begin]:
    state = states.list_tensors(model, optimizer)
    # Under DDP the ranks divide the writing; under FSDP2 each writes its shards.
    shares = dist.get_world_size() if isinstance(model, DistributedDataParallel) else 1
    parts = _take_first([part.numpy() for part in states.list_local_bytes(state)], shares)
    source = raw.aligned_copy(parts)
    copy = source.copy()

    def save(path: Path, staging: str) -> Callable[[], object]:
        return rankless.save_checkpoint(
            path.parent, path.name, model, optimizer, async_save=True, staging=staging, rng=False
        ).wait

    return {
        MEMCPY: partial(_copy_memory, parts, copy),
        LARGE: partial(_copy_memory, [source], copy),
        OURS: partial(save, staging="eager"),
        f"{OURS}, overlapped": partial(save, staging="overlapped"),
        DCP: lambda path: _begin_dcp_save(state, path),
    }


def _take_first(parts: Sequence[raw.Bytes], shares: int) -> list[raw.Bytes]:
    """Return the first of ``n`` equal shares of some arrays."""
    left, first = sum(map(len, parts)) // shares, []
    for part in parts:
        first.append(part[:left])
        left -= len(first[-1])
    return first


def _copy_memory(parts: Sequence[raw.Bytes], copy: raw.Bytes, path: Path) -> Callable[[], object]:
    del path
    at = 0
    for part in parts:
        np.copyto(copy[at : at + len(part)], part)
        at += len(part)
    return lambda: None


def _begin_dcp_save(state: dict[str, torch.Tensor], path: Path) -> Callable[[], object]:
    future = dcp.async_save(state, checkpoint_id=path)
    if not isinstance(future, Future):
        raise TypeError(f"dcp.async_save gave a {type(future).__name__}, not a Future")
    return future.result


def _time_save(begin: Begin, path: Path) -> tuple[float, float]:
    started = time.perf_counter()
    wait = begin(path)
    stall = time.perf_counter() - started
    wait()
    return stall, time.perf_counter() - started
