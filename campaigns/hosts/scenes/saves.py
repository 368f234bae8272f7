"""Saves of a job whose ranks are on several hosts, as the server and a third client see them."""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import rankless
from campaigns.hosts import guest
from campaigns.hosts.testbed import Testbed, mount_point
from campaigns.hosts.workers import Worker
from rankless.ondisk.hidden_names import parse_hidden_name

#: The kinds of saves, in turn: options of ``save_checkpoint``. An overwriting one uses one tag again and again. The
#: last two remove checkpoints: the mirror of ``fuse`` takes a new file for a removed one that had its inode number.
SAVES: tuple[dict[str, Any], ...] = (
    {},
    {"async_save": True},
    {"overwrite": True},
    {"async_save": True, "keep": 3},
)
_SAVES_WITHOUT_REMOVAL = SAVES[:2]

#: The places of ranks on the clients. Four ranks have a mesh of two dimensions.
JOBS = ((0, 1), (0, 1, 2), (0, 0, 1, 1))

#: Tensors of odd shapes, in another layout in each step; almost all borders of shards are inside pages of the file.
_TENSORS = 120
_COLUMNS = 7

#: The first of them change only in every fourth step, so that checkpoints share their files, of this many bytes.
_RARELY_CHANGED, _PERIOD = 60, 4
_FILE_BYTES = 100_000

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
    sizes = {n: (143 + 2 * n) * _COLUMNS for n in range(_TENSORS)}
    steps = {n: step - step % _PERIOD if n < _RARELY_CHANGED else step for n in sizes}
    values = {n: torch.arange(size, dtype=torch.float32) + 1e4 * steps[n] + n for n, size in sizes.items()}
    return {f"t{n}": tensor.view(-1, _COLUMNS) for n, tensor in values.items()}


