"""Tests of costs that can be counted: bytes moved, hashed and copied, system calls, messages, and Python's memory.

Timed tests are flaky; these counts are the same on every machine. Each is compared with a stored upper bound. If a test
fails and the higher cost is intended, raise the bound in the same commit and say why.
"""

import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import rankless
from campaigns.faults.faulty_file_system import FaultyFileSystem
from rankless.ondisk import block_crcs
from tests.helpers.pool import Ranks

#: Seconds: small files that have not changed for 0.1 s are remembered, and not read again.
SETTLED = 0.15

#: Eight tensors of 1 MiB, and two hundred of 4 KiB.
LARGE, SMALL = {f"large.{n}": 2**18 for n in range(8)}, {f"small.{n}": 2**10 for n in range(200)}
SHAPES = LARGE | SMALL
NBYTES = 4 * sum(SHAPES.values())


@dataclass(frozen=True)
class Costs:
    """What one call has cost a process, or all ranks of a job together (of the memory: the most of any rank)."""

    bytes_read: int
    bytes_written: int
    bytes_hashed: int
    bytes_copied: int
    python_memory: int
    messages: int
    message_bytes: int
    calls: Mapping[str, int]


@contextmanager
def counting_bytes_hashed(sizes: list[int]) -> Iterator[None]:
    """Add the size of each CRC-64 to ``sizes``. The modules that use it are imported by an earlier call."""
    crc64 = block_crcs.crc64

    def counted(data: Any, *before: int) -> int:
        sizes.append(memoryview(data).nbytes)
        return crc64(data, *before)

    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("rankless.") and getattr(module, "crc64", None) is crc64:
                stack.enter_context(mock.patch.object(module, "crc64", counted))
        yield


