"""Saves of a job whose ranks are on several hosts, as the server and a third client see them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import holdfast
from campaigns.hosts import guest
from campaigns.hosts.testbed import Testbed, mount_point
from campaigns.hosts.workers import Worker
from holdfast.ondisk.hidden_names import parse_hidden_name

#: The kinds of saves, in turn: options of ``save_checkpoint``. An overwriting one uses one tag again and again. The
#: last two remove checkpoints: the mirror of ``fuse`` takes a new file for a removed one that had its inode number.
SAVES: tuple[dict[str, Any], ...] = (
    {},
    {"async_save": True},
    {"overwrite": True},
    {"async_save": True, "num_kept_ckpts": 3},
)
_SAVES_WITHOUT_REMOVAL = SAVES[:2]

#: What the ranks do after one another.
_CALLS = ("rank 0 saves", "rank 1 saves", "rank 0 loads", "rank 1 loads")

#: Tensors that two ranks share by rows; almost all their borders are inside pages of the file.
_TENSORS = 120

#: The clock of the second client is ahead of the others by this.
_SECONDS_APART = 600.0

_PORT = 29_500


def join(rank: int, size: int, address: str, port: int) -> None:
    """Make this process a rank of a job."""
    os.environ["GLOO_SOCKET_IFNAME"] = "vec0"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=size, timeout=timedelta(minutes=5)
    )


def whole_model(step: int) -> dict[str, torch.Tensor]:
    """Return all tensors of a step, unsharded."""
    return {f"t{n}": torch.arange(1001 + 14 * n, dtype=torch.float32) + 1e4 * step + n for n in range(_TENSORS)}


def sharded_model(step: int) -> dict[str, DTensor]:
    """Return this rank's shards of a step's tensors."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = DeviceMesh("cpu", list(range(size)), _init_backend=False)
    return {
        name: DTensor.from_local(
            tensor.chunk(size)[rank].contiguous(), mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=(1,)
        )
        for name, tensor in whole_model(step).items()
    }


def save(run: Path, step: int, saves: tuple[dict[str, Any], ...], timeout: float = 120.0) -> str:
    """Save a step. Return ``"saved"``, or the error."""
    options = saves[step % len(saves)]
    tag = "same" if options.get("overwrite") else f"step_{step}"
    arguments: dict[str, Any] = {"model": sharded_model(step), "user_content": {"step": step}, "step": step}
    try:
        holdfast.save_checkpoint(run, tag, **arguments, **options, timeout=timeout).wait()
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


def load(run: Path, expected: int) -> str:
    """Load the newest checkpoint on all ranks. Return ``""`` if it is of the expected step, or what is wrong."""
    model = sharded_model(0)
    try:
        content = holdfast.load_checkpoint(run, model=model, timeout=120)
    except holdfast.HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    shards = sharded_model(expected)
    wrong = [name for name, tensor in model.items() if not torch.equal(tensor.to_local(), shards[name].to_local())]
    if content["step"] != expected:
        return f"step {content['step']} was loaded"
    return f"{len(wrong)} tensors are wrong" if wrong else ""


def damage(run: Path) -> str:
    """Return how many tensors of the visible checkpoints have wrong bytes; ``""`` if none. Files are read directly."""
    wrong = []
    for folder in sorted(run.iterdir()):
        if parse_hidden_name(folder.name) is None:
            step = json.loads((folder / "state.json").read_bytes())["user_content"]["step"]
            tensors, expected = load_file(folder / "model/model.safetensors"), whole_model(step)
            names = [name for name in expected if not torch.equal(tensors[name], expected[name])]
            wrong += [f"{folder.name}: {len(names)} of {len(expected)} tensors"] if names else []
    return ", ".join(wrong)


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
    saves = _SAVES_WITHOUT_REMOVAL if kind.startswith("fuse") else SAVES
    for step in range(1, times + 1):
        for worker in ranks:
            worker.send(save, mount_point(kind) / name, step, saves)
        answers = [worker.receive() for worker in ranks]
        for worker in ranks:
            worker.send(load, mount_point(kind) / name, step)
        answers += [worker.receive() for worker in ranks]
        seen = {
            "third client, newest": lookers[0].call(newest, mount_point(kind) / name, step),
            "third client, tensors": lookers[0].call(damage, mount_point(kind) / name),
            "server, tensors": lookers[1].call(damage, guest.EXPORT / name),
        }
        for what, answer in list(zip(_CALLS, answers, strict=True)) + list(seen.items()):
            if answer not in {"", "saved"}:
                report(f"{kind} | save {step}, {what} | {answer}")
                outcomes[what] = outcomes.get(what, 0) + 1
    verdict = f"WRONG: {outcomes}" if outcomes else "none wrong"
    report(f"{kind} | {times} saves and loads in {time.monotonic() - started:.0f} s | {verdict}")
