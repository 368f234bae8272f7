"""Tests which bytes of replicas are compared at a save, and that their hashes do not depend on the memory layout."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankless.engine.integrity import sampling
from rankless.engine.integrity.replica_comparison import crc_of_ranges
from rankless.engine.integrity.sampling import BUDGET, SAMPLE, sample_everything, sample_some
from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.engine.plan.element_ranges import TensorRange
from rankless.engine.plan.save_plan import ReplicatedShard
from rankless.ondisk.block_crcs import crc64

#: Sizes in bytes, in units of the largest element.
sizes = st.lists(st.integers(1, 3000), min_size=1, max_size=8)


def of(sizes: list[int]) -> list[ReplicatedShard]:
    return [ReplicatedShard(number, 16 * size) for number, size in enumerate(sizes)]


def bytes_in(ranges: list[TensorRange]) -> Counter[tuple[int, int]]:
    """How often each 16 bytes of each tensor are in the ranges."""
    return Counter((item.tensor, at) for item in ranges for at in range(item.start, item.stop, 16))


@given(sizes, st.integers(1, 2000))
def test_stretches_come_over_every_byte_in_turn(sizes: list[int], budget: int) -> None:
    replicas = of(sizes)
    turns = -(-sum(item.nbytes for item in replicas) // (16 * budget))
    firsts = [16 * budget * turn for turn in range(turns)]
    seen = [bytes_in(list(sampling._sample_window(replicas, first, first + 16 * budget))) for first in firsts]
    assert sum(seen, Counter()) == bytes_in(list(sample_everything(replicas)))


@given(sizes, st.integers(1, 10_000))
def test_every_tensor_has_a_sample_at_every_save(sizes: list[int], save: int) -> None:
    replicas = of(sizes)
    actual = list(sampling._sample_each(replicas, save))
    assert [item.tensor for item in actual] == [item.tensor for item in replicas]
    for item, replica in zip(actual, replicas, strict=True):
        assert item.start % SAMPLE == 0
        assert item.stop == min(item.start + SAMPLE, replica.nbytes) > item.start


def test_samples_of_later_saves_are_elsewhere_and_come_over_the_whole_tensor() -> None:
    replicas = [ReplicatedShard(0, 100 * SAMPLE), ReplicatedShard(1, 100 * SAMPLE)]
    starts = [[item.start for item in sampling._sample_each(replicas, save)] for save in range(1, 300)]
    first, second = zip(*starts, strict=True)
    assert set(first) == set(second) == set(range(0, 100 * SAMPLE, SAMPLE))
    assert first != second
    assert all(before != after for before, after in itertools.pairwise(first))


def test_what_fits_into_the_budget_is_compared_whole() -> None:
    replicas = [ReplicatedShard(0, BUDGET // 2), ReplicatedShard(1, BUDGET // 2)]
    assert list(sample_some(replicas, 5)) == list(sample_everything(replicas))
    assert (
        sum(item.stop - item.start for item in sample_some([*replicas, ReplicatedShard(2, 16)], 5))
        <= BUDGET + 3 * SAMPLE
    )


def test_ranges_are_hashed_alike_whatever_their_strides() -> None:
    values = [torch.randn(64, 48) for _ in range(5)]
    ranges = [
        *sample_everything([ReplicatedShard(n, 64 * 48 * 4) for n in range(5)]),
        TensorRange(2, 4096, 4160),
        TensorRange(0, 16, 48),
    ]
    oracle = crc64(np.concatenate([values[n].numpy().view(np.uint8).ravel()[a:b] for n, a, b in ranges]))
    strided = [value.t().contiguous().t() for value in values]
    for parts in (list(map(TensorBytes, values)), list(map(TensorBytes, strided))):
        assert crc_of_ranges(ranges, parts.__getitem__) == oracle
