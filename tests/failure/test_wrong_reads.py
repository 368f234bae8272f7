"""Tests that only proof makes a checkpoint corrupt: one wrong read hides nothing and costs no step."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import rankless
from rankless.engine.io import read as reading
from rankless.engine.io.source_reader import SourceReader
from rankless.errors import StorageError, UnstableReadError
from rankless.ondisk.block_crcs import crc64
from rankless.storage import posix
from rankless.storage.direct_io import BufferedReader
from rankless.storage.store import PosixStore
from tests.helpers.corruption import corrupt_model_of_step
from tests.helpers.pool import Ranks

MODEL, MANIFEST, VALUES = "model.safetensors", "manifest.json", "state.json"


def train(path: Path, until: int, **options: Any) -> int:
    """Train as a new process would. Return the step from which it goes on."""
    model = torch.nn.Linear(4, 4)
    with rankless.Checkpointer(path, model=model, save_every=1, keep=2, signals=(), **options) as checkpointer:
        start = checkpointer.resume()
        for step in range(start + 1, until + 1):
            model.weight.data.fill_(step)
            checkpointer.step(step)
    return start


def ids(path: Path) -> dict[str, str]:
    return {info.tag: info.id for info in rankless.list_checkpoints(path) if info.status == "complete"}


@contextmanager
def wrong_reads(file: str, count: int = 1, at: int = 0) -> Iterator[None]:
    """Flip a bit of what is read of step 2's file, the first times that it is read from byte ``at`` on."""
    left = iter(range(count))
    read_small, read_range = posix.read_small, BufferedReader._read_buffered

    def is_wrong(path: Path, offset: int, size: int) -> bool:
        is_chosen = path.name == file and "step_2" in path.parts and size > 8 and offset >= at
        return is_chosen and next(left, None) is not None

    def read_small_wrong(path: Path, *args: Any) -> bytes:
        data = bytearray(read_small(path, *args))
        if is_wrong(path, 0, len(data)):
            data[len(data) // 2] ^= 4
        return bytes(data)

    def read_range_wrong(self: BufferedReader, fd: int, offset: int, into: memoryview) -> None:
        read_range(self, fd, offset, into)
        if is_wrong(self._path, offset, len(into)):
            into[len(into) // 2] ^= 4

    with (
        mock.patch.object(PosixStore, "read_small", staticmethod(read_small_wrong)),
        mock.patch.object(BufferedReader, "_read_buffered", read_range_wrong),
    ):
        yield
    assert next(left, None) is None, "nothing was read wrong"


@pytest.mark.parametrize(("file", "at"), [(MANIFEST, 0), (VALUES, 0), (MODEL, 0), (MODEL, 4096)])
def test_one_wrong_read_costs_no_step(tmp_path: Path, file: str, at: int) -> None:
    train(tmp_path, 2)
    before = ids(tmp_path)
    with wrong_reads(file, at=at), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert train(tmp_path, 3) == 2
    messages = [text for one in caught if "after a read that was wrong" in (text := str(one.message))]
    assert not any("partly filled" in text for text in messages), "the load has succeeded: all objects are whole"
    assert ids(tmp_path)["step_2"] == before["step_2"]
    assert not list(tmp_path.glob(".*.corrupt"))


def test_memory_that_stays_wrong_is_no_proof(tmp_path: Path) -> None:
    """The tensor is read wrong each time; second reads of the block, into other memory, are right."""
    train(tmp_path, 2)
    with (
        mock.patch.object(reading, "crc64", lambda data, crc=0: crc64(data, crc) ^ 1),
        pytest.raises(UnstableReadError, match=r"bytes 0 to 16 of model tensor 'bias' .* the file is intact"),
    ):
        rankless.load_checkpoint(tmp_path, model=torch.nn.Linear(4, 4))
    assert train(tmp_path, 3) == 2


def test_a_second_read_goes_past_the_page_cache(tmp_path: Path) -> None:
    train(tmp_path, 2)
    corrupt_model_of_step(tmp_path, 2)
    with mock.patch.object(os, "posix_fadvise", wraps=os.posix_fadvise) as advise, pytest.warns(UserWarning, match="2"):
        assert train(tmp_path, 1) == 1
    assert any(call.args[1] >= 4096 and call.args[3] == os.POSIX_FADV_DONTNEED for call in advise.call_args_list)


def read_wrong_on_one_rank(path: str) -> str:
    is_last = dist.get_rank() == dist.get_world_size() - 1
    with wrong_reads(MODEL, count=int(is_last), at=4096):
        return rankless.restore(path, model=torch.nn.Linear(4, 4)).tag


@pytest.mark.filterwarnings("ignore:loaded 'step_2' after a read that was wrong")
def test_all_ranks_read_again_if_one_has_read_wrong(ranks: Ranks, tmp_path: Path) -> None:
    train(tmp_path, 2)
    assert ranks(2, read_wrong_on_one_rank, str(tmp_path)) == ["step_2"] * 2


def miss_a_file_on_one_rank(path: str) -> str:
    with mock.patch.object(reading, "SourceReader", side_effect=_fail_on_last_rank):
        return rankless.restore(path, model=torch.nn.Linear(4, 4)).tag


def _fail_on_last_rank(*args: Any) -> Any:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise StorageError(errno.ENOENT, "not seen on this host")
    return SourceReader(*args)


def test_a_file_that_one_host_does_not_see_is_not_lost(ranks: Ranks, tmp_path: Path) -> None:
    train(tmp_path, 2)
    for error in ranks.outcomes(2, miss_a_file_on_one_rank, str(tmp_path)):
        assert isinstance(error, StorageError)
    assert ids(tmp_path).keys() == {"step_1", "step_2"}


def test_an_end_of_file_that_is_none_is_an_error_of_the_read(tmp_path: Path) -> None:
    train(tmp_path, 2)
    with mock.patch.object(os, "preadv", return_value=0), pytest.raises(StorageError, match="Input/output error"):
        rankless.load_checkpoint(tmp_path, model=torch.nn.Linear(4, 4))


def test_a_link_to_another_place_is_refused_and_never_hidden(tmp_path: Path) -> None:
    train(tmp_path / "run", 2)
    moved = tmp_path / "elsewhere"
    (tmp_path / "run/step_2/model" / MODEL).rename(moved)
    (tmp_path / "run/step_2/model" / MODEL).symlink_to(moved)
    with pytest.raises(rankless.errors.UnsafeNameError, match="outside of the checkpoint"):
        train(tmp_path / "run", 3)
    assert {file.name for file in (tmp_path / "run").glob("step_*")} == {"step_1", "step_2"}


@pytest.mark.parametrize("kind", [".part", ".common"])
def test_one_wrong_read_of_a_table_of_the_local_tier_costs_no_step(tmp_path: Path, kind: str) -> None:
    local = rankless.LocalTier(tmp_path / "tier", drain_every=100)
    rankless.RunDirectory(tmp_path / "run", local=local).save("only", {"w": torch.ones(3)})
    read_small, wrong = posix.read_small, iter([True])

    def read_small_wrong(path: Path, *args: Any) -> bytes:
        data = bytearray(read_small(path, *args))
        if path.name.endswith(kind) and next(wrong, False):
            data[-1] ^= 4
        return bytes(data)

    with mock.patch.object(PosixStore, "read_small", staticmethod(read_small_wrong)):
        restored = rankless.RunDirectory(tmp_path / "run", local=local).restore(model={"w": torch.zeros(3)})
    assert (restored.tag, restored.source, restored.corrupt_parts) == ("only", "local tier", ())
    assert not next(wrong, False)
