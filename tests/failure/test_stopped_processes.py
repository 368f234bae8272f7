"""Tests that a stopped process, even the one with the ranks' store, delays no rank and does no harm when it wakes."""

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import rankless
from rankless.engine.comm.daemon_executor import DaemonExecutor
from rankless.engine.comm.job_store import DeadlineStore
from rankless.engine.comm.session import Session
from rankless.errors import RankTimeoutError, TagExistsError
from rankless.save.shard_writer import ShardWriter
from rankless.storage import atomic_rename
from tests.helpers.pool import ROOT, Ranks
from tests.helpers.run_directories import list_names


class Blocked:
    """A store whose process is stopped."""

    def __init__(self) -> None:
        self.awake = threading.Event()

    def check(self, _: list[str]) -> bool:
        self.awake.wait(10)
        return True


def test_a_store_that_does_not_answer_is_waited_for_once_and_may_come_back() -> None:
    blocked = Blocked()
    store = DeadlineStore(blocked, DaemonExecutor("test"), 0.2)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.2 seconds"):
        store.check(["a"])
    for _ in range(100):
        with pytest.raises(TimeoutError, match="not returned yet"):
            store.check(["a"])
    assert time.monotonic() - started < 2
    blocked.awake.set()
    time.sleep(0.05)
    assert store.check(["a"])


class StoppedHost(Blocked):
    """A store in a process that is stopped while the ranks work, and stays so."""

    def set(self, _: str, __: bytes) -> None:
        self.awake.wait(10)


def test_a_rank_that_has_waited_for_another_one_does_not_wait_as_long_for_its_store() -> None:
    """The process that did not come may be the one that has the store."""
    session = Session(DeadlineStore(StoppedHost(), DaemonExecutor("test"), 5.0), 1, 2, 5.0)
    started = time.monotonic()
    with pytest.raises(RankTimeoutError, match="did not answer while writing"):
        session.run_on_all("writing", lambda: (_ for _ in ()).throw(RankTimeoutError("another rank did not come")))
    assert time.monotonic() - started < 3


SCRIPT = """
import os, pathlib, signal, sys
import torch, torch.distributed as dist
import rankless
from tests.helpers.rendezvous import join_store, serve_store
rank, path = int(sys.argv[1]), sys.argv[2]
store = (join_store if rank else serve_store)(pathlib.Path(sys.argv[3]))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
rankless.save_checkpoint(path, "a", {"w": torch.ones(4)})
if rank == 0:
    print("stopping", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    rankless.save_checkpoint(path, "b", {"w": torch.ones(4)}, timeout=1.0)
except rankless.errors.RankTimeoutError as error:
    print(error)
"""


@pytest.mark.full
def test_a_process_ends_though_its_store_is_stopped(tmp_path: Path) -> None:
    arguments = [str(tmp_path / "run"), str(tmp_path / "port")]
    command = [sys.executable, "-c", SCRIPT]
    with (
        subprocess.Popen([*command, "0", *arguments], cwd=ROOT, stdout=subprocess.PIPE) as first,
        subprocess.Popen([*command, "1", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True) as other,
    ):
        assert first.stdout is not None
        assert first.stdout.readline()
        stopped = time.monotonic()
        try:
            out, _ = other.communicate(timeout=60)
            assert time.monotonic() - stopped < 15
        finally:
            first.kill()
            other.kill()
    assert "key-value store did not answer" in out
    assert "rank 0" in out
    assert other.returncode == 0


def leader_sleeps(path: str) -> str:
    """Rank 0 sleeps over its part of the writing, which all others have done."""
    move = ShardWriter.write

    def slowly(self: ShardWriter, *arguments: Any) -> Any:
        time.sleep(3.0)
        return move(self, *arguments)

    asleep = (
        mock.patch.object(ShardWriter, "write", slowly)
        if dist.get_rank() == 0
        else mock.patch.object(ShardWriter, "write", move)
    )
    with asleep, pytest.raises(RankTimeoutError) as raised:
        rankless.save_checkpoint(path, "s", {"w": torch.ones(4)}, timeout=1.0)
    time.sleep(3.0 if dist.get_rank() else 0.0)
    return str(raised.value)


def test_what_others_have_given_up_is_not_committed(ranks: Ranks, tmp_path: Path) -> None:
    late, *others = ranks(3, leader_sleeps, str(tmp_path))
    assert "rank 0 came too late" in late
    assert all("rank 0 did not come" in message for message in others)
    assert not list_names(tmp_path)


def test_who_wakes_up_does_not_replace_what_another_job_has_saved_meanwhile(tmp_path: Path) -> None:
    def save(value: float) -> None:
        rankless.RunDirectory(tmp_path).save("last", {"w": torch.full((4,), value)}, overwrite=True, keep=1)

    move = ShardWriter.write

    def stopped(self: ShardWriter, *arguments: Any) -> Any:
        with mock.patch.object(ShardWriter, "write", move):
            save(2.0)
        return move(self, *arguments)

    for there in (False, True):
        with mock.patch.object(ShardWriter, "write", stopped), pytest.raises(TagExistsError, match="meanwhile"):
            save(1.0)
        assert float(rankless.open(tmp_path)["model/w"][0]) == 2.0, there
    assert list_names(tmp_path) == ["last"]


def test_what_took_the_name_after_the_last_look_has_it_again(tmp_path: Path, exchanging: None) -> None:
    def save(value: float) -> None:
        rankless.RunDirectory(tmp_path).save("last", {"w": torch.full((4,), value)}, overwrite=True)

    replace = atomic_rename.exchange_directories

    def stopped(*arguments: Any) -> None:
        with mock.patch.object(atomic_rename, "exchange_directories", replace):
            save(2.0)
        replace(*arguments)

    save(0.0)
    with (
        mock.patch.object(atomic_rename, "exchange_directories", stopped),
        pytest.raises(TagExistsError, match="meanwhile"),
    ):
        save(1.0)
    assert float(rankless.open(tmp_path)["model/w"][0]) == 2.0
    assert list_names(tmp_path) == ["last"]


def test_the_latest_is_what_was_begun_last_not_what_was_committed_last(tmp_path: Path) -> None:
    """Who wakes up commits late what is older; neither a load nor retention takes it for the latest."""
    move = ShardWriter.write

    def stopped(self: ShardWriter, *arguments: Any) -> Any:
        with mock.patch.object(ShardWriter, "write", move):
            rankless.RunDirectory(tmp_path).save("new", {"w": torch.ones(4)})
        return move(self, *arguments)

    rankless.save_checkpoint(tmp_path, "first", {"w": torch.zeros(4)})
    with mock.patch.object(ShardWriter, "write", stopped):
        rankless.save_checkpoint(tmp_path, "old", {"w": torch.zeros(4)}, keep=1)
    assert [info.tag for info in rankless.list_checkpoints(tmp_path)] == ["old", "new"]
    assert rankless.restore(tmp_path).tag == "new"
