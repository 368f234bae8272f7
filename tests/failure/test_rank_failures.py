"""Tests ranks that fail, leave or stall at any point of a save or load: all ranks soon raise one error."""

import contextlib
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import rankless
from rankless.errors import RankFailedError, RanklessError, RankTimeoutError, StateError
from rankless.run.pending_dir import PendingDirectory
from tests.helpers.layouts import LAYOUTS, blank_run, fill_run
from tests.helpers.pairwise import first_of
from tests.helpers.pool import Ranks
from tests.helpers.run_directories import list_names

#: What is called in a save over three tensor-parallel ranks, stripes between them included, and in a load.
SAVING = [
    "rankless.save.save_negotiation.capture_training",
    "rankless.save.training_content.plan_save",
    "rankless.engine.integrity.replica_comparison.digest_replicas",
    "rankless.engine.io.p2p.P2PExchange.receive",
    "rankless.storage.direct_io.DirectWriter.write",
    "rankless.engine.integrity.crc_gather.encode_fragments",
    "rankless.save.save_negotiation.encode_merged_values",
    "rankless.save.shard_writer.write_stripes",
    "rankless.engine.io.p2p.P2PExchange.send",
    "rankless.engine.io.p2p.P2PExchange.wait",
    "rankless.engine.plan.stripes.StripeSlice.copy_in",
    "rankless.storage.direct_io.DirectWriter.sync",
    "rankless.save.shard_writer.write_file_ranges",
]
LEADING = [
    "rankless.save.training_content.next_identity",
    "rankless.run.pending_dir.PendingDirectory.create",
    "rankless.run.pending_dir.PendingDirectory.publish",
]
LOADING = [
    "rankless.load.load_operation.NativeReader",
    "rankless.load.rank_reads.plan_load",
    "rankless.engine.io.p2p.P2PExchange.send",
    "rankless.engine.io.source_reader.SourceReader.read",
    "rankless.engine.integrity.block_verification.ChecksumVerifier.verify_local",
    "rankless.state.restore.LoadTargets.apply",
    "rankless.state.restore.LoadTargets.match_targets",
    "rankless.state.restore.LoadTargets.check_matches",
    "rankless.load.rank_reads.read_shared",
    "rankless.engine.io.p2p.P2PExchange.receive",
    "rankless.engine.io.p2p.P2PExchange.wait",
    "rankless.engine.plan.stripes.StripeSlice.copy_out",
]


MODEL = {"w": torch.arange(10.0)}

#: The rank with the fault, where there is none.
NOBODY = -1


class Fault(Exception):  # noqa: N818
    """Something that nobody has thought of."""


def faulty(*_: Any, **__: Any) -> Any:
    raise Fault("lost")


def run(path: str, call: str, where: str, who: int, timeout: float = 60.0) -> float:
    """Save or load with a fault on one rank; returns the seconds until the error."""
    made = LAYOUTS["tp"][0]()
    dist.barrier()
    started = time.monotonic()
    with mock.patch(where, faulty) if dist.get_rank() == who else contextlib.nullcontext():
        try:
            if call == "save":
                rankless.save_checkpoint(path, "t", fill_run(made).model, made.optimizer, timeout=timeout)
            else:
                rankless.load_checkpoint(path, model=made.model, optimizer=made.optimizer, share_reads="always")
        except RanklessError as error:
            error.seconds = time.monotonic() - started  # type: ignore[attr-defined]
            raise
    return time.monotonic() - started


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tp")
    ranks(3, run, str(path), "save", "", NOBODY)
    return path


def assert_together(outcomes: list[Any], who: int) -> None:
    assert {type(error) for error in outcomes} == {RankFailedError}, outcomes
    assert len({str(error) for error in outcomes}) == 1
    assert f"rank {who} of 3" in str(outcomes[0])
    assert "Fault: lost" in str(outcomes[0])
    assert max(error.seconds for error in outcomes) < 10


@first_of(6, "where", SAVING)
def test_a_fault_in_a_save_is_raised_by_all(ranks: Ranks, tmp_path: Path, where: str) -> None:
    assert_together(ranks.outcomes(3, run, str(tmp_path), "save", where, 1), 1)
    assert not list_names(tmp_path)
    ranks(3, run, str(tmp_path), "save", "", NOBODY)


class WithoutMessageError(Exception):
    def __str__(self) -> str:
        raise KeyError("message")


