"""What the ranks do, each in a process of its host, in calls of the campaign."""

from __future__ import annotations

import itertools
import os
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import _ReplicationStager

import rankless
from benchmarks import raw, states
from campaigns.tier import known_state

#: The folder of the tier on each host.
TIER = Path("/dev/shm/job")

#: A number of saves of which none is drained.
NEVER = 10**6


@dataclass
class _Training:
    """The training of this process, and the run directories that it has opened."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    directories: dict[Path, rankless.RunDirectory] = field(default_factory=dict)


_current: list[_Training] = []

#: The numbers of the steps of this process; they are equal on all ranks.
_numbers = itertools.count(1)


def _training() -> _Training:
    return _current[0]


def join(address: str, port: int, rank: int, size: int) -> None:
    """Become a rank of a job."""
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    method = f"tcp://{address}:{port}"
    dist.init_process_group("gloo", method, timedelta(seconds=120), rank=rank, world_size=size)


def build(layout: str, nbytes: int, seed: int | None) -> None:
    """Build a model with AdamW of ``nbytes`` over all ranks, with the elements of ``seed``, or with zeros."""
    model, optimizer = known_state.build_zeros(layout, nbytes)
    _current[:] = [_Training(model, optimizer)]
    if seed is not None:
        known_state.fill_state(model, optimizer, seed)


def find_wrong(seed: int) -> list[str]:
    """Return the names of tensors that are not those of ``seed``."""
    return known_state.find_wrong(_training().model, _training().optimizer, seed)


def count_missing(held: Sequence[set[int]], parts: int) -> int:
    """See :func:`known_state.count_missing`; ``held`` has the parts on the host of each rank."""
    return known_state.count_missing(_training().model, _training().optimizer, held[dist.get_rank()], parts)


def open_run(run: Path, options: dict[str, Any] | None, **settings: Any) -> None:
    """Open a run directory, with a local tier if there are options of one."""
    local = None if options is None else rankless.LocalTier(TIER, **options)
    _training().directories[run] = rankless.RunDirectory(run, local=local, timeout=120, **settings)


def _directory(run: Path) -> rankless.RunDirectory:
    return _training().directories[run]


def save(run: Path, tag: str) -> tuple[float, float]:
    """Save. Return the seconds until the call returned, and from then until the checkpoint was complete in the tier."""
    training = _training()
    dist.barrier()
    began = time.perf_counter()
    handle = _directory(run).save(tag, training.model, training.optimizer, rng=False)
    returned = time.perf_counter()
    handle.wait_local()
    return returned - began, time.perf_counter() - returned


def change_state() -> None:
    """Change all tensors, as a step does: a save would not copy files that have not changed."""
    for tensor in states.list_tensors(_training().model, _training().optimizer).values():
        tensor.detach().add_(1)


def finish(run: Path) -> list[str]:
    """Wait for all saves, and drain the newest checkpoint. Return the tags in the run directory."""
    _directory(run).finalize()
    return [info.tag for info in _directory(run).list()]


def wait_for_saves(run: Path) -> None:
    """Wait for all saves and copies."""
    _directory(run).wait()


def load(run: Path) -> tuple[float, str]:
    """Load the newest checkpoint. Return the seconds and where it was."""
    training = _training()
    return _time(lambda: _directory(run).restore(None, training.model, training.optimizer).source)


def save_with_copies(run: Path, tag: str) -> tuple[float, float]:
    """Save. Return the seconds until the call returned, and until the checkpoint and its copies were in memory."""
    training = _training()
    dist.barrier()
    began = time.perf_counter()
    _directory(run).save(tag, training.model, training.optimizer, rng=False)
    returned = time.perf_counter() - began
    _directory(run).wait()
    return returned, time.perf_counter() - began


def replicate_with_dcp() -> float:
    """Exchange the state with another host by DCP's stager, which blocks. Return the seconds."""
    state = states.list_tensors(_training().model, _training().optimizer)
    stager = _ReplicationStager(dist.distributed_c10d._get_default_group(), storage_dir="/dev/shm/replica")
    return _time(lambda: stager.stage(state))[0]


def save_with_dcp(path: Path) -> None:
    """Save with DCP."""
    dcp.save(states.list_tensors(_training().model, _training().optimizer), checkpoint_id=path)


def load_with_dcp(path: Path) -> tuple[float, None]:
    """Load with DCP. Return the seconds."""
    tensors = states.list_tensors(_training().model, _training().optimizer)
    return _time(lambda: dcp.load(tensors, checkpoint_id=path))


def evict(path: Path) -> None:
    """Remove the files of a folder from the page cache."""
    raw.evict_from_cache(path)


def remove_tier() -> None:
    """Remove the tier of this host."""
    shutil.rmtree(TIER, ignore_errors=True)


def _time(work: Callable[[], Any]) -> tuple[float, Any]:
    dist.barrier()
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def train(run: Path, steps: int, seconds: float, processor: str, *, saves: bool) -> list[float]:
    """Train some steps of about ``seconds``, and save after each. Return the seconds of each step with its save.

    A step waits for ``seconds``, as for an accelerator, or computes for about as long. Then AdamW changes all tensors.
    """
    training = _training()
    for parameter in training.model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.full_like(parameter, 1e-3)
    compute = _build_compute(seconds, processor)
    times = []
    for _ in range(steps):
        dist.barrier()
        began = time.perf_counter()
        compute()
        training.optimizer.step()
        if saves:
            _directory(run).save(f"step_{next(_numbers)}", training.model, training.optimizer, rng=False)
        times.append(time.perf_counter() - began)
    return times


def reduce_gradients(steps: int, nbytes: int) -> list[float]:
    """Add up ``nbytes`` of all ranks in each step, as data parallelism does. Return the seconds of each step."""
    gradients = torch.ones(nbytes // 4)
    return [_time(lambda: dist.all_reduce(gradients))[0] for _ in range(steps)]


def _build_compute(seconds: float, processor: str) -> Callable[[], None]:
    if processor == "accelerator":
        return lambda: time.sleep(seconds)
    matrix = torch.full((512, 512), 1e-3)

    def compute() -> None:
        for _ in range(round(seconds * 60)):
            matrix.mm(matrix)

    return compute


def record_pauses(run: Path, seconds: float, step: float) -> list[float]:
    """Save after each step of ``step`` seconds, for ``seconds``. Return how long each save held up the training."""
    training = _training()
    pauses: list[float] = []
    ends, goes_on = time.monotonic() + seconds, torch.ones(1)
    while True:
        goes_on.fill_(time.monotonic() < ends)
        dist.broadcast(goes_on, 0)
        if not goes_on.item():
            return pauses
        time.sleep(step)
        began = time.perf_counter()
        _directory(run).save(f"step_{next(_numbers)}", training.model, training.optimizer, rng=False)
        pauses.append(time.perf_counter() - began)
