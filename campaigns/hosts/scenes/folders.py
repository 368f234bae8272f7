"""Folders that a job on two hosts replaces again and again: ``save_model`` and ``dcp.save`` to one path.

The names of such a folder and of its files are the same in each save, and other hosts remember what they stood for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import rankless
from campaigns.hosts import guest
from campaigns.hosts.scenes import saves
from campaigns.hosts.testbed import Testbed, mount_point
from campaigns.hosts.workers import Worker
from rankless.dcp import FileSystemReader, FileSystemWriter

_PORT = 29_600

#: The folders that each step replaces.
_MODEL, _DCP = "model", "dcp"


def save(run: Path, step: int) -> str:
    """Replace both folders twice, at last by those of a step. Return ``""``, or the error."""
    try:
        for saved in (0, step):
            model = saves.sharded_model(saved, step)
            rankless.save_model(model, run / _MODEL, shard=True, timeout=120)
        for saved in (0, step):
            dcp.save(dict(saves.sharded_model(saved, step)), storage_writer=FileSystemWriter(run / _DCP))
    except (rankless.RanklessError, CheckpointException) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def load(run: Path, step: int) -> str:
    """Load both folders on all ranks. Return ``""`` if they are of the expected step, or what is wrong."""
    model, tensors = (saves.sharded_model(0, step + 1) for _ in range(2))
    try:
        rankless.load_model(model, run / _MODEL, timeout=120)
        dcp.load(dict(tensors), storage_reader=FileSystemReader(run / _DCP))
    except (rankless.RanklessError, CheckpointException) as error:
        return f"{type(error).__name__}: {error}"
    expected = saves.sharded_model(step, step + 1)
    wrong = [
        f"{what}: {name}"
        for what, loaded in ((_MODEL, model), (_DCP, tensors))
        for name, tensor in loaded.items()
        if not torch.equal(tensor.to_local(), expected[name].to_local())
    ]
    return f"{len(wrong)} tensors are wrong, such as {wrong[0]}" if wrong else ""


def damage(run: Path, step: int) -> str:
    """Load both folders in one process, the second with torch's own reader. Return what is wrong."""
    expected = saves.whole_model(step)
    model, tensors = ({name: torch.zeros_like(tensor) for name, tensor in expected.items()} for _ in range(2))
    try:
        rankless.load_model(model, run / _MODEL)
        dcp.load(tensors, checkpoint_id=run / _DCP, no_dist=True)
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - any error is an answer
        return f"{type(error).__name__}: {error}"
    wrong = [
        name
        for loaded in (model, tensors)
        for name, tensor in expected.items()
        if not torch.equal(loaded[name], tensor)
    ]
    return f"{len(wrong)} tensors are wrong" if wrong else ""


def run(testbed: Testbed, kinds: list[str], times: int, report: Callable[[str], None]) -> None:
    """Save from the first two clients; they, the server and a third client look at each result."""
    for place, kind in enumerate(kinds):
        with ExitStack() as stack:
            ranks = [stack.enter_context(client.worker()) for client in testbed.clients[:2]]
            lookers = [stack.enter_context(host.worker()) for host in (testbed.clients[2], testbed.server)]
            saves.start_job(ranks, testbed.clients[0].address, _PORT + place)
            _save_all(ranks, lookers, kind, times, report)


def _save_all(ranks: list[Worker], lookers: list[Worker], kind: str, times: int, report: Callable[[str], None]) -> None:
    name, wrong, started = f"folders-{kind}-{time.monotonic_ns()}", 0, time.monotonic()
    path = mount_point(kind) / name
    lookers[1].call(Path.mkdir, guest.EXPORT / name)
    for step in range(1, times + 1):
        answers = {f"rank {rank} saves": text for rank, text in enumerate(saves.call_all(ranks, save, path, step))}
        answers |= {f"rank {rank} loads": text for rank, text in enumerate(saves.call_all(ranks, load, path, step))}
        answers |= {
            "third client": lookers[0].call(damage, path, step),
            "server": lookers[1].call(damage, guest.EXPORT / name, step),
        }
        problems = [f"{what} | {answer}" for what, answer in answers.items() if answer]
        for problem in problems:
            report(f"{kind} | step {step}, {problem}")
        wrong += len(problems)
    verdict = f"WRONG: {wrong} answers" if wrong else "none wrong"
    report(f"{kind} | {times} saves and loads in {time.monotonic() - started:.0f} s | {verdict}")
