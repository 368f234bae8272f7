"""Tensors as chunks of files, which are cut, moved and permuted without reading them. Pure functions."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from holdfast.engine.io.sources import SourceChunk, StridedLocation
from holdfast.engine.plan.ranges import IndexBox
from holdfast.formats.dcp.chunked_tensor import ChunkedTensor

#: The chunks of one tensor.
Chunks = tuple[SourceChunk, ...]


@dataclass(frozen=True, eq=False)
class JoinedTensor(ChunkedTensor):
    """A tensor of chunks from several files.

    Several such tensors may consist of the same chunks, so its identity is that of the object.
    """

    @property
    def identity(self) -> Hashable:
        """See :class:`holdfast.formats.stored_tensor.StoredTensor`."""
        return id(self)


def cut_slice(chunks: Iterable[SourceChunk], box: IndexBox) -> Chunks:
    """Return the chunks inside a box, with offsets in the box."""
    return tuple(common for chunk in chunks for common in _intersect(chunk, box))


def _intersect(chunk: SourceChunk, box: IndexBox) -> Chunks:
    """Return the part of a chunk that is inside a box; none if they do not overlap."""
    starts = tuple(map(max, chunk.box.offset, box.offset))
    stops = tuple(min(a + b, c + d) for a, b, c, d in zip(*chunk.box, *box, strict=True))
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return ()
    skipped = tuple(map(operator.sub, starts, chunk.box.offset))
    inside = IndexBox(tuple(map(operator.sub, starts, box.offset)), tuple(map(operator.sub, stops, starts)))
    return (SourceChunk(inside, partial(_skip_to, chunk, skipped), chunk.order_hint),)


def _skip_to(chunk: SourceChunk, skipped: Sequence[int]) -> StridedLocation:
    location = chunk.location
    return location._replace(offset=location.offset + sum(map(operator.mul, skipped, location.strides)))


def offset_slices(chunks: Iterable[SourceChunk], by: Sequence[int]) -> Chunks:
    """Move chunks by an offset."""
    return tuple(
        SourceChunk(
            IndexBox(tuple(map(operator.add, chunk.box.offset, by)), chunk.box.shape),
            partial(_same_location, chunk),
            chunk.order_hint,
        )
        for chunk in chunks
    )


def _same_location(chunk: SourceChunk) -> StridedLocation:
    return chunk.location


def permute_slices(chunks: Iterable[SourceChunk], order: Sequence[int]) -> Chunks:
    """Permute the dimensions: the first of the result is dimension ``order[0]``."""
    return tuple(
        SourceChunk(
            IndexBox(_permute_items(chunk.box.offset, order), _permute_items(chunk.box.shape, order)),
            partial(_permuted_location, chunk, order),
            chunk.order_hint,
        )
        for chunk in chunks
    )


def _permuted_location(chunk: SourceChunk, order: Sequence[int]) -> StridedLocation:
    return chunk.location._replace(strides=_permute_items(chunk.location.strides, order))


def _permute_items(items: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    return tuple(items[index] for index in order)


def slice_along(shape: Sequence[int], dim: int, start: int, stop: int) -> IndexBox:
    """Return the box with indices from ``start`` to ``stop`` in one dimension, and all in the others."""
    offset = tuple(start if index == dim else 0 for index in range(len(shape)))
    return IndexBox(offset, tuple(stop - start if index == dim else size for index, size in enumerate(shape)))


def offset_along(shape: Sequence[int], dim: int, start: int) -> tuple[int, ...]:
    """Return the offset of the elements that begin at ``start`` in one dimension."""
    return slice_along(shape, dim, start, start).offset


def unsqueeze_slices(chunks: Iterable[SourceChunk], number: int) -> Chunks:
    """Insert a first dimension, and put the chunks at index ``number`` of it."""
    boxes = ((IndexBox((number, *chunk.box.offset), (1, *chunk.box.shape)), chunk) for chunk in chunks)
    return tuple(SourceChunk(box, partial(_unsqueezed_location, chunk), chunk.order_hint) for box, chunk in boxes)


def _unsqueezed_location(chunk: SourceChunk) -> StridedLocation:
    return chunk.location._replace(strides=(0, *chunk.location.strides))