def sharded_model(step: int, seed: int) -> dict[str, DTensor]:
    """Return this rank's shards of a step's tensors. The seed selects their layouts; four ranks have a 2-D mesh."""
    size = dist.get_world_size()
    shape = (2, size // 2) if size == len(JOBS[-1]) else (size,)
    mesh = DeviceMesh("cpu", torch.arange(size).view(shape), _init_backend=False)
    draw = random.Random(seed)
    # Columns are very short, and their files are always written.
    kinds = {n: (Shard(0), Shard(0), Shard(0 if n < _RARELY_CHANGED else 1), Replicate()) for n in range(_TENSORS)}
    layouts = {f"t{n}": draw.choices(choices, k=len(shape)) for n, choices in kinds.items()}
    return {name: _shard(tensor, mesh, layouts[name]) for name, tensor in whole_model(step).items()}


def _shard(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    local, coordinate = tensor, mesh.get_coordinate()
    assert coordinate is not None  # noqa: S101 - each rank is in the mesh
    for size, at, placement in zip(mesh.shape, coordinate, placements, strict=True):
        if isinstance(placement, Shard):
            local = local.chunk(size, placement.dim)[at]
    return DTensor.from_local(
        local.contiguous(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def save(run: Path, step: int, saves: tuple[dict[str, Any], ...], timeout: float = 120.0) -> str:
    """Save a step. Return ``"saved"``, or the error."""
    options = saves[step % len(saves)]
    tag = "same" if options.get("overwrite") else f"step_{step}"
    arguments: dict[str, Any] = {"model": sharded_model(step, step), "user_content": {"step": step}, "step": step}
    arguments["max_shard_size"] = _FILE_BYTES
    try:
        rankless.save_checkpoint(run, tag, **arguments, **options, timeout=timeout).wait()
    except rankless.RanklessError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def newest(run: Path, expected: int) -> str:
    """Return ``""`` if the newest checkpoint is of the expected step, or what is wrong."""
    try:
        values = (rankless.open(run).path / "state.json").read_bytes()
        step = json.loads(values)["user_content"]["step"]
    except Exception as error:  # noqa: BLE001 - any error is an answer
        return f"{type(error).__name__}: {error}"
    return "" if step == expected else f"step {step} is the newest"


def load(run: Path, expected: int) -> str:
    """Load the newest checkpoint in other layouts. Return ``""`` if it is of the expected step, or what is wrong."""
    model = sharded_model(0, expected + 1)
    try:
        content = rankless.load_checkpoint(run, model=model, timeout=120)
    except rankless.RanklessError as error:
        return f"{type(error).__name__}: {error}"
    shards = sharded_model(expected, expected + 1)
    wrong = [name for name, tensor in model.items() if not torch.equal(tensor.to_local(), shards[name].to_local())]
    if content["step"] != expected:
        return f"step {content['step']} was loaded"
    return f"{len(wrong)} tensors are wrong" if wrong else ""


def damage(run: Path) -> str:
    """Return how many tensors of the visible checkpoints have wrong bytes; ``""`` if none. Files are read directly."""
    wrong = []
    for folder in sorted(run.iterdir()):
        if not folder.name.startswith(".") and parse_hidden_name(folder.name) is None:
            step = json.loads((folder / "state.json").read_bytes())["user_content"]["step"]
            expected, tensors = whole_model(step), dict[str, torch.Tensor]()
            for file in folder.glob("model/*.safetensors"):
                tensors |= load_file(file)
            names = [n for n, tensor in expected.items() if n not in tensors or not torch.equal(tensors[n], tensor)]
            wrong += [f"{folder.name}: {len(names)} of {len(expected)} tensors"] if names else []
    return ", ".join(wrong)


def count_shared(run: Path, step: int) -> int:
    """Return the number of files that the checkpoint of a step shares with another one."""
    folder = run / f"step_{step}"
    return sum(file.stat().st_nlink > 1 for file in folder.glob("model/*.safetensors"))


def run(testbed: Testbed, kinds: list[str], times: int, report: Callable[[str], None]) -> None:
    """Save from the clients, the clock of one of which is wrong; the server and a third client look at the results."""
    with testbed.clients[1].worker() as worker:
        worker.call(guest.set_clock_ahead, _SECONDS_APART)
    ports = itertools.count(_PORT)
    for kind, places in itertools.product(kinds, JOBS):
        with ExitStack() as stack:
            ranks = [stack.enter_context(testbed.clients[place].worker()) for place in places]
            lookers = [stack.enter_context(host.worker()) for host in (testbed.clients[2], testbed.server)]
            start_job(ranks, testbed.clients[0].address, next(ports))
            _save_all(ranks, lookers, kind, times, report)


def start_job(ranks: list[Worker], address: str, port: int) -> None:
    """Make workers the ranks of a job."""
    for rank, worker in enumerate(ranks):
        worker.send(join, rank, len(ranks), address, port)
    for worker in ranks:
        worker.receive()


def call_all(ranks: list[Worker], function: Callable[..., str], *arguments: Any) -> list[str]:
    """Call a function on all ranks at the same time. Return their answers."""
    for worker in ranks:
        worker.send(function, *arguments)
    return [worker.receive() for worker in ranks]


def _save_all(ranks: list[Worker], lookers: list[Worker], kind: str, times: int, report: Callable[[str], None]) -> None:
    name = f"run-{kind}-{time.monotonic_ns()}"
    path, wrong, shared, started = mount_point(kind) / name, 0, 0, time.monotonic()
    saves = _SAVES_WITHOUT_REMOVAL if kind.startswith("fuse") else SAVES
    for step in range(1, times + 1):
        answers = {f"rank {rank} saves": text for rank, text in enumerate(call_all(ranks, save, path, step, saves))}
        answers |= {f"rank {rank} loads": text for rank, text in enumerate(call_all(ranks, load, path, step))}
        answers |= {
            "third client, newest": lookers[0].call(newest, path, step),
            "third client, tensors": lookers[0].call(damage, path),
            "server, tensors": lookers[1].call(damage, guest.EXPORT / name),
        }
        problems = [f"{what} | {answer}" for what, answer in answers.items() if answer not in {"", "saved"}]
        for problem in problems:
            report(f"{kind} | save {step}, {problem}")
        wrong += len(problems)
        shared += lookers[1].call(count_shared, guest.EXPORT / name, step)
    verdict = f"WRONG: {wrong} answers" if wrong else "none wrong"
    job = f"{kind}, {len(ranks)} ranks"
    seconds = time.monotonic() - started
    report(f"{job} | {times} saves and loads in {seconds:.0f} s, {shared} shared files | {verdict}")
