"""Which bytes of replicas ranks compare at a save: a pure function, equal on all ranks that hold them."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from holdfast.engine.plan.file_ranges import CHUNK
from holdfast.engine.plan.save_plan import ReplicatedShard

#: Bytes of every tensor that are compared at each save. What makes replicas drift mostly touches whole tensors.
SAMPLE = 4096

#: So many bytes of each set of holders are compared beside the samples: another stretch each time, until all was.
BUDGET = 2**26

#: Cuts are multiples of the largest element.
_ALIGNED = 16

#: Odd numbers near 2**64 times the golden ratio and the square root of 2: steps that spread evenly over any range.
_BY_SAVE, _BY_TENSOR = 0x9E3779B97F4A7C15, 0x6A09E667F3BCC909


class SampledRange(NamedTuple):
    """Bytes ``[start, stop)``, at most a chunk of them, of this rank's part of a tensor."""

    tensor: int
    start: int
    stop: int


def sample_everything(replicas: Sequence[ReplicatedShard]) -> Iterator[SampledRange]:
    """All bytes."""
    for tensor, nbytes in ((replica.tensor, replica.nbytes) for replica in replicas):
        if nbytes <= CHUNK:  # without a generator for each of many
            yield SampledRange(tensor, 0, nbytes)
        else:
            yield from _cut(tensor, 0, nbytes)


def sample_some(replicas: Sequence[ReplicatedShard], save: int) -> Iterator[SampledRange]:
    """A sample of each tensor, and a stretch of :data:`BUDGET` bytes; others for each number of a ``save``."""
    total = sum(replica.nbytes for replica in replicas)
    if total <= BUDGET:
        yield from sample_everything(replicas)
        return
    yield from _samples(replicas, save)
    first = save % -(-total // BUDGET) * BUDGET
    yield from _stretch(replicas, first, first + BUDGET)


def _samples(replicas: Sequence[ReplicatedShard], save: int) -> Iterator[SampledRange]:
    """One of each tensor. All at once, as tensors may be many."""
    sizes = np.array([replica.nbytes for replica in replicas], np.int64)
    steps = np.arange(len(replicas), dtype=np.uint64) * np.uint64(_BY_TENSOR) + np.uint64(save * _BY_SAVE % 2**64)
    places = (-(-sizes // SAMPLE)).astype(np.uint64)
    starts = ((steps >> np.uint64(32)) * places >> np.uint64(32)).astype(np.int64) * SAMPLE
    stops = np.minimum(starts + SAMPLE, sizes)
    tensors = [replica.tensor for replica in replicas]
    return map(SampledRange, tensors, starts.tolist(), stops.tolist())


def _stretch(replicas: Sequence[ReplicatedShard], first: int, last: int) -> Iterator[SampledRange]:
    """Bytes ``[first, last)`` of all replicas one after another."""
    ends = list(itertools.accumulate(replica.nbytes for replica in replicas))
    for number in range(bisect_right(ends, first), len(replicas)):
        replica = replicas[number]
        begin = ends[number] - replica.nbytes
        if begin >= last:
            return
        yield from _cut(replica.tensor, _aligned(first - begin, replica), _aligned(last - begin, replica))


def _aligned(at: int, replica: ReplicatedShard) -> int:
    return replica.nbytes if at >= replica.nbytes else max(0, at) // _ALIGNED * _ALIGNED


def _cut(tensor: int, start: int, stop: int) -> Iterator[SampledRange]:
    return (SampledRange(tensor, at, min(stop, at + CHUNK)) for at in range(start, stop, CHUNK))
