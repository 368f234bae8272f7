"""Tests saves from several hosts whose page caches are not coherent.

Ranks play the hosts. Each host has a cache of the pages that it writes into: it reads a page when the save begins, and
writes back the whole page when a file is synced. So bytes that another host has written meanwhile are lost.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import rankless
from rankless.engine.comm.store_messages import StoreMessages
from rankless.engine.io import cell_exchange
from rankless.engine.plan import stripes
from rankless.errors import RankFailedError, RanklessError
from rankless.save.shard_writer import ShardWriter
from rankless.storage import direct_io, posix
from tests.helpers.pairwise import each_value, first_of
from tests.helpers.pool import Ranks
from tests.helpers.run_directories import list_names

PAGE = 4096


class WriteBackCache:
    """The page cache of one host, whose pages are as old as the beginning of the save."""

    def __init__(self) -> None:
        self._old: dict[Path, bytes] = {}
        self._pages: dict[Path, dict[int, bytearray]] = defaultdict(dict)
        self._dirty: dict[Path, set[int]] = defaultdict(set)
        self._lock = threading.Lock()

    def read_files(self, folder: Path) -> None:
        self._old |= {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        with self._lock:  # as a kernel locks a page, several threads of this rank may write into it
            self._write_pages(path, data, offset)

    def _write_pages(self, path: Path, data: memoryview, offset: int) -> None:
        pages, old = self._pages[path], self._old.get(path, b"")
        for number in range(offset // PAGE, (offset + len(data) - 1) // PAGE + 1 if data else 0):
            start = number * PAGE
            page = pages.setdefault(number, bytearray(old[start : start + PAGE]))
            low, high = max(offset, start), min(offset + len(data), start + PAGE)
            page.extend(bytes(max(0, high - start - len(page))))
            page[low - start : high - start] = data[low - offset : high - offset]
            self._dirty[path].add(number)

    def sync(self, fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        with self._lock:
            for number in self._dirty.pop(path, set()):
                os.pwrite(fd, self._pages[path][number], number * PAGE)

    @contextmanager
    def writing_back(self) -> Iterator[None]:
        """Write pages back when a file is synced: by the descriptor that has written them, or by another one."""
        sync, sync_path = direct_io.FileWriter.sync, posix.fsync_path

        def sync_writer(writer: direct_io.FileWriter) -> None:
            writer.flush()
            self.sync(writer._buffered_fd)
            sync(writer)

        def sync_file(path: Path, flags: int = 0) -> None:
            if path.is_file():
                fd = os.open(path, os.O_WRONLY)
                self.sync(fd)
                os.close(fd)
            sync_path(path, flags)

        with (
            mock.patch.object(direct_io.FileWriter, "sync", sync_writer),
            mock.patch.object(posix, "fsync_path", sync_file),
            mock.patch.object(direct_io, "write_fully", self.write),
        ):
            yield


@contextmanager
def on_hosts(ranks_per_host: int, *, as_one: bool = False) -> Iterator[None]:
    """Run a save on several hosts. ``as_one``: rankless takes them for one host."""
    cache, write = WriteBackCache(), ShardWriter.write

    def read_then_write(self: ShardWriter, folder: Path, *arguments: Any) -> Any:
        cache.read_files(folder)
        dist.barrier()
        return write(self, folder, *arguments)

    host = 0 if as_one else dist.get_rank() // ranks_per_host
    with (
        mock.patch("rankless.save.save_negotiation.host_id", return_value=f"host {host}"),
        mock.patch.object(ShardWriter, "write", read_then_write),
        cache.writing_back() if ranks_per_host == 1 else nullcontext(),
        mock.patch.object(stripes, "NARROW", 512),
    ):
        yield


def build_state(value: float) -> dict[str, torch.Tensor]:
    """Return tensors of odd sizes: sharded by rows and by columns, replicated, small and large."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(int(value))
    state = {}
    for number, placement in enumerate([Shard(0), Shard(1), Replicate(), Shard(0)] * 3):
        whole = torch.randn(97 + 50 * number, 61 + number, generator=generator)
        state[f"t{number}"] = distribute_tensor(whole, mesh, [placement])
    state["plain"] = torch.full((301,), value)
    state["large"] = distribute_tensor(torch.full((3000, 301), value), mesh, [Shard(0)])
    return state


def whole_state(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}


