"""Tensors as boxes that lie somewhere in files: cut, moved and turned without reading any of them. Pure functions."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from holdfast.engine.io.sources import SourceChunk, StridedLocation
from holdfast.engine.plan.ranges import IndexBox
from holdfast.formats.dcp.chunked_tensor import ChunkedTensor

#: The boxes of one tensor.
Parts = tuple[SourceChunk, ...]


@dataclass(frozen=True, eq=False)
class JoinedTensor(ChunkedTensor):
    """A tensor of boxes from several files. Others are near the same places, so these do not tell which one it is."""

    @property
    def identity(self) -> Hashable:
        """See :class:`holdfast.formats.stored_tensor.StoredTensor`."""
        return id(self)


def cut_slice(parts: Iterable[SourceChunk], box: IndexBox) -> Parts:
    """What lies in a box, as a tensor of its own."""
    return tuple(piece for part in parts for piece in _common(part, box))


def _common(part: SourceChunk, box: IndexBox) -> Parts:
    starts = tuple(map(max, part.box.offset, box.offset))
    stops = tuple(min(a + b, c + d) for a, b, c, d in zip(*part.box, *box, strict=True))
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return ()
    skipped = tuple(map(operator.sub, starts, part.box.offset))
    inside = IndexBox(tuple(map(operator.sub, starts, box.offset)), tuple(map(operator.sub, stops, starts)))
    return (SourceChunk(inside, partial(_further, part, skipped), part.near),)


def _further(part: SourceChunk, skipped: Sequence[int]) -> StridedLocation:
    place = part.place
    return place._replace(offset=place.offset + sum(map(operator.mul, skipped, place.strides)))


def offset_slices(parts: Iterable[SourceChunk], by: Sequence[int]) -> Parts:
    """The same further on in another tensor."""
    return tuple(
        SourceChunk(
            IndexBox(tuple(map(operator.add, part.box.offset, by)), part.box.shape), partial(_same, part), part.near
        )
        for part in parts
    )


def _same(part: SourceChunk) -> StridedLocation:
    return part.place


def permute_slices(parts: Iterable[SourceChunk], order: Sequence[int]) -> Parts:
    """With dimensions in another order: the first is what was number ``order[0]``."""
    return tuple(
        SourceChunk(
            IndexBox(_picked(part.box.offset, order), _picked(part.box.shape, order)),
            partial(_turned, part, order),
            part.near,
        )
        for part in parts
    )


def _turned(part: SourceChunk, order: Sequence[int]) -> StridedLocation:
    return part.place._replace(strides=_picked(part.place.strides, order))


def _picked(row: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    return tuple(row[index] for index in order)


def slice_along(shape: Sequence[int], dim: int, start: int, stop: int) -> IndexBox:
    """The box of a tensor with indices from ``start`` to ``stop`` in one dimension, and all in the others."""
    offset = tuple(start if index == dim else 0 for index in range(len(shape)))
    return IndexBox(offset, tuple(stop - start if index == dim else size for index, size in enumerate(shape)))


def slice_at(shape: Sequence[int], dim: int, start: int) -> tuple[int, ...]:
    """How far to move what begins at ``start`` in one dimension."""
    return slice_along(shape, dim, start, start).offset


def unsqueeze_slices(parts: Iterable[SourceChunk], number: int) -> Parts:
    """As the ``number``-th of what a new first dimension counts."""
    zeros = ((IndexBox((number, *part.box.offset), (1, *part.box.shape)), part) for part in parts)
    return tuple(SourceChunk(box, partial(_raised, part), part.near) for box, part in zeros)


def _raised(part: SourceChunk) -> StridedLocation:
    return part.place._replace(strides=(0, *part.place.strides))