@contextmanager
def counting_bytes_copied(sizes: list[int]) -> Iterator[None]:
    """Add the size of each copy by NumPy, or by torch from or to a tensor, to ``sizes``."""

    def counted(copy: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(target: Any, *args: Any, **options: Any) -> Any:
            sizes.append(target.nbytes)
            return copy(target, *args, **options)

        return wrapped

    with ExitStack() as stack:
        for owner, name in ((np, "copyto"), (torch.Tensor, "copy_"), (torch.Tensor, "clone")):
            stack.enter_context(mock.patch.object(owner, name, counted(getattr(owner, name))))
        yield


@contextmanager
def counting_messages(sizes: list[int]) -> Iterator[None]:
    """Add the size of each value that is set in or got from a store. Polls are left out: they depend on the time."""
    set_value, get_values = dist.Store.set, dist.Store.multi_get

    def counted_set(store: dist.Store, key: str, value: bytes) -> None:
        sizes.append(len(value))
        set_value(store, key, value)

    def counted_get(store: dist.Store, keys: list[str]) -> list[bytes]:
        values = get_values(store, keys)
        sizes.append(sum(map(len, values)))
        return values

    with (
        mock.patch.object(dist.Store, "set", counted_set),
        mock.patch.object(dist.Store, "multi_get", counted_get),
    ):
        yield


@contextmanager
def counting_python_memory(peaks: list[int]) -> Iterator[None]:
    """Add the most bytes that Python and NumPy had allocated at a time."""
    tracemalloc.start()
    try:
        yield
        peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


def read_moved_bytes() -> tuple[int, int]:
    """Return the bytes that this process has read and written, from or to caches too."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = {name: int(number) for name, number in (line.split(": ") for line in lines)}
    return counts["rchar"], counts["wchar"]


def count_costs(root: Path, call: Callable[[], object]) -> Costs:
    """Return the costs of a call that works below a directory."""
    hashed: list[int] = []
    copied: list[int] = []
    messages: list[int] = []
    peaks: list[int] = []
    faulty = FaultyFileSystem(root)
    before = read_moved_bytes()
    with (
        counting_bytes_hashed(hashed),
        counting_bytes_copied(copied),
        counting_messages(messages),
        counting_python_memory(peaks),
        faulty.install(),
    ):
        call()
    read, written = (now - then for now, then in zip(read_moved_bytes(), before, strict=True))
    moved_bytes = (read, written, sum(hashed), sum(copied))
    return Costs(*moved_bytes, peaks[0], len(messages), sum(messages), Counter(faulty.calls))


def build_state(kind: str) -> dict[str, torch.Tensor]:
    tensors = {name: torch.arange(size, dtype=torch.float32) for name, size in SHAPES.items()}
    if kind == "plain":
        return tensors
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placement = [Shard(0) if kind == "sharded" else Replicate()]
    return {name: distribute_tensor(tensor, mesh, placement, src_data_rank=None) for name, tensor in tensors.items()}


def get_local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def measure_costs(path: str, kind: str) -> dict[str, Costs]:
    """Return the costs of calls as in the middle of a training: all modules are imported, and the plan is known."""
    run, state = Path(path), build_state(kind)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}

    def save(tag: str, **options: Any) -> None:
        content = {"step": 1, "losses": [0.5] * 100}
        rankless.save_checkpoint(run, tag, state, user_content=content, rng=False, **options).wait()

    def load() -> None:
        rankless.load_checkpoint(run, model=target)

    def train() -> None:
        for tensor in state.values():
            get_local(tensor).add_(1)

    save("first")
    save("second", async_save=True)
    time.sleep(SETTLED)
    load()
    costs = {}
    for name, call in {
        "save": lambda: save("third"),
        "asynchronous save": lambda: save("fourth", async_save=True),
        "save without a change": lambda: save("fifth"),
        "load": load,
    }.items():
        if name in {"save", "asynchronous save"}:
            train()
        time.sleep(SETTLED)
        costs[name] = count_costs(run, call)
    assert all(torch.equal(get_local(target[name]), get_local(tensor)) for name, tensor in state.items())
    return costs


def add_costs(ranks: Sequence[Costs]) -> Costs:
    """Return the costs of all ranks together."""
    calls = sum((Counter(costs.calls) for costs in ranks), Counter[str]())
    sums = {name: sum(getattr(costs, name) for costs in ranks) for name in COUNTED}
    return Costs(**sums, python_memory=max(costs.python_memory for costs in ranks), calls=calls)


COUNTED = ("bytes_read", "bytes_written", "bytes_hashed", "bytes_copied", "messages", "message_bytes")

#: Headers, manifest, values and small reads of a rank, in bytes: what may be moved in addition to the tensors.
METADATA = 3 * 2**15

#: How many times a call of all ranks together reads, writes, hashes and copies the bytes of the state.
#: A save writes and hashes each byte once, in one pass with the copy into a buffer. An asynchronous one copies it into
#: staging memory first. Replicas are hashed by each rank that has one, before one of the ranks writes it. A load reads
#: what each rank needs, and hashes that. Past the page cache it copies small tensors twice, through it once. A save
#: without a change hashes all, and of each file reads 16 MiB of each rank back, which here is everything.
PASSES: dict[tuple[str, str], tuple[int, int, int, int]] = {
    ("plain", "save"): (0, 1, 1, 1),
    ("plain", "asynchronous save"): (0, 1, 1, 2),
    ("plain", "save without a change"): (1, 0, 2, 1),
    ("plain", "load"): (1, 0, 1, 2),
    ("sharded", "save"): (0, 1, 1, 1),
    ("sharded", "asynchronous save"): (0, 1, 1, 2),
    ("sharded", "save without a change"): (0, 0, 1, 0),
    ("sharded", "load"): (1, 0, 1, 0),
    ("replicated", "save"): (0, 1, 3, 1),
    ("replicated", "asynchronous save"): (0, 1, 3, 2),
    ("replicated", "save without a change"): (1, 0, 4, 1),
    ("replicated", "load"): (2, 0, 2, 2),
}

#: The most bytes of Python objects at a time on one rank, for each of the tensors.
BYTES_A_TENSOR = {"save": 4500, "asynchronous save": 4300, "save without a change": 4300, "load": 3800}

#: The messages of two ranks to and from the store, and their bytes. One rank sends none.
MESSAGES = {
    "save": (22, 28_000),
    "asynchronous save": (30, 28_000),
    "save without a change": (28, 31_000),
    "load": (32, 26_000),
}

#: The most calls to the file system by rank 0, and by each other rank; none of those that are not listed. A save
#: creates four files (the tensors, and three of JSON) and a lock file, which it removes, and appends
#: to the journal. It syncs the four and three directories whose entries change; if there are other ranks, it syncs the
#: tensors once more, with their header. It opens files again to sync them, so that all are synced at a time.
_CHANGES = {"create": 6, "unlink": 1, "mkdir": 3, "ftruncate": 1, "write": 3, "fsync": 8, "renameat2": 1}
_CHECKS = {
    "open": 16,
    "read": 2,
    "preadv": 4,
    "fstat": 5,
    "scandir": 5,  # one for the history
    "flock": 2,
    "fcntl": 2,
    "statvfs": 1,
    "stat": 16,
    "lstat": 18,
}
#: From Python 3.13 on, a ``Path`` lists a directory with ``scandir`` instead of ``listdir``.
_LISTS = {"scandir": 14} if sys.version_info >= (3, 13) else {"listdir": 9, "scandir": 5}
CALLS_OF_RANK_0: dict[str, dict[str, int]] = {
    "save": _CHANGES | _CHECKS,
    "asynchronous save": _CHANGES | _CHECKS | {"open": 18, "read": 3, "stat": 20, "lstat": 23, "fstat": 6},
    "save without a change": _CHANGES
    | _CHECKS
    | {"ftruncate": 0, "open": 27, "read": 4, "stat": 27, "lstat": 34, "fstat": 15, "preadv": 10, "statvfs": 2},
    "load": {"open": 21, "read": 11, "fstat": 14, "stat": 123, "lstat": 61, **_LISTS},
}
CALLS_OF_OTHERS: dict[str, dict[str, int]] = {
    "save": {"open": 3, "fsync": 1, "stat": 3, "preadv": 4, "lstat": 6},
    "asynchronous save": {"open": 3, "fsync": 1, "stat": 3, "preadv": 4, "lstat": 6},
    "save without a change": {"open": 9, "stat": 3, "preadv": 8, "fstat": 4, "lstat": 6},
    "load": {"open": 8, "read": 5, "stat": 20, "lstat": 33, "fstat": 7},
}


def bound_costs(kind: str, call: str, size: int) -> Costs:
    """Return the most that a call of ``size`` ranks may cost."""
    moved_bytes = [passes * NBYTES + size * METADATA for passes in PASSES[kind, call]]
    messages, message_bytes = MESSAGES[call] if size > 1 else (0, 0)
    # Without direct I/O, 128 KiB are written at a time. A shard of a small tensor is a range of its own.
    transfers = NBYTES // 2**17 + 10 + (size * len(SHAPES) if kind == "sharded" else 0)
    calls = Counter({"preadv" if call == "load" else "pwrite": transfers, **CALLS_OF_RANK_0[call]})
    for _ in range(size - 1):
        calls.update(CALLS_OF_OTHERS[call])
    calls["close"] = calls["open"] + calls["create"]
    return Costs(*moved_bytes, BYTES_A_TENSOR[call] * len(SHAPES), messages, message_bytes, calls)


def find_exceeded(costs: Costs, bound: Costs) -> dict[str, tuple[int, int]]:
    """Return each cost that is above its bound, with both."""
    names = (*COUNTED, "python_memory")
    pairs = {name: (getattr(costs, name), getattr(bound, name)) for name in names}
    pairs |= {name: (count, bound.calls.get(name, 0)) for name, count in costs.calls.items()}
    return {name: (cost, limit) for name, (cost, limit) in pairs.items() if cost > limit}


def find_uncounted(costs: Costs, bound: Costs) -> set[str]:
    """Return the costs of which a counter has seen too few: it would stay within every bound.

    Small files that have not changed for 0.1 s are remembered, so a slow machine may read none.
    """
    moved_bytes = ("bytes_read", "bytes_written", "bytes_hashed", "bytes_copied")
    expected = {name: getattr(bound, name) // 5 * 2 for name in moved_bytes if getattr(bound, name) > NBYTES}
    expected |= {name: getattr(bound, name) // 5 for name in ("messages", "python_memory")}
    too_few = {name for name, least in expected.items() if getattr(costs, name) < least}
    return too_few | {name for name, limit in bound.calls.items() if limit and not costs.calls.get(name)} - {"read"}


@pytest.mark.parametrize(("kind", "size"), [("plain", 1), ("sharded", 2), ("replicated", 2)])
def test_costs_stay_within_their_bounds(ranks: Ranks, tmp_path: Path, kind: str, size: int) -> None:
    of_ranks = ranks(size, measure_costs, str(tmp_path), kind)
    for call in of_ranks[0]:
        costs, bound = add_costs([of_rank[call] for of_rank in of_ranks]), bound_costs(kind, call, size)
        assert not find_exceeded(costs, bound), f"{call}, {kind}: the costs are {costs}"
        assert not find_uncounted(costs, bound), f"{call}, {kind}: the costs are {costs}"
