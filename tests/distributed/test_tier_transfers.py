"""Tests what ranks send to each other in the local tier, over gloo: all bytes arrive, at the rate, and unchanged."""

import time
from functools import partial

import numpy as np
import pytest
import torch.distributed as dist

from rankless.engine.comm.session import RankGroup
from rankless.engine.io.p2p import P2PExchange
from rankless.errors import CorruptCheckpointError
from rankless.storage.aligned_memory import Bytes
from rankless.tier import part_transfers
from rankless.tier.part_transfers import MESSAGE_BYTES, Transfer, TransferEnds, run_transfers
from tests.helpers.pool import Ranks

MIB = 2**20


def part_of(rank: int, nbytes: int) -> Bytes:
    return np.random.default_rng(rank).integers(0, 256, nbytes, np.uint8)


def all_to_all(size: int, nbytes: int, message: int = MESSAGE_BYTES) -> list[Transfer]:
    """Each rank sends its whole part to every other one, and keeps a copy itself."""
    return [
        Transfer(sender, start, min(nbytes, start + message), sender, receiver)
        for start in range(0, nbytes, message)
        for sender in range(size)
        for receiver in range(size)
    ]


def exchange(planned: list[Transfer], nbytes: int, *, into_memory: bool = True, rate: float | None = None) -> float:
    """Run transfers on this rank, and check what came. Return the seconds."""
    ranks = RankGroup()
    session = ranks.open_session(60)
    came = {part: np.zeros(nbytes, np.uint8) for part in range(ranks.size)}
    own = part_of(ranks.rank, nbytes)

    def store(transfer: Transfer, data: Bytes) -> None:
        came[transfer.part][transfer.start : transfer.stop] = data

    ends = TransferEnds(
        lambda _: own,
        (lambda one: came[one.part][one.start : one.stop]) if into_memory else None,
        store,
        rate,
    )
    with P2PExchange(ranks.gloo_group(60), session) as p2p:
        dist.barrier()
        began = time.monotonic()
        session.run_on_all("exchanging", lambda: run_transfers(planned, p2p, ends))
        seconds = time.monotonic() - began
    session.leave()
    sent = {(one.part, one.start, one.stop) for one in planned if one.receiver == ranks.rank}
    for part, memory in came.items():
        expected, made = np.zeros(nbytes, np.uint8), part_of(part, nbytes)
        for _, start, stop in (one for one in sent if one[0] == part):
            expected[start:stop] = made[start:stop]
        assert np.array_equal(memory, expected)
    return seconds


@pytest.mark.parametrize("into_memory", [True, False], ids=["into memory", "through buffers"])
def test_all_bytes_arrive_if_all_ranks_send_to_all(ranks: Ranks, into_memory: bool) -> None:
    nbytes = 3 * MESSAGE_BYTES + 5
    ranks(3, partial(exchange, into_memory=into_memory), all_to_all(3, nbytes), nbytes)


def test_many_small_messages_arrive(ranks: Ranks) -> None:
    planned = all_to_all(2, 2_000, message=3)
    assert len(planned) > 2 * part_transfers._MESSAGES
    ranks(2, partial(exchange, into_memory=False), planned, 2_000)


def test_a_rank_that_only_sends_and_one_that_only_receives(ranks: Ranks) -> None:
    nbytes = 20 * MESSAGE_BYTES
    planned = [one for one in all_to_all(2, nbytes) if (one.sender, one.receiver) == (0, 1)]
    ranks(2, partial(exchange, into_memory=False), planned, nbytes)


def test_a_rank_sends_no_faster_than_its_rate(ranks: Ranks) -> None:
    nbytes = 4 * MESSAGE_BYTES
    planned = [one for one in all_to_all(2, nbytes) if one.sender != one.receiver]
    assert max(ranks(2, partial(exchange, rate=32 * MIB), planned, nbytes)) > 3 * MESSAGE_BYTES / (32 * MIB)


def test_all_bytes_arrive_if_each_message_has_come_long_before_the_next_may_go(ranks: Ranks) -> None:
    planned = [one for one in all_to_all(2, 2_000, message=1_000) if (one.sender, one.receiver) == (0, 1)]
    ranks(2, partial(exchange, rate=2_000.0), planned, 2_000)


def change_on_the_way(nbytes: int) -> None:
    """Change the bytes of a message after its CRC was computed."""
    crc64 = part_transfers.crc64

    def wrong(data: Bytes) -> int:
        return crc64(data) ^ (dist.get_rank() == 0)

    part_transfers.crc64 = wrong
    try:
        exchange([Transfer(0, 0, nbytes, 0, 1)], nbytes)
    finally:
        part_transfers.crc64 = crc64


def test_bytes_that_change_on_their_way_are_found(ranks: Ranks) -> None:
    for error in ranks.outcomes(2, change_on_the_way, 100):
        assert isinstance(error, CorruptCheckpointError)
        assert "the part of rank 0 have changed on their way from rank 0 to rank 1" in str(error)
