"""Tests which hosts get copies and parities, and what can be computed after hosts are lost."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankless.tier.copies_on_hosts import choose_partners
from rankless.tier.generation_catalog import find_rebuilding
from rankless.tier.parity import ChunkLayout, form_groups

host_lists = st.lists(st.sampled_from("abcd"), min_size=1, max_size=8)


@given(host_lists, st.integers(0, 3))
def test_partners_are_on_other_hosts_each_on_another_one(hosts: list[str], copies: int) -> None:
    partners = choose_partners(hosts, [""] * len(hosts), copies)
    for rank, chosen in enumerate(partners):
        used = [hosts[partner] for partner in chosen]
        assert hosts[rank] not in used
        assert len(set(used)) == len(used) == min(copies, len(set(hosts)) - 1)


def test_each_rank_of_equal_hosts_gets_as_many_copies_as_it_makes() -> None:
    hosts = ["a", "a", "b", "b", "c", "c"]
    received = list(itertools.chain(*choose_partners(hosts, [""] * 6, 2)))
    assert [received.count(rank) for rank in range(6)] == [2] * 6


def test_copies_go_to_another_failure_domain_if_there_is_one() -> None:
    partners = choose_partners(["a", "b", "c", "d"], ["left", "left", "right", "right"], 1)
    assert partners == [[2], [2], [0], [0]]
    assert choose_partners(["a", "b"], ["left", "left"], 1) == [[1], [0]]


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_each_member_keeps_one_chunk_of_each_other_member(size: int) -> None:
    layout = ChunkLayout(size, 10)
    for keeper in range(size):
        chunks = [(m, c) for m in range(size) for c in range(size - 1) if layout.keeper(m, c) == keeper]
        assert [member for member, _ in chunks] == [member for member in range(size) if member != keeper]
        assert all(layout.chunk_for(member, keeper) == chunk for member, chunk in chunks)


@given(st.lists(st.integers(0, 50), min_size=2, max_size=6), st.data())
def test_a_lost_part_follows_from_the_others_and_their_parities(sizes: list[int], data: st.DataObject) -> None:
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    layout = ChunkLayout.of(sizes)
    parities = [np.zeros(layout.chunk, np.uint8) for _ in sizes]
    for member, chunk in itertools.product(range(len(sizes)), range(len(sizes) - 1)):
        start, stop = layout.span(chunk, sizes[member])
        parities[layout.keeper(member, chunk)][: stop - start] ^= parts[member][start:stop]
    lost = data.draw(st.integers(0, len(sizes) - 1))
    rebuilt = np.zeros(sizes[lost], np.uint8)
    for chunk in range(len(sizes) - 1):
        keeper = layout.keeper(lost, chunk)
        whole = parities[keeper].copy()
        for member in set(range(len(sizes))) - {lost, keeper}:
            start, stop = layout.span(layout.chunk_for(member, keeper), sizes[member])
            whole[: stop - start] ^= parts[member][start:stop]
        start, stop = layout.span(chunk, sizes[lost])
        rebuilt[start:stop] = whole[: stop - start]
    assert np.array_equal(rebuilt, parts[lost])


@given(host_lists, st.integers(2, 4))
def test_groups_have_ranks_of_different_hosts_and_no_rank_twice(hosts: list[str], parity: int) -> None:
    groups = form_groups(hosts, parity)
    members = list(itertools.chain(*groups))
    assert len(set(members)) == len(members)
    for group in groups:
        assert len({hosts[rank] for rank in group}) == len(group) >= 2


@given(st.integers(2, 6), st.data())
def test_one_lost_member_of_a_group_can_be_computed_and_two_cannot(size: int, data: st.DataObject) -> None:
    lost = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=2))
    parts = set(range(size)) - lost
    parities = {rank: list(range(size)) for rank in parts}
    for rank in lost:
        assert bool(find_rebuilding(rank, parts, parities)) == (len(lost) == 1)
