"""Bytes of shards on accelerators for a reader: copied into a few windows of pinned memory, ahead of it.

:mod:`rankless.engine.integrity.replica_comparison` hashes shards through it, on each rank, in the vote on the
preparation. A window is filled again only when its bytes have been hashed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rankless.engine.io.copies_from_device import CopyMark, CopyPiece, DeviceCopies
from rankless.engine.io.device_streams import CopyStream
from rankless.engine.io.pinned_memory import pin_for
from rankless.engine.io.staging_memory import Arena, StagingMemory
from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.storage.aligned_memory import Bytes

#: The number of windows.
_WINDOWS = 4

#: The memory of windows. It is kept from save to save, because it is pinned.
_window_memory = StagingMemory()


class ShardRange(NamedTuple):
    """Bytes ``[start, stop)`` of a shard."""

    shard: TensorBytes
    start: int
    stop: int


def copy_into_windows(
    streams: Sequence[CopyStream], groups: Iterable[Sequence[ShardRange]], nbytes: int
) -> Iterator[Bytes]:
    """Yield the bytes of each group of ranges, at most ``nbytes``. They are valid until the next ones are requested.

    The copies follow the kernels that the calling thread has enqueued. Shards that are on none of the ``streams`` are
    copied, too.
    """
    arena = Arena(_window_memory)
    memory = pin_for(streams, arena.reserve_bytes(_WINDOWS * nbytes))
    copies = DeviceCopies(streams)
    in_flight: deque[tuple[Bytes, CopyMark]] = deque()
    try:
        for number, group in enumerate(groups):
            if len(in_flight) == _WINDOWS:
                yield _finish(*in_flight.popleft())
            first = number % _WINDOWS * nbytes
            window = memory[first : first + sum(stop - start for _, start, stop in group)]
            copies.enqueue(_fill_window(group, window, streams), window)
            in_flight.append((window, copies.mark()))
        while in_flight:
            yield _finish(*in_flight.popleft())
    finally:
        copies.abandon()
        arena.release()


def _finish(window: Bytes, copied: CopyMark) -> Bytes:
    copied.wait()
    return window


def _fill_window(group: Sequence[ShardRange], window: Bytes, streams: Sequence[CopyStream]) -> Iterator[CopyPiece]:
    """Copy the ranges that are not on one of the devices, and yield the pieces of the others."""
    devices, used = {stream.device for stream in streams}, 0
    for shard, start, stop in group:
        if shard.device in devices:
            yield CopyPiece(shard, start, stop - start, used)
        else:
            shard.copy_out(start, window[used : used + stop - start])
        used += stop - start
