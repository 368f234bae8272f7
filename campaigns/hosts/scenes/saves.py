"""Saves of a job whose ranks are on several hosts, as the server and a third client see them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from campaigns.common import state
from campaigns.hosts import guest
from campaigns.hosts.testbed import Testbed, mount_point
from campaigns.hosts.workers import Worker

#: The kinds of saves, in turn: options of ``save_checkpoint``. An overwriting one uses one tag again and again.
SAVES: tuple[dict[str, Any], ...] = (
    {},
    {"async_save": True},
    {"overwrite": True},
    {"async_save": True, "num_kept_ckpts": 3},
)

#: The clock of the second client is ahead of the others by this.
_SECONDS_APART = 600.0

_PORT = 29_500


def join(rank: int, size: int, address: str, port: int) -> None:
    """Make this process a rank of a job."""
    os.environ["GLOO_SOCKET_IFNAME"] = "vec0"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=size)


def save(run: Path, step: int) -> str:
    """Save a step. Return ``"saved"``, or the error."""
    options = SAVES[step % len(SAVES)]
    tag = "same" if options.get("overwrite") else f"step_{step}"
    arguments: dict[str, Any] = {
        "model": state.build_shards(step),
        "user_content": state.build_user_content(step),
        "step": step,
    }
    try:
        holdfast.save_checkpoint(run, tag, **arguments, **options, timeout=120).wait()
    except holdfast.HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def newest(run: Path, expected: int) -> str:
    """Return ``""`` if the newest checkpoint is of the expected step, or what is wrong."""
    try:
        values = (holdfast.open(run).path / "state.json").read_bytes()
        step = json.loads(values)["user_content"]["step"]
    except Exception as error:  # noqa: BLE001 - any error is an answer
        return f"{type(error).__name__}: {error}"
    return "" if step == expected else f"step {step} is the newest"


def damage(run: Path) -> str:
    """Return ``""`` if all visible checkpoints are whole, or what is wrong; without holdfast."""
    try:
        state.read_checkpoints(run)
    except (state.ViolationError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run(testbed: Testbed, kinds: list[str], times: int, report: Callable[[str], None]) -> None:
    """Save from the first two clients, whose clocks differ; the server and a third client look at each checkpoint."""
    with testbed.clients[1].worker() as worker:
        worker.call(guest.set_clock_ahead, _SECONDS_APART)
    for place, kind in enumerate(kinds):
        with ExitStack() as stack:
            ranks = [stack.enter_context(client.worker()) for client in testbed.clients[:2]]
            lookers = [stack.enter_context(host.worker()) for host in (testbed.clients[2], testbed.server)]
            for rank, worker in enumerate(ranks):
                worker.send(join, rank, len(ranks), testbed.clients[0].address, _PORT + place)
            for worker in ranks:
                worker.receive()
            _save_all(ranks, lookers, kind, times, report)


def _save_all(ranks: list[Worker], lookers: list[Worker], kind: str, times: int, report: Callable[[str], None]) -> None:
    name = f"run-{kind}-{time.monotonic_ns()}"
    outcomes: dict[str, int] = {}
    started = time.monotonic()
    for step in range(1, times + 1):
        for worker in ranks:
            worker.send(save, mount_point(kind) / name, step)
        answers = [worker.receive() for worker in ranks]
        seen = {
            "third client, newest": lookers[0].call(newest, mount_point(kind) / name, step),
            "third client, tensors": lookers[0].call(damage, mount_point(kind) / name),
            "server, tensors": lookers[1].call(damage, guest.EXPORT / name),
        }
        for what, answer in [(f"rank {rank}", answer) for rank, answer in enumerate(answers)] + list(seen.items()):
            if answer not in {"", "saved"}:
                report(f"{kind} | save {step}, {what} | {answer}")
                outcomes[what] = outcomes.get(what, 0) + 1
    report(f"{kind} | {times} saves in {time.monotonic() - started:.0f} s | wrong: {outcomes or 'none'}")
