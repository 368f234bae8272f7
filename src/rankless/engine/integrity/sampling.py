"""Selection of the bytes of replicas that ranks compare at a save.

It is a pure function, equal on all ranks that hold the replicas.

:mod:`rankless.engine.integrity.replica_comparison` asks it on each rank. Different positions on two ranks would look
like replicas that differ: the result may depend on the arguments only.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from rankless.engine.plan.element_ranges import TensorRange
from rankless.engine.plan.file_ranges import CHUNK
from rankless.engine.plan.save_plan import ReplicatedShard

#: Bytes of every tensor that are compared at each save. Most causes of diverging replicas change whole tensors.
SAMPLE = 4096

#: Bytes of each set of holders that are compared in addition to the samples: the next window at each save.
BUDGET = 2**26

#: Boundaries are multiples of the largest element, in bytes.
_ALIGNMENT = 16

#: Odd numbers near 2**64 times the golden ratio and the square root of 2: steps that spread evenly over any range.
_BY_SAVE, _BY_TENSOR = 0x9E3779B97F4A7C15, 0x6A09E667F3BCC909


def sample_everything(replicas: Sequence[ReplicatedShard]) -> Iterator[TensorRange]:
    """Yield ranges of all bytes of the shards, each of at most a chunk."""
    for tensor, nbytes in ((replica.tensor, replica.nbytes) for replica in replicas):
        if nbytes <= CHUNK:  # avoids a generator for each of many tensors
            yield TensorRange(tensor, 0, nbytes)
        else:
            yield from _split_into_chunks(tensor, 0, nbytes)


def sample_some(replicas: Sequence[ReplicatedShard], save: int) -> Iterator[TensorRange]:
    """Yield a sample of each tensor, and a window of :data:`BUDGET` bytes.

    The positions depend on the number of the ``save``: for example, 16 consecutive saves compare all bytes of 1 GiB.
    """
    total = sum(replica.nbytes for replica in replicas)
    if total <= BUDGET:
        yield from sample_everything(replicas)
        return
    yield from _sample_each(replicas, save)
    first = save % -(-total // BUDGET) * BUDGET
    yield from _sample_window(replicas, first, first + BUDGET)


def _sample_each(replicas: Sequence[ReplicatedShard], save: int) -> Iterator[TensorRange]:
    """Return one sample of each tensor. They are computed together, as there may be many tensors."""
    sizes = np.array([replica.nbytes for replica in replicas], np.int64)
    steps = np.arange(len(replicas), dtype=np.uint64) * np.uint64(_BY_TENSOR) + np.uint64(save * _BY_SAVE % 2**64)
    sample_counts = (-(-sizes // SAMPLE)).astype(np.uint64)
    starts = ((steps >> np.uint64(32)) * sample_counts >> np.uint64(32)).astype(np.int64) * SAMPLE
    stops = np.minimum(starts + SAMPLE, sizes)
    tensors = [replica.tensor for replica in replicas]
    return map(TensorRange, tensors, starts.tolist(), stops.tolist())


def _sample_window(replicas: Sequence[ReplicatedShard], first: int, last: int) -> Iterator[TensorRange]:
    """Yield the ranges of bytes ``[first, last)`` of all replicas one after another."""
    ends = list(itertools.accumulate(replica.nbytes for replica in replicas))
    for number in range(bisect_right(ends, first), len(replicas)):
        replica = replicas[number]
        begin = ends[number] - replica.nbytes
        if begin >= last:
            return
        yield from _split_into_chunks(
            replica.tensor, _align_down(first - begin, replica), _align_down(last - begin, replica)
        )


def _align_down(offset: int, replica: ReplicatedShard) -> int:
    """Round an offset down to a multiple of the largest element; the end of the replica stays."""
    return replica.nbytes if offset >= replica.nbytes else max(0, offset) // _ALIGNMENT * _ALIGNMENT


def _split_into_chunks(tensor: int, start: int, stop: int) -> Iterator[TensorRange]:
    return (TensorRange(tensor, low, min(stop, low + CHUNK)) for low in range(start, stop, CHUNK))