class Unsaveable:
    def state_dict(self) -> dict[str, Any]:
        raise WithoutMessageError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is loaded."""


def save_without_message(path: str) -> None:
    stateful = {"s": Unsaveable() if dist.get_rank() == 1 else torch.nn.Linear(1, 1)}
    rankless.save_checkpoint(path, "a", MODEL, stateful=stateful, timeout=10)


def test_an_error_whose_message_fails_is_raised_by_all(ranks: Ranks, tmp_path: Path) -> None:
    for error in ranks.outcomes(3, save_without_message, str(tmp_path)):
        assert isinstance(error, StateError)
        assert "rank 1 of 3" in str(error)
        assert "WithoutMessageError: (no message: its __str__ raised KeyError)" in str(error)


@pytest.mark.parametrize("where", LEADING)
def test_a_fault_of_the_leader_is_raised_by_all(ranks: Ranks, tmp_path: Path, where: str) -> None:
    outcomes = ranks.outcomes(3, run, str(tmp_path), "save", where, 0)
    assert {str(error) for error in outcomes} == {"Fault: lost"}
    assert not list_names(tmp_path)


@first_of(6, "where", LOADING)
def test_a_fault_in_a_load_is_raised_by_all(ranks: Ranks, saved: Path, where: str) -> None:
    assert_together(ranks.outcomes(3, run, str(saved), "load", where, 2), 2)


def stalling(path: str, where: str) -> float:
    """Rank 1 comes back when the others have long given up."""

    def stall(*_: Any, **__: Any) -> Any:
        time.sleep(8)
        raise Fault("woke up too late")

    made = fill_run(LAYOUTS["tp"][0]())
    dist.barrier()
    started = time.monotonic()
    with mock.patch(where, stall) if dist.get_rank() == 1 else contextlib.nullcontext():
        with pytest.raises((RankTimeoutError, RankFailedError)) as raised:
            rankless.save_checkpoint(path, "t", made.model, made.optimizer, timeout=2.0)
        seconds = time.monotonic() - started
    if dist.get_rank() != 1:
        assert isinstance(raised.value, RankTimeoutError), raised.value
        assert "rank 1" in str(raised.value)
    time.sleep(max(0.0, 10 - seconds))  # the sleeper takes part in no other test
    return seconds


@first_of(1, "where", ["rankless.engine.io.p2p.P2PExchange.send", "rankless.save.training_content.plan_save"])
def test_a_rank_that_stalls_is_named_within_the_timeout(ranks: Ranks, tmp_path: Path, where: str) -> None:
    first, _, last = ranks(3, stalling, str(tmp_path), where)
    assert max(first, last) < 2 * 2.0 + 2


def test_the_blank_state_is_not_the_saved_one(saved: Path) -> None:
    """The loads above would notice a load that does nothing."""
    made = blank_run(LAYOUTS["plain"][0]())
    rankless.load_checkpoint(saved, model=made.model)
    assert not torch.equal(made.model.head.weight, torch.full_like(made.model.head.weight, 7))


def slow_work(path: str) -> str:
    patch = pytest.MonkeyPatch()
    patch.setattr("rankless.save.shard_writer.write_file_ranges", _slow_write)
    try:
        return rankless.save_checkpoint(path, "s", MODEL, timeout=1).wait().tag
    finally:
        patch.undo()


def _slow_write(*arguments: Any, **options: Any) -> Any:
    from rankless.engine.io.write import write_file_ranges

    time.sleep(2 + 0.2 * dist.get_rank())
    return write_file_ranges(*arguments, **options)


def slow_commit(path: str) -> str:
    patch = pytest.MonkeyPatch()
    publish = PendingDirectory.publish
    patch.setattr(PendingDirectory, "publish", lambda *arguments: (time.sleep(1.5), publish(*arguments))[1])
    try:
        return rankless.save_checkpoint(path, "s", MODEL, timeout=2).wait().tag
    finally:
        patch.undo()


@pytest.mark.parametrize("call", [slow_work, slow_commit])
def test_the_timeout_is_for_waiting_not_for_work(ranks: Ranks, tmp_path: Path, call: Any) -> None:
    assert ranks(2, call, str(tmp_path)) == ["s", "s"]


def interrupted(path: str) -> float:
    started = time.monotonic()
    patch = pytest.MonkeyPatch()
    if dist.get_rank() == 0:
        patch.setattr("rankless.save.save_negotiation.capture_training", _interrupt)
    try:
        with pytest.raises(
            KeyboardInterrupt if dist.get_rank() == 0 else RankFailedError, match=r"^$|KeyboardInterrupt"
        ):
            rankless.save_checkpoint(path, "s", MODEL, timeout=30)
    finally:
        patch.undo()
    return time.monotonic() - started


def _interrupt(*_: Any, **_keywords: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_on_rank_0_does_not_leave_the_others_waiting(ranks: Ranks, tmp_path: Path) -> None:
    assert max(ranks(2, interrupted, str(tmp_path))) < 3


def stopped(path: str) -> float:
    """Ranks 0 and 2 wait for rank 1, which never comes."""
    started = time.monotonic()
    if dist.get_rank() != 1:
        with pytest.raises(RankTimeoutError, match="rank 1 did not come"):
            rankless.save_checkpoint(path, "s", MODEL, timeout=1)
    else:
        time.sleep(3.5)
    return time.monotonic() - started


def test_every_rank_names_the_one_that_is_missing_in_time(ranks: Ranks, tmp_path: Path) -> None:
    first, _, third = ranks(3, stopped, str(tmp_path))
    assert max(first, third) < 1 + 2
