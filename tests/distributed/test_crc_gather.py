"""Tests that ranks report CRCs through groups: the files are the same, and a lost rank is named by all."""

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import rankless
from rankless.engine.comm.job_store import DeadlineStore
from rankless.engine.comm.session import RankGroup as Members
from rankless.engine.integrity import crc_gather
from rankless.engine.io.requests import Fragment
from rankless.errors import RankFailedError, RanklessError, RankTimeoutError
from rankless.storage.host_mailbox import HostMailbox
from tests.helpers import layout_checkpoints
from tests.helpers.layouts import LAYOUTS, fill_run
from tests.helpers.pairwise import first_of
from tests.helpers.pool import Ranks
from tests.helpers.run_directories import list_names
from tests.helpers.simulated_hosts import simulated_host

#: Groups of two of four ranks, of three, three and two of eight.
IN_GROUPS = mock.patch.object(crc_gather, "MAX_FLAT_RANKS", 1)

CASES = [("fsdp", 4), ("ddp", 3), ("fsdp_tp", 4), ("plain", 2), ("tp", 4), ("pp_fsdp", 4), ("hsdp_tp", 8)]


def save(path: str, layout: str) -> None:
    with IN_GROUPS:
        layout_checkpoints.save_layout(path, layout)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    layout_checkpoints.save_layout(str(path), "plain")
    return path


@first_of(3, ("layout", "n"), CASES)
def test_files_do_not_depend_on_the_way(ranks: Ranks, tmp_path: Path, expected: Path, layout: str, n: int) -> None:
    ranks(n, save, str(tmp_path), layout)
    layout_checkpoints.assert_same_files(layout, tmp_path, expected)
    assert all(part.problem is None for part in rankless.open(tmp_path).verify())


def save_part_and_convert(path: str) -> None:
    run = fill_run(LAYOUTS["fsdp"][0]())
    with IN_GROUPS:
        rankless.save_model(run.model, f"{path}/hf", shard=True)
        rankless.convert(f"{path}/hf", f"{path}/ours", to="native")


def test_a_part_and_a_conversion_go_the_same_way(ranks: Ranks, tmp_path: Path, expected: Path) -> None:
    ranks(4, save_part_and_convert, str(tmp_path))
    actual, whole = rankless.open(tmp_path / "ours"), rankless.open(expected)
    assert all(part.problem is None for part in actual.verify())
    assert set(actual) == {name for name in whole if name.startswith("model/")}
    assert all(torch.equal(actual[name], whole[name]) for name in actual)


