"""Tests that merging fragments of many ranks, at once or in groups first, gives the CRCs of all fragments."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rankless.engine.io import fragments as fold
from rankless.engine.io import requests
from rankless.engine.io.checkpoint_files import build_headers
from rankless.engine.io.extend_crcs import extend_crcs
from rankless.engine.io.fragments import FragmentTable, decode_fragments, encode_fragments
from rankless.engine.io.requests import Fragments
from rankless.engine.plan.save_plan import SavePlan
from rankless.errors import RankMismatchError
from rankless.ondisk import block_crcs
from rankless.ondisk.block_crcs import Fragment, crc64
from rankless.ondisk.data_files import DataFile, HeaderEntry

BLOCK = 64

#: Bytes of a tensor.
MOST = 5 * BLOCK


@pytest.fixture(autouse=True)
def small() -> Iterable[None]:
    with mock.patch.object(fold, "BLOCK_BYTES", BLOCK), mock.patch.object(block_crcs, "BLOCK_BYTES", BLOCK):
        yield


def assembled(actual: Fragments, sizes: dict[int, int]) -> dict[int, list[int | None]]:
    return {tensor: block_crcs.assemble_crcs(actual.get(tensor, []), nbytes) for tensor, nbytes in sizes.items()}


def at_once(reports: list[Fragments]) -> Fragments:
    """All fragments, as they were told."""
    result: Fragments = {}
    for own in reports:
        for tensor, fragments in own.items():
            result.setdefault(tensor, []).extend(fragments)
    return result


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 16 * 2**20)), max_size=20))
@example([(2**64 - 1, 16 * 2**20), (1, 0), (2**63, 2**63 - 1)])
def test_crcs_are_moved_as_if_that_many_bytes_followed(moves: list[tuple[int, int]]) -> None:
    crcs, distances = np.array(moves, np.uint64).reshape(-1, 2).T
    assert extend_crcs(crcs, distances).tolist() == [block_crcs.combine(crc, 0, distance) for crc, distance in moves]


def test_many_crcs_are_moved_as_few_are() -> None:
    random = np.random.default_rng(0)
    crcs, distances = random.integers(2**64, size=20_000, dtype=np.uint64), random.integers(2**24, size=20_000)
    moved = extend_crcs(crcs, distances.astype(np.uint64))
    for item in range(0, len(crcs), 997):
        assert int(moved[item]) == block_crcs.combine(int(crcs[item]), 0, int(distances[item]))


@st.composite
def shared_out(draw: st.DrawFn) -> tuple[list[Fragments], dict[int, list[int]]]:
    """Tensors cut anywhere, each fragment hashed by one of some ranks; and the CRCs of their blocks."""
    ranks: list[Fragments] = [{} for _ in range(draw(st.integers(1, 9)))]
    crcs = {}
    for tensor in range(draw(st.integers(0, 3))):
        data = draw(st.binary(max_size=MOST))
        cuts = {cut for cut in draw(st.lists(st.integers(1, MOST), max_size=12)) if cut < len(data)}
        edges = sorted({0, len(data), *cuts, *range(0, len(data), BLOCK)})
        in_turn = draw(st.booleans())  # else anyhow
        for number, (start, stop) in enumerate(itertools.pairwise(edges)):
            rank = number * len(ranks) // len(edges) if in_turn else draw(st.integers(0, len(ranks) - 1))
            ranks[rank].setdefault(tensor, []).append(Fragment(start, stop, crc64(data[start:stop])))
        crcs[tensor] = [crc64(data[start : start + BLOCK]) for start in range(0, len(data), BLOCK)]
    return ranks, crcs


@given(shared_out(), st.integers(1, 9))
def test_folded_in_groups_all_give_the_crc_of_each_block(case, many: int) -> None:
    ranks, crcs = case
    groups = [[encode_fragments(own) for own in ranks[low : low + many]] for low in range(0, len(ranks), many)]
    actual = decode_fragments(
        fold.merge_adjacent_fragments(FragmentTable.from_bytes(group)).to_bytes() for group in groups
    )
    assert {tensor: [item.crc for item in actual.get(tensor, [])] for tensor in crcs} == crcs
    assert all(item.start % BLOCK == 0 for fragments in actual.values() for item in fragments)


@given(shared_out(), st.integers(1, 9), st.data())
def test_a_fragment_that_nobody_told_is_missed_in_its_block_alone(case, many: int, drawn: st.DataObject) -> None:
    ranks, crcs = case
    reported = [(own, tensor) for own in ranks for tensor in own]
    if not reported:
        return
    own, tensor = drawn.draw(st.sampled_from(reported))
    lost = own[tensor].pop(drawn.draw(st.integers(0, len(own[tensor]) - 1)))
    groups = [[encode_fragments(own) for own in ranks[low : low + many]] for low in range(0, len(ranks), many)]
    actual = decode_fragments(
        fold.merge_adjacent_fragments(FragmentTable.from_bytes(group)).to_bytes() for group in groups
    )
    expected: dict[int, list[int | None]] = {**crcs}
    expected[tensor] = [None if block == lost.start // BLOCK else crc for block, crc in enumerate(crcs[tensor])]
    sizes = {tensor: max(event.stop for own in [*ranks, {tensor: [lost]}] for event in own.get(tensor, []))}
    assert assembled(actual, sizes)[tensor] == expected[tensor][: block_crcs.count_blocks(sizes[tensor])]


@st.composite
def anything(draw: st.DrawFn) -> list[Fragments]:
    """Fragments of two tensors that may be told twice, contradict each other, overlap, or leave gaps."""
    edges = st.sampled_from([0, 1, 10, 20, 32, 63])
    some = st.builds(
        lambda block, low, high, crc: Fragment(
            block * BLOCK + min(low, high), block * BLOCK + (BLOCK if low == high else max(low, high)), crc
        ),
        st.integers(0, 2),
        edges,
        edges,
        st.integers(1, 3),
    )
    return draw(st.lists(st.dictionaries(st.integers(0, 1), st.lists(some, min_size=1, max_size=8)), max_size=4))


def test_a_block_in_which_fragments_overlap_is_left_as_it_is() -> None:
    overlapping = [Fragment(0, 10, 1), Fragment(5, 10, 2), Fragment(10, 20, 3)]
    adjacent = [Fragment(BLOCK, BLOCK + 10, 4), Fragment(BLOCK + 10, BLOCK + 20, 5)]
    actual = decode_fragments([encode_fragments({0: [*overlapping, *adjacent]})])
    joined = Fragment(BLOCK, BLOCK + 20, block_crcs.combine(4, 5, 10))
    assert actual == {0: [*overlapping, joined]}


@given(anything())
def test_what_does_not_fit_together_assembles_folded_as_it_does_at_once(reports: list[Fragments]) -> None:
    sizes = {0: 3 * BLOCK, 1: 3 * BLOCK}
    actual = decode_fragments(map(encode_fragments, reports))
    assert assembled(actual, sizes) == assembled(at_once(reports), sizes)


@given(anything(), st.integers(1, 4))
def test_in_groups_nothing_assembles_that_does_not_at_once(reports: list[Fragments], many: int) -> None:
    """A group cannot know that another has hashed the same bytes, cut otherwise: such a block has no CRC then."""
    sizes = {0: 3 * BLOCK, 1: 3 * BLOCK}
    groups = [map(encode_fragments, reports[low : low + many]) for low in range(0, len(reports), many)]
    actual = assembled(
        decode_fragments(fold.merge_adjacent_fragments(FragmentTable.from_bytes(group)).to_bytes() for group in groups),
        sizes,
    )
    whole = assembled(at_once(reports), sizes)
    for tensor, crcs in actual.items():
        assert all(crc in {None, expected} for crc, expected in zip(crcs, whole[tensor], strict=True))


@given(anything())
def test_ranges_with_two_crcs_are_told_as_they_are(reports: list[Fragments]) -> None:
    """A load tells damage by them."""

    def twice(actual: Fragments) -> set[tuple[int, int, int]]:
        every = {(tensor, *item) for tensor, fragments in actual.items() for item in fragments}
        return {item for item in every if any(item[:3] == other[:3] and item != other for other in every)}

    assert twice(decode_fragments(map(encode_fragments, reports))) == twice(at_once(reports))


@given(shared_out())
def test_ranks_fold_what_they_report_as_they_gather_it(case) -> None:
    """``transfer.gather`` does the same for what one rank hashed."""
    ranks, _ = case
    with mock.patch.object(requests, "BLOCK_BYTES", BLOCK):
        gathered = requests.merge_fragments(
            [(tensor, item) for tensor, actual in own.items() for item in actual] for own in ranks
        )
    assert decode_fragments(map(encode_fragments, ranks)) == gathered


def test_nothing_told_is_nothing() -> None:
    assert encode_fragments({}) == b""
    assert decode_fragments([]) == decode_fragments([b"", b""]) == {}


def test_a_fragment_is_told_in_28_bytes() -> None:
    actual = {3: [Fragment(0, 5, 2**64 - 1)], 2**32 - 1: [Fragment(2**40, 2**40 + 7, 0)]}
    assert len(encode_fragments(actual)) == 56
    assert decode_fragments([encode_fragments(actual)]) == actual


@given(st.lists(st.lists(st.integers(0, MOST), max_size=4), max_size=4), st.data())
def test_headers_of_all_files_at_once_are_those_of_each(sizes: list[list[int]], data: st.DataObject) -> None:
    """Of any tensors, also without bytes; what is missing is named by both."""
    files = [
        DataFile(f"model/{n}.safetensors", dict(entries_of(n, of_file)), {})
        for n, of_file in enumerate(sizes)
        if of_file
    ]
    names = [("model", name) for file in files for name in file.entries]
    plan = SavePlan(files, {"model": files}, names, (), (), {}, needs_exchange=False)
    contents = [data.draw(st.binary(min_size=e.nbytes, max_size=e.nbytes)) for f in files for e in f.entries.values()]
    fragments: Fragments = {
        number: [
            Fragment(start, start + len(block), crc64(block))
            for start in range(0, len(content), BLOCK)
            for block in [content[start : start + BLOCK]]
        ]
        for number, content in enumerate(contents)
        if content
    }
    gathered = decode_fragments([encode_fragments(fragments)])
    assert gathered.find_blocks([len(content) for content in contents]) is not None
    assert list(build_headers(plan, gathered)) == list(build_headers(plan, fragments))
    if fragments:
        fragments[max(fragments)].pop()
        gathered = decode_fragments([encode_fragments(fragments)])
        assert gathered.find_blocks([len(content) for content in contents]) is None
        with pytest.raises(RankMismatchError, match="no rank saved all of bytes"):
            list(build_headers(plan, gathered))


def entries_of(number: int, sizes: list[int]) -> Iterable[tuple[str, HeaderEntry]]:
    """Tensors of bytes, one after the other."""
    start = 0
    for n, size in enumerate(sizes):
        yield f"t{number}.{n}", HeaderEntry("U8", (size,), (start, start + size))
        start += size
