"""The elements of a stripe that one rank needs, packed into a message: by its owner, and unpacked by the receiver.

Both take the views of the receiver in the same order, and the boxes of each view in ascending order.

:mod:`rankless.inference.joined_reads` exchanges with it on each rank. Owner and receiver must pack and unpack in the
same order: messages have elements only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from rankless.inference.pending_copies import ElementCopy
from rankless.inference.scattered_bytes import ScatteredBytes, copy_box
from rankless.inference.strided_view import Box, StridedView
from rankless.storage.aligned_memory import Bytes


class PackedSlice:
    """The elements of a stripe that are in some views. It packs them like a ``StripeSlice`` of a shard."""

    def __init__(self, views: Sequence[StridedView], start: int, stop: int) -> None:
        self._views, self._start, self._stop = views, start, stop

    @property
    def size(self) -> int:
        """The size of the elements in bytes."""
        return sum(view.itemsize * _count(box) for view, box in self._iter_boxes())

    def copy_out(self, stripe: Bytes, packed: Bytes) -> None:
        """Copy the elements out of the stripe."""
        done = 0
        for view, box in self._iter_boxes():
            shape = [indices.stop - indices.start for indices in box.indices]
            strides = [dimension.stride for dimension in view.dimensions]
            dtype = np.dtype(f"V{view.itemsize}")
            elements = np.ndarray(shape, dtype, stripe.data, box.offset - self._start, strides)
            size = _count(box) * view.itemsize
            np.copyto(packed[done : done + size].view(dtype).reshape(shape), elements)
            done += size

    def _iter_boxes(self) -> Iterator[tuple[StridedView, Box]]:
        return ((view, box) for view in self._views for box in view.boxes(self._start, self._stop))


class PackedStripes:
    """The destination of the packed elements of one stored tensor, by the first byte of their stripe.

    ``stops`` has the end of each stripe by its start.
    """

    def __init__(self, copies: Sequence[ElementCopy], stops: Mapping[int, int]) -> None:
        self._copies, self._stops = copies, stops
        self._scattered = ScatteredBytes(copies)

    def view(self, start: int, stop: int) -> Bytes | None:
        """Return the memory of the elements of a stripe, if they are all that one copy fills there, in order."""
        del stop
        if len(self._copies) != 1 or not self._copies[0].view.is_contiguous:
            return None
        view = self._copies[0].view
        return self._scattered.view(max(start, view.offset), min(self._stops[start], view.stop))

    def write(self, start: int, data: Bytes) -> None:
        """Put the packed elements of the stripe at ``start`` into their targets."""
        done = 0
        for copy in self._copies:
            for box in copy.view.boxes(start, self._stops[start]):
                size = _count(box) * copy.view.itemsize
                shape = [indices.stop - indices.start for indices in box.indices]
                copy_box(copy, box, torch.from_numpy(data[done : done + size]).view(copy.dtype).view(shape))
                done += size


def _count(box: Box) -> int:
    return math.prod(indices.stop - indices.start for indices in box.indices)
