"""Tests of counts that grow with the number of ranks: messages to rank 0, their bytes, and rows that are sorted."""

from __future__ import annotations

import random
from collections import Counter
from datetime import timedelta

import msgspec
import numpy as np
import pytest
from torch.distributed import HashStore, Store

from rankless.engine.comm.daemon_executor import DaemonExecutor
from rankless.engine.comm.job_store import DeadlineStore
from rankless.engine.comm.rendezvous import Rendezvous
from rankless.engine.comm.spec_directory import SpecDigests, SpecDirectory
from rankless.engine.comm.vote import VoteOutcome, decode_decision, encode_decision
from rankless.engine.comm.vote_channel import VoteChannel
from rankless.engine.io.column_tables import compress_rows, decompress_rows
from rankless.engine.io.received_messages import _order_by_sender
from rankless.engine.plan.cell_transfers import CellTransfer, TransferTable, tabulate_transfers

RANKS = 16_384


class CountedStore(DeadlineStore):
    """Counts the calls of one rank."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, DaemonExecutor("counted store"), 20.0)
        self.calls: Counter[str] = Counter()

    def set(self, key: str, value: bytes = b"") -> None:
        self.calls["set"] += 1
        super().set(key, value)

    def check(self, keys: list[str]) -> bool:  # type: ignore[override]
        self.calls["check"] += 1
        return super().check(keys)

    def get(self, *keys: str) -> list[bytes]:
        self.calls["get"] += 1
        return super().get(*keys)


def test_rank_0_answers_arrivals_together_and_one_that_never_comes_holds_up_nobody() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    store.add("arrivals", 1)  # by a rank that died before it gave its id
    meetings = [Rendezvous(rank, 501) for rank in range(501)]
    others = DeadlineStore(store, DaemonExecutor("others"), 20.0)
    for meeting in meetings[1:]:
        meeting.poll_name(others)
    counted = CountedStore(store)
    name = meetings[0].poll_name(counted)
    assert {meeting.poll_name(others) for meeting in meetings[1:]} == {name}
    meetings[0].poll_name(counted)
    assert meetings[0].is_over
    assert sum(counted.calls.values()) < 2 * 501  # those in the batch of the dead rank are answered one by one


def test_a_rank_that_is_missing_is_found_with_few_calls() -> None:
    counted = CountedStore(HashStore())
    channel = VoteChannel(counted, 1, RANKS)
    counted.set_all({f"1/{rank}": b"" for rank in range(RANKS) if rank != 777})
    assert channel.find_unposted() == [777]
    assert counted.calls["check"] < RANKS / 50


def test_the_decision_of_a_first_vote_has_few_bytes() -> None:
    digests = [SpecDigests(bytes(16), bytes(16))] * RANKS
    payload = msgspec.msgpack.encode(SpecDirectory.from_digests(digests))
    decision = VoteOutcome(payload, hosts=[(host, 8) for host in range(RANKS // 8)])
    encoded = encode_decision(decision)
    assert decode_decision(encoded) == decision
    assert len(encoded) < 10_000 < len(payload)


@pytest.mark.parametrize("size", [0, 10, 4095, 4096, 10_000])
def test_decisions_are_decoded_as_they_were(size: int) -> None:
    decision = VoteOutcome(random.Random(0).randbytes(size))
    assert decode_decision(encode_decision(decision)) == decision


def test_rows_are_compressed_to_little_more_than_their_crcs() -> None:
    rows = np.zeros(3000, [("tensor", "<u4"), ("start", "<u8"), ("stop", "<u8"), ("crc", "<u8")])
    rows["tensor"] = np.arange(3000)
    rows["start"] = np.resize([10**9, 0, 4096], 3000)
    rows["stop"] = rows["start"] + 512
    rows["crc"] = np.random.default_rng(0).integers(2**63, size=3000)
    packed = compress_rows(rows.tobytes(), rows.itemsize)
    assert decompress_rows(packed, rows.itemsize) == rows.tobytes()
    assert len(packed) < 3000 * 9


def test_no_rows_are_compressed() -> None:
    assert decompress_rows(compress_rows(b"", 28), 28) == b""


def table_of(transfers: list[CellTransfer]) -> TransferTable:
    return TransferTable.of_columns(*np.array(transfers, np.int64).reshape(-1, 4).T)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_transfers_and_tables_become_one_table_in_the_order_of_the_files(is_interleaved: bool) -> None:
    draw = random.Random(1)
    every = [CellTransfer(file, 10 * at, 10 * at + 5, draw.randrange(99)) for file in range(3) for at in range(40)]
    blocks = [every[first : first + 10] for first in range(0, len(every), 10)]
    if is_interleaved:
        blocks = [every[first::12] for first in range(12)]
    draw.shuffle(blocks)
    single = [transfer for block in blocks[:3] for transfer in block]
    draw.shuffle(single)
    assert tabulate_transfers(single, map(table_of, blocks[3:])).to_transfers() == every


@pytest.mark.parametrize("ranks", [5, 2**16, 2**17 + 3])
def test_transfers_are_ordered_by_rank_and_keep_their_order(ranks: int) -> None:
    column = np.random.default_rng(ranks).integers(ranks, size=1000, dtype=np.int32)
    column[-1] = ranks - 1
    assert _order_by_sender(column).tolist() == sorted(range(1000), key=lambda row: column[row])
