"""Tests several hosts that write into one page, on a file system that may lose a write of one of them.

Ranks play the hosts. A host that writes back a whole page from its cache is played by a rank that restores the bytes
that it has not written.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.errors import CorruptCheckpointError
from holdfast.ondisk.hidden_names import parse_hidden_name
from holdfast.save.readback import read_back
from holdfast.save.shard_writer import ShardWriter
from holdfast.storage import page_cache
from tests.helpers.pool import Ranks

NFS, LUSTRE, EXT4 = 0x6969, 0x0BD00BD0, 0xEF53


@contextmanager
def hosts(magic: int, *, one: bool = False) -> Iterator[None]:
    """Each rank is a host of its own, or all are on one."""
    with (
        mock.patch("holdfast.save.negotiation.host_id", return_value="host" if one else f"host {dist.get_rank()}"),
        mock.patch("holdfast.storage.filesystems.filesystem_magic", return_value=magic),
    ):
        yield


@contextmanager
def losing() -> Iterator[None]:
    """What rank 0 writes into the page that it shares with rank 1 is undone by rank 1."""
    write = ShardWriter.write

    def write_and_lose(self: ShardWriter, folder: Path, *arguments: Any) -> Any:
        written = write(self, folder, *arguments)
        dist.barrier()
        if dist.get_rank() == 1:
            file = folder / "model/model.safetensors"
            with file.open("r+b") as opened:
                opened.seek(file.stat().st_size - 2 * SIZE)
                opened.write(bytes(16))
        dist.barrier()
        return written

    with mock.patch.object(ShardWriter, "write", write_and_lose):
        yield


#: Bytes of each of two tensors, in one page; each is written by one of two ranks.
SIZE = 256


def state(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((SIZE // 4,), value) for name in "ab"}


def save(path: str, tag: str, value: float, **options: Any) -> None:
    holdfast.save_checkpoint(path, tag, state(value), **options).wait()


def loaded(path: str) -> tuple[str, float]:
    target = state(0.0)
    restored = holdfast.restore(path, model=target)
    assert torch.equal(target["a"], target["b"])
    return restored.tag, float(target["a"][0])


def saves_that_lose(path: str, options: dict[str, Any]) -> tuple[str, tuple[str, float]]:
    with hosts(NFS), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(path, "step_1", 1.0)
        tag = "step_1" if options.get("overwrite") else "step_2"
        with losing(), pytest.raises(CorruptCheckpointError) as caught:
            save(path, tag, 2.0, **options)
        with suppress(CorruptCheckpointError):  # that of an asynchronous save again
            holdfast.finalize()
        return str(caught.value), loaded(path)


@pytest.mark.parametrize(
    "options",
    [{"num_kept_ckpts": 1}, {"num_kept_ckpts": 1, "async_save": True}, {"overwrite": True}],
    ids=["retention", "asynchronous", "overwrite"],
)
def test_what_was_lost_is_found_before_the_previous_one_goes(
    ranks: Ranks, tmp_path: Path, options: dict[str, Any]
) -> None:
    outcomes = ranks(2, saves_that_lose, str(tmp_path), options)
    tag = "step_1" if options.get("overwrite") else "step_2"
    assert len({message for message, _ in outcomes}) == 1
    assert f"{tag} is not what was written, and was withdrawn; older checkpoints are as they were" in outcomes[0][0]
    assert [actual for _, actual in outcomes] == [("step_1", 1.0)] * 2
    assert [info.tag for info in holdfast.list_checkpoints(tmp_path)] == ["step_1"]
    left = [parse_hidden_name(path.name) for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert [(item.tag, item.state) for item in left if item] == [(tag, "corrupt")]


def warned_saves(path: str, magic: int, one: bool) -> tuple[list[str], int]:
    with ExitStack() as stack:
        stack.enter_context(hosts(magic, one=one))
        seen = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        read = stack.enter_context(
            mock.patch("holdfast.save.checkpoint_save.read_back", wraps=holdfast.save.checkpoint_save.read_back)
        )
        for step in range(3):
            save(path, f"step_{step}", float(step), num_kept_ckpts=2)
        assert loaded(path) == ("step_2", 2.0)
        return [str(warning.message) for warning in seen if warning.category is UserWarning], read.call_count


def test_one_warning_is_given_and_every_save_that_may_remove_others_is_read_back(ranks: Ranks, tmp_path: Path) -> None:
    (reported, reads), (others, other_reads) = ranks(2, warned_saves, str(tmp_path), NFS, False)
    (message,) = reported
    assert f"2 hosts save to {tmp_path}, on a file system (NFS) that is not known to keep" in message
    assert not others
    assert (reads, other_reads) == (3, 3)
    assert [info.tag for info in holdfast.list_checkpoints(tmp_path)] == ["step_1", "step_2"]


@pytest.mark.parametrize(("magic", "one"), [(NFS, True), (LUSTRE, False), (EXT4, False)])
def test_other_saves_pay_nothing(ranks: Ranks, tmp_path: Path, magic: int, one: bool) -> None:
    assert ranks(2, warned_saves, str(tmp_path), magic, one) == [([], 0)] * 2


def saves_without_retention(path: str) -> int:
    with hosts(NFS), warnings.catch_warnings(), mock.patch("holdfast.save.checkpoint_save.read_back") as read:
        warnings.simplefilter("ignore")
        save(path, "step_1", 1.0)
        return read.call_count


def test_a_save_that_removes_nothing_is_not_read_back(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, saves_without_retention, str(tmp_path)) == [0, 0]


def save_a_part(path: str) -> list[str]:
    with hosts(NFS), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        holdfast.save_model(torch.nn.Linear(2, 2), path)
        return [str(warning.message) for warning in seen if warning.category is UserWarning]


def test_a_part_that_several_hosts_save_is_warned_of(ranks: Ranks, tmp_path: Path) -> None:
    (reported,), others = ranks(2, save_a_part, str(tmp_path / "model.safetensors"))
    assert f"2 hosts save to {tmp_path}" in reported
    assert not others


def test_every_byte_is_read_by_one_rank_from_the_file_system(tmp_path: Path) -> None:
    """Of several blocks and files, whatever rank finds it, a flipped bit is found."""
    model = {f"w{number}": torch.full((300_000,), float(number)) for number in range(8)}
    holdfast.save_checkpoint(tmp_path, "a", model, max_shard_size="3MB")
    for rank in range(3):
        read_back(tmp_path / "a", rank, 3)
    files = [file for file in sorted((tmp_path / "a").rglob("*")) if file.is_file()]
    for file in files:
        raw = file.read_bytes()
        file.write_bytes(raw[:-3] + bytes([raw[-3] ^ 1]) + raw[-2:])
        if not file.name.endswith("index.json"):
            actual = [outcome for outcome in (_outcome(tmp_path / "a", rank) for rank in range(3)) if outcome]
            assert actual, file
        file.write_bytes(raw)


def _outcome(folder: Path, rank: int) -> str:
    try:
        read_back(folder, rank, 3)
    except CorruptCheckpointError as error:
        return str(error)
    return ""


def test_a_dropped_file_is_read_from_the_disk_again(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with file.open("wb") as opened:
        opened.write(bytes(2**20))
        opened.flush()
        os.fsync(opened.fileno())
    page_cache.drop_cache(file)
    with file.open("rb") as opened:
        assert not page_cache.is_cached(opened.fileno(), 0, 2**20)
