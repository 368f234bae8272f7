"""Tests that manifests are read once, and again after any change."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import rankless
from rankless.run import checkpoint_info
from rankless.storage import file_memo
from rankless.storage.file_memo import FileMemo, FileSignature, sign_file


@pytest.fixture
def settled() -> Iterator[None]:
    """As if every file had been there for long."""
    with mock.patch.object(file_memo, "_UNSETTLED_NS", -(10**18)):
        yield


def save(run: Path, tag: str, value: float, **options: Any) -> None:
    rankless.save_checkpoint(run, tag, {"w": torch.full((4,), value)}, step=value, **options)


def reads(run: Path) -> Iterator[int]:
    """How many manifests each of three saves reads."""
    for number in range(3):
        with mock.patch.object(checkpoint_info, "read_manifest", wraps=checkpoint_info.read_manifest) as read:
            save(run, f"more_{number}", 100.0 + number, keep=rankless.KeepLast(1000))
        yield read.call_count


@pytest.mark.usefixtures("settled")
def test_a_save_reads_no_manifest_that_was_read_before(tmp_path: Path) -> None:
    """It looks for the newest, and for those that are not kept any more; what is new is what it has just written."""
    few, many = tmp_path / "few", tmp_path / "many"
    for run, number in ((few, 2), (many, 30)):
        for step in range(number):
            save(run, f"step_{step}", float(step))
        rankless.list_checkpoints(run)
    assert list(reads(many)) == list(reads(few)) == [1, 1, 1]


def steps(run: Path) -> dict[str, float | None]:
    return {info.tag: info.step for info in rankless.list_checkpoints(run)}


@pytest.mark.usefixtures("settled")
def test_what_is_replaced_is_read_again(tmp_path: Path, exchanging: None) -> None:
    save(tmp_path, "a", 1.0)
    save(tmp_path, "b", 2.0)
    assert steps(tmp_path) == {"a": 1.0, "b": 2.0}
    for value in range(3, 9):  # numbers of inodes are used again
        save(tmp_path, "a", float(value), overwrite=True)
        assert steps(tmp_path) == {"a": value, "b": 2.0}
        assert rankless.open(tmp_path).path.name == "a"


@pytest.mark.usefixtures("settled")
def test_names_that_are_exchanged_linked_and_removed_are_seen(tmp_path: Path) -> None:
    save(tmp_path, "a", 1.0)
    save(tmp_path, "b", 2.0)
    (tmp_path / "latest").symlink_to("a")
    assert steps(tmp_path) == {"a": 1.0, "b": 2.0, "latest": 1.0}
    for source, target in (("a", "c"), ("b", "a"), ("c", "b")):
        (tmp_path / source).rename(tmp_path / target)
    assert steps(tmp_path) == {"a": 2.0, "b": 1.0, "latest": 2.0}
    shutil.rmtree(tmp_path / "b")
    assert steps(tmp_path) == {"a": 2.0, "latest": 2.0}


@pytest.mark.usefixtures("settled")
def test_a_manifest_that_is_changed_in_place_is_seen_also_if_its_size_and_time_stay(tmp_path: Path) -> None:
    save(tmp_path, "a", 1.0)
    file = tmp_path / "a/manifest.json"
    assert steps(tmp_path) == {"a": 1.0}
    before = file.stat()
    raw = bytearray(file.read_bytes())
    raw[20] ^= 1
    file.write_bytes(raw)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    (info,) = rankless.list_checkpoints(tmp_path)
    assert info.status == "damaged"


def test_what_has_just_been_written_is_not_remembered(tmp_path: Path) -> None:
    """A file system's clock may stand for milliseconds: another write now would leave the times as they are."""
    file = tmp_path / "file"
    file.write_text("a")
    signature = sign_file(str(file))
    kept: FileMemo[str] = FileMemo(2)
    kept.remember(str(file), signature, "a")
    assert kept.recall(str(file)) is None
    with mock.patch.object(file_memo.time, "time_ns", return_value=file.stat().st_mtime_ns + 10**10):
        kept.remember(str(file), signature, "a")
    assert kept.recall(str(file)) == "a"


@pytest.mark.parametrize(("local", "ns", "kept"), [(True, 1, True), (False, 1, False), (True, 0, False)])
def test_a_clock_of_this_host_stands_still_for_a_tenth_of_a_second_at_most(
    tmp_path: Path, local: bool, ns: int, kept: bool
) -> None:
    """A file server's clock may be another, and some file systems store whole seconds: there, three seconds."""
    signature = FileSignature(1, 2, 3, 10**9, 10**9 + ns)
    memo: FileMemo[str] = FileMemo(2)
    for age, expected in ((10**8 // 2, False), (10**9, kept), (4 * 10**9, True)):
        with (
            mock.patch.object(file_memo, "is_local", return_value=local),
            mock.patch.object(file_memo, "sign_file", return_value=signature),
            mock.patch.object(file_memo.time, "time_ns", return_value=signature.ctime_ns + age),
        ):
            memo.remember("file", signature, "a")
            assert (memo.recall("file") == "a") == expected


@pytest.mark.usefixtures("settled")
def test_it_holds_no_more_than_it_may_and_nothing_of_what_is_gone(tmp_path: Path) -> None:
    kept: FileMemo[int] = FileMemo(3)
    files = [tmp_path / str(number) for number in range(10)]
    for number, file in enumerate(files):
        file.write_text("x")
        kept.remember(str(file), sign_file(str(file)), number)
        assert kept.recall(str(file)) == number
        assert sum(kept.recall(str(other)) is not None for other in files) <= 3
    files[-1].unlink()
    assert kept.recall(str(files[-1])) is None
    kept.remember(str(files[-1]), sign_file(str(files[-1])), 9)
    assert kept.recall(str(files[-1])) is None


@pytest.mark.usefixtures("settled")
def test_what_a_caller_does_to_a_list_does_not_change_the_next(tmp_path: Path) -> None:
    save(tmp_path, "a", 1.0, metrics={"loss": 0.5})
    save(tmp_path, "b", 2.0, metrics={"loss": 0.7})
    for info in rankless.list_checkpoints(tmp_path):
        info.metrics["loss"] = None
    assert [info.metrics for info in rankless.list_checkpoints(tmp_path)] == [{"loss": 0.5}, {"loss": 0.7}]


@pytest.mark.usefixtures("settled")
def test_a_memo_that_is_full_changes_nothing_but_the_time_it_takes(tmp_path: Path) -> None:
    with mock.patch.object(checkpoint_info, "_MEMO", FileMemo(2)):
        for step in range(6):
            save(tmp_path, f"step_{step}", float(step), keep=4)
    assert steps(tmp_path) == {f"step_{step}": step for step in range(2, 6)}