def tell() -> tuple[list[int], list[str], list[str]]:
    """Each rank hashes ten neighbours: how many fragments rank 0 is told by each, what else, and what keys stay."""
    reported: list[int] = []
    session = Members().open_session(20.0)
    mine = [Fragment(100 * (10 * session.rank + n), 100 * (10 * session.rank + n + 1), 0) for n in range(10)]
    decode = crc_gather.decode_fragments

    def listen(reports: Any) -> Any:
        reports = list(reports)
        reported.extend(len(raw) // 28 for raw in reports)
        return decode(reports)

    def decide(fragments: Any, posted: list[bytes]) -> bytes:
        assert {tensor: len(actual) for tensor, actual in fragments.items()} == {0: 1}
        return b" ".join(posted)

    with IN_GROUPS, mock.patch.object(crc_gather, "decode_fragments", listen):
        said = crc_gather.vote_with_fragments(
            session, "testing", lambda: crc_gather.HashedResult({0: mine}, str(session.rank).encode()), decide
        )
    time.sleep(0.5)  # nobody waits until keys are forgotten
    dist.barrier()
    keys = [
        f"rankless/{dist.group.WORLD.group_name}/{session.number}/hashed/testing/{rank}" for rank in range(session.size)
    ]
    return reported, said.decode().split(), [key for key in keys if _get_default_store().check([key])]


def test_rank_0_is_told_by_the_first_of_each_group_and_nothing_stays_in_the_store(ranks: Ranks) -> None:
    (reported, *_), *_ = results = ranks(8, tell)
    assert reported == [1, 1, 1]
    assert all(said == [str(rank) for rank in range(8)] for _, said, _ in results)
    assert not any(keys for _, _, keys in results)


def report_on_host(host: str, boards: str, *, is_lost: bool) -> tuple[list[str], bytes]:
    """Report CRCs on two hosts: the keys that this rank has set for them in the store, and what rank 0 has got."""
    stored: list[str] = []
    set_value = DeadlineStore.set

    def note_key(store: DeadlineStore, key: str, value: bytes = b"") -> None:
        stored.extend([key] if key.startswith("hashed/") else [])
        set_value(store, key, value)

    read = HostMailbox.read

    def lose_report(board: HostMailbox, name: str) -> bytes | None:
        return None if is_lost and "hashed" in str(board._path) else read(board, name)

    lost = mock.patch.object(HostMailbox, "read", lose_report)
    group = dist.new_group(range(dist.get_world_size()))  # which does not know its hosts yet
    with simulated_host(host, boards), IN_GROUPS, mock.patch.object(DeadlineStore, "set", note_key):
        session = Members(group).open_session(20.0)
        session.run_on_all("meeting", lambda: None)
        start = 100 * session.rank
        hashed = crc_gather.HashedResult({0: [Fragment(start, start + 100, 7)]}, bytes([session.rank]))
        with lost:
            decision = crc_gather.vote_with_fragments(
                session,
                "testing",
                lambda: hashed,
                lambda crcs, payloads: b"".join(payloads) + f" {[row[:2] for row in crcs[0]]}".encode(),
            )
    return stored, decision


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_host_stores_one_report_and_each_rank_its_own_if_a_message_is_lost(
    ranks: Ranks, tmp_path: Path, is_lost: bool
) -> None:
    results = ranks(6, report_on_its_host, str(tmp_path), is_lost)
    assert {decision for _, decision in results} == {bytes(range(6)) + b" [(0, 600)]"}
    names = sorted(key.split("/", 3)[3] for stored, _ in results for key in stored)
    assert names == ([str(rank) for rank in range(6)] if is_lost else ["host/0", "host/1"])
    assert not list(tmp_path.rglob("*hashed*"))


def report_on_its_host(boards: str, is_lost: bool) -> tuple[list[str], bytes]:
    return report_on_host("ab"[dist.get_rank() // 3], boards, is_lost=is_lost)


@contextmanager
def fault(where: str, who: int, what: Any) -> Iterator[None]:
    with mock.patch(where, what) if dist.get_rank() == who else contextlib.nullcontext():
        yield


class Fault(Exception):  # noqa: N818
    """Something that nobody has thought of."""


def faulty(*_: Any, **__: Any) -> Any:
    raise Fault("lost")


def interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def failing(path: str, where: str, who: int, what: Any) -> float:
    """A save in groups with a fault on one rank; raises what it raises, soon."""
    made = fill_run(LAYOUTS["fsdp"][0]())
    dist.barrier()
    started = time.monotonic()
    with IN_GROUPS, fault(where, who, what):
        try:
            rankless.save_checkpoint(path, "t", made.model, made.optimizer)
        except RanklessError as error:
            error.seconds = time.monotonic() - started  # type: ignore[attr-defined]
            raise


#: What a rank does before it tells its group, in telling it, and what a group's first rank does then.
STEPS = [
    ("rankless.save.shard_writer.write_file_ranges", 3),
    ("rankless.engine.integrity.crc_gather.StoredReports.publish", 1),
    ("rankless.engine.integrity.crc_gather.merge_adjacent_fragments", 2),
    ("rankless.engine.integrity.crc_gather.decode_fragments", 0),
]


@pytest.mark.parametrize(("where", "who"), STEPS)
def test_a_fault_is_raised_by_all_at_once(ranks: Ranks, tmp_path: Path, where: str, who: int) -> None:
    outcomes = ranks.outcomes(4, failing, str(tmp_path), where, who, faulty)
    assert {type(error) for error in outcomes} == {RankFailedError}, outcomes
    assert len({str(error) for error in outcomes}) == 1
    assert "Fault: lost" in str(outcomes[0])
    assert who == 0 or f"rank {who} of 4" in str(outcomes[0])
    assert max(error.seconds for error in outcomes) < 10
    assert not list_names(tmp_path)
    ranks(4, save, str(tmp_path), "fsdp")


@pytest.mark.parametrize(("where", "who"), STEPS[:-1])
def test_an_interrupt_passes_and_ends_the_others(ranks: Ranks, tmp_path: Path, where: str, who: int) -> None:
    outcomes = ranks.outcomes(4, failing, str(tmp_path), where, who, interrupted)
    assert isinstance(outcomes.pop(who), KeyboardInterrupt)
    assert {type(error) for error in outcomes} == {RankFailedError}
    assert all(f"rank {who} of 4" in str(error) and "KeyboardInterrupt" in str(error) for error in outcomes)


def stalling(path: str, where: str, who: int) -> tuple[str, float]:
    """One rank comes back when the others have long given up."""

    def stall(*_: Any, **__: Any) -> Any:
        time.sleep(4)
        raise Fault("woke up too late")

    made = fill_run(LAYOUTS["fsdp"][0]())
    dist.barrier()
    started = time.monotonic()
    with IN_GROUPS, fault(where, who, stall), pytest.raises((RankTimeoutError, RankFailedError)) as raised:
        rankless.save_checkpoint(path, "t", made.model, made.optimizer, timeout=1.0)
    seconds = time.monotonic() - started
    assert dist.get_rank() == who or isinstance(raised.value, RankTimeoutError), raised.value
    time.sleep(max(0.0, 5 - seconds))  # the sleeper takes part in no other test
    return str(raised.value), seconds


@first_of(1, ("where", "who"), STEPS[:-1])
def test_a_rank_that_stalls_is_named_by_all_and_nobody_else_is(
    ranks: Ranks, tmp_path: Path, where: str, who: int
) -> None:
    results = ranks(4, stalling, str(tmp_path), where, who)
    results.pop(who)
    assert all(message.startswith(f"rank {who} did not come") for message, _ in results), results
    assert max(seconds for _, seconds in results) < 2 * 1.0 + 2
    assert not list_names(tmp_path)