def save_whole(path: str, options: dict[str, Any], ranks_per_host: int, as_one: bool) -> bool:
    """Save twice, and return whether the second checkpoint is what was saved."""
    with on_hosts(ranks_per_host, as_one=as_one):
        for value in (1.0, 2.0):
            tag = "last" if options.get("overwrite") else f"step_{value:.0f}"
            rankless.save_checkpoint(path, tag, build_state(value), **options).wait()
    expected = whole_state(build_state(2.0))
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    try:
        rankless.restore(path, model=loaded, on_corruption="raise")
    except RanklessError:
        return False
    return all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


OPTIONS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "asynchronous": {"async_save": True},
    "overlapped": {"async_save": True, "staging": "overlapped", "keep": 1},
    "overwrite": {"overwrite": True},
    "many files": {"max_shard_size": "300KB"},
}


@each_value({"size": [3, 4, 2], "kind": OPTIONS})
def test_no_byte_is_lost(ranks: Ranks, tmp_path: Path, size: int, kind: str) -> None:
    assert ranks(size, save_whole, str(tmp_path), OPTIONS[kind], 1, False) == [True] * size


def save_by_messages_of_one_kind(path: str, max_stored: int) -> tuple[bool, bool]:
    with (
        mock.patch.object(cell_exchange, "MAX_STORED_BYTES", max_stored),
        mock.patch.object(StoreMessages, "send", autospec=True, side_effect=StoreMessages.send) as stored,
    ):
        return save_whole(path, {}, 1, False), stored.called


@pytest.mark.parametrize("max_stored", [0, 2**30])
def test_messages_between_ranks_and_through_the_store_lose_no_byte(
    ranks: Ranks, tmp_path: Path, max_stored: int
) -> None:
    results = ranks(3, save_by_messages_of_one_kind, str(tmp_path), max_stored)
    assert [is_saved for is_saved, _ in results] == [True] * 3
    assert any(uses_store for _, uses_store in results) == bool(max_stored)


def fail_before_sending(path: str) -> tuple[str, float]:
    started = time.monotonic()
    fails = dist.get_rank() == 1
    with (
        on_hosts(1),
        mock.patch.object(cell_exchange, "MAX_STORED_BYTES", 2**30),
        mock.patch.object(StoreMessages, "send", side_effect=OSError("no route")) if fails else nullcontext(),
        pytest.raises(RanklessError) as caught,
    ):
        rankless.save_checkpoint(path, "step_1", build_state(1.0))
    return str(caught.value), time.monotonic() - started


def test_a_rank_that_cannot_send_is_named_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    for message, seconds in ranks(3, fail_before_sending, str(tmp_path)):
        assert "rank 1" in message
        assert "no route" in message
        assert seconds < 30


def test_hosts_that_are_taken_for_one_lose_bytes(ranks: Ranks, tmp_path: Path) -> None:
    """The control: the simulated caches do lose bytes."""
    assert ranks(2, save_whole, str(tmp_path), {}, 1, True) == [False] * 2


