"""Tests the planning of what hosts send to each other. Property tests: a byte is an element of a set."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from rankless.engine.plan.number_ranges import merge_spans
from rankless.tier import part_transfers
from rankless.tier.part_transfers import Transfer, plan_transfers

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (min(pair), max(pair))), max_size=6)


def bytes_of(pairs: object) -> set[int]:
    return {byte for start, stop in pairs for byte in range(start, stop)}  # type: ignore[attr-defined]


@given(spans)
def test_merged_spans_have_the_same_bytes_and_gaps_between_them(pairs: list[tuple[int, int]]) -> None:
    merged = merge_spans(pairs)
    assert bytes_of(merged) == bytes_of(pairs)
    assert all(first[1] < second[0] for first, second in itertools.pairwise(merged))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[dict[int, list[tuple[int, int]]]], list[int], dict[int, list[int]]]:
    """What each rank needs, the host of each rank, and the hosts that hold each part."""
    hosts = draw(st.integers(1, 4))
    host_of = [*range(hosts), *draw(st.lists(st.integers(0, hosts - 1), max_size=4))]
    places = {
        part: sorted(draw(st.sets(st.integers(0, hosts - 1), min_size=1))) for part in range(draw(st.integers(1, 4)))
    }
    needed = [draw(st.dictionaries(st.sampled_from(sorted(places)), spans, max_size=3)) for _ in host_of]
    return needed, host_of, places


@given(jobs(), st.integers(1, 20))
def test_each_host_gets_each_missing_byte_once_from_a_host_that_holds_it(
    job: tuple[list[dict[int, list[tuple[int, int]]]], list[int], dict[int, list[int]]], message: int
) -> None:
    needed, host_of, places = job
    with_small_messages = part_transfers.MESSAGE_BYTES
    part_transfers.MESSAGE_BYTES = message
    try:
        planned = plan_transfers(needed, host_of, places)
    finally:
        part_transfers.MESSAGE_BYTES = with_small_messages
    for transfer in planned:
        assert host_of[transfer.sender] in places[transfer.part]
        assert 0 < transfer.nbytes <= message
    for host in set(host_of):
        for part, holders in places.items():
            got = [one for one in planned if host_of[one.receiver] == host and one.part == part]
            wanted = set().union(
                *(bytes_of(of.get(part, ())) for rank, of in enumerate(needed) if host_of[rank] == host)
            )
            expected = set() if host in holders else wanted
            assert bytes_of([(one.start, one.stop) for one in got]) == expected
            assert sum(one.nbytes for one in got) == len(expected)


def test_all_pairs_of_ranks_begin_at_the_same_time() -> None:
    size = 4 * part_transfers.MESSAGE_BYTES
    planned = plan_transfers([{1: [(0, size)]}, {0: [(0, size)]}], [0, 1], {0: [0], 1: [1]})
    assert {(one.sender, one.receiver) for one in planned[:2]} == {(0, 1), (1, 0)}


def test_hosts_with_copies_share_the_sending() -> None:
    size = 8 * part_transfers.MESSAGE_BYTES
    planned = plan_transfers([{0: [(0, size)]}, {}, {}], [0, 1, 2], {0: [1, 2]})
    sent = {rank: sum(one.nbytes for one in planned if one.sender == rank) for rank in (1, 2)}
    assert sent == {1: size / 2, 2: size / 2}


def test_a_transfer_knows_its_size() -> None:
    assert Transfer(0, 3, 10, 0, 1).nbytes == 7
