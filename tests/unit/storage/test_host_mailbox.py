"""Tests messages between processes of one host."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from rankless.storage import host_mailbox
from rankless.storage.host_mailbox import TURN_SECONDS, HostMailbox, reachable_id, remove_stale_boards


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    with mock.patch.object(host_mailbox, "_SHARED_MEMORY", tmp_path):
        yield tmp_path


def make_older(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_a_message_is_read_whole_or_not_at_all(folder: Path) -> None:
    board, other = HostMailbox("a"), HostMailbox("a")
    assert other.read("x") is None
    assert board.post("x", b"1" * 1000)
    assert other.read("x") == b"1" * 1000
    assert board.post("x", b"2")
    assert (other.read("x"), other.names(), other.has("x")) == (b"2", {"x"}, True)
    other.withdraw("x")
    assert (board.read("x"), board.has("x")) == (None, False)
    board.remove()
    assert not list(folder.iterdir())


def test_boards_of_other_names_are_apart_and_private(folder: Path) -> None:
    HostMailbox("a").post("x", b"1")
    assert HostMailbox("b").read("x") is None
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_one_of_many_claims_a_task() -> None:
    with ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(lambda _: HostMailbox("a").claim("send"), range(8)))
    assert claims.count(True) == 1


def test_a_turn_passes_on_if_it_is_not_taken_for_some_time(folder: Path) -> None:
    board = HostMailbox("a")
    assert board.take_turn("poll", "1")
    assert not board.take_turn("poll", "2")
    assert board.take_turn("poll", "1")
    (path,) = folder.iterdir()
    make_older(path / "poll", TURN_SECONDS + 1)
    assert board.take_turn("poll", "2")
    assert not board.take_turn("poll", "1")
    make_older(path / "poll", -60)  # the clock was set back
    assert board.take_turn("poll", "1")


def test_without_space_nothing_is_posted_and_nobody_waits_for_another(folder: Path) -> None:
    (folder / f"rankless-{os.geteuid()}-a").touch()  # no directory can be created
    board = HostMailbox("a")
    assert not board.post("x", b"1")
    assert board.claim("send")
    assert board.take_turn("poll", "1")
    assert board.take_turn("poll", "2")
    assert (board.read("x"), board.names()) == (None, frozenset())


def test_boards_of_processes_that_were_killed_long_ago_are_removed(folder: Path) -> None:
    for name in ("old", "new"):
        HostMailbox(name).post("x", b"1")
    (folder / "another").mkdir()
    for name in (f"rankless-{os.geteuid()}-old", "another"):
        make_older(folder / name, 2 * 24 * 3600)
    remove_stale_boards()
    assert {path.name for path in folder.iterdir()} == {"another", f"rankless-{os.geteuid()}-new"}


def test_only_processes_with_common_memory_have_one_id(folder: Path) -> None:
    assert reachable_id() == reachable_id()
    own = reachable_id()
    with mock.patch.object(host_mailbox, "host_id", return_value="another host"):
        assert reachable_id() != own
    (folder / "container").mkdir()
    with mock.patch.object(host_mailbox, "_SHARED_MEMORY", folder / "container"):
        assert reachable_id() != own
    with mock.patch.object(host_mailbox, "_SHARED_MEMORY", folder / "missing"):
        assert reachable_id() != reachable_id()