def test_two_ranks_on_each_host(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(4, save_whole, str(tmp_path), {}, 2, False) == [True] * 4


def save_on_hosts(path: str, ranks_per_host: int) -> None:
    with on_hosts(ranks_per_host):
        rankless.save_checkpoint(path, "step_1", build_state(1.0), user_content={"n": 1}, rng=False)


def test_the_files_are_those_of_one_host(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4, save_on_hosts, str(tmp_path / "several"), 1)
    ranks(4, save_on_hosts, str(tmp_path / "one"), 4)
    one = tmp_path / "one/step_1"
    files = [file.relative_to(one) for file in one.rglob("*") if file.is_file() and file.name != "manifest.json"]
    assert files
    for file in files:
        assert (one / file).read_bytes() == (tmp_path / "several/step_1" / file).read_bytes()


def save_component(path: str, shard: bool, use_safetensors: bool) -> bool:
    state = build_state(3.0)
    with on_hosts(1):
        rankless.save_model(state, path, shard=shard, max_shard_size=314572, use_safetensors=use_safetensors)
    expected = whole_state(state)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    rankless.load_model(loaded, path)
    return all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


COMPONENTS = [("m.safetensors", False, True), ("m.pt", False, False), ("folder", True, True), ("torch", True, False)]


@each_value({"size": [3, 2], "name, shard, use_safetensors": COMPONENTS})
def test_no_byte_of_a_component_is_lost(
    ranks: Ranks, tmp_path: Path, size: int, name: str, shard: bool, use_safetensors: bool
) -> None:
    assert ranks(size, save_component, str(tmp_path / name), shard, use_safetensors) == [True] * size


def convert_on_hosts(source: str, output: str, to: str, as_one: bool, dtype: str | None = None) -> None:
    from rankless.conversion import folder_output

    cache, write = WriteBackCache(), folder_output.write_file_ranges

    def read_then_write(files: Sequence[Path], *arguments: Any, **options: Any) -> Any:
        for folder in {file.parent for file in files}:
            cache.read_files(folder)
        dist.barrier()
        return write(files, *arguments, **options)

    host = 0 if as_one else dist.get_rank()
    with (
        mock.patch("rankless.conversion.pipeline.host_id", return_value=f"host {host}"),
        mock.patch.object(folder_output, "write_file_ranges", read_then_write),
        cache.writing_back(),
    ):
        rankless.convert(source, output, to=to, verify=False, dtype=dtype)


def save_source(path: str) -> None:
    rankless.save_checkpoint(path, "step_1", build_state(4.0))


@first_of(4, "to", ["native", "safetensors", "torch", "dcp", "hf", "lightning-folder", "colossalai"])
def test_no_byte_of_a_conversion_is_lost(ranks: Ranks, tmp_path: Path, to: str) -> None:
    ranks(2, save_source, str(tmp_path / "run"))
    ranks(3, convert_on_hosts, str(tmp_path / "run"), str(tmp_path / "several"), to, False)
    rankless.convert(tmp_path / "run", tmp_path / "one", to=to)
    several, one = rankless.open(tmp_path / "several"), rankless.open(tmp_path / "one")
    assert set(several) == set(one)
    assert all(torch.equal(several[name], one[name]) for name in one)


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_cells_may_cut_the_elements_that_a_conversion_casts(ranks: Ranks, tmp_path: Path, to: str) -> None:
    """The tensors of these files begin at any byte."""
    rankless.save_checkpoint(tmp_path / "run", "step_1", {"a": torch.rand(20_003), "b": torch.rand(40_001)})
    for dtype in ("float64", "bfloat16"):
        several = tmp_path / f"several {dtype}"
        ranks(3, convert_on_hosts, str(tmp_path / "run"), str(several), to, False, dtype)
        rankless.convert(tmp_path / "run", tmp_path / f"one {dtype}", to=to, dtype=dtype)
        found, expected = rankless.open(several), rankless.open(tmp_path / f"one {dtype}")
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def save_with_a_changed_message(path: str, max_stored: int) -> str:
    crc64 = cell_exchange.crc64
    with (
        on_hosts(1),
        mock.patch.object(cell_exchange, "MAX_STORED_BYTES", max_stored),
        mock.patch.object(cell_exchange, "crc64", lambda data: crc64(data) ^ dist.get_rank()),
        pytest.raises(RankFailedError) as caught,
    ):
        rankless.save_checkpoint(path, "step_1", build_state(1.0))
    return str(caught.value)


@pytest.mark.parametrize("max_stored", [0, 2**30])
def test_a_message_that_was_changed_on_its_way_fails_the_save(ranks: Ranks, tmp_path: Path, max_stored: int) -> None:
    messages = ranks(2, save_with_a_changed_message, str(tmp_path), max_stored)
    assert all("were changed on their way" in message for message in messages)
    assert rankless.list_checkpoints(tmp_path) == []
    assert not list_names(tmp_path)


def count_keys() -> int:
    """Count the keys once the ones in the background are deleted."""
    dist.barrier()
    time.sleep(0.5)
    keys: int = dist.distributed_c10d._get_default_store().num_keys()
    dist.barrier()
    return keys


def save_often(path: str, ranks_per_host: int, async_save: bool) -> int:
    counts, state = [], {"w": torch.arange(5000.0)}
    hosts: AbstractContextManager[None] = on_hosts(ranks_per_host) if ranks_per_host else nullcontext()
    with hosts:
        for save in range(12):
            rankless.save_checkpoint(path, f"s{save}", state, async_save=async_save, keep=1)
            if save % 8 == 3:
                rankless.finalize()
                counts.append(count_keys())
    return counts[1] - counts[0]


@pytest.mark.parametrize(("ranks_per_host", "async_save"), [(0, False), (0, True), (1, False)])
def test_saves_leave_no_keys(ranks: Ranks, tmp_path: Path, ranks_per_host: int, async_save: bool) -> None:
    assert all(growth <= 3 for growth in ranks(3, save_often, str(tmp_path), ranks_per_host, async_save))
