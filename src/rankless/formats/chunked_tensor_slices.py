"""Tensors as chunks of files, which are cut, moved and permuted without reading them. Pure functions.

Readers and writers of Megatron, DeepSpeed and NxD call it on each rank that opens such a checkpoint. All ranks must get
the same chunks in the same order.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rankless.engine.io.tensor_sources import ChunkedSource, SourceChunk, StridedLocation, row_major_strides
from rankless.engine.plan.element_ranges import IndexBox, boxes_of_range
from rankless.errors import CorruptCheckpointError
from rankless.formats.chunked_tensor import ChunkedTensor
from rankless.formats.reader import FileExtent
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import dtype_width
from rankless.ondisk.read_budget import ReadBudget

#: Units of work for a chunk of a tensor in a stack.
_STACKED = 16

#: The chunks of one tensor.
Chunks = tuple[SourceChunk, ...]


@dataclass(frozen=True, eq=False)
class JoinedTensor(ChunkedTensor):
    """A tensor of chunks from several files.

    Several such tensors may consist of the same chunks, so its identity is the identity of the object.
    """

    @property
    def identity(self) -> Hashable:
        """See :class:`rankless.formats.stored_tensor.StoredTensor`."""
        return id(self)

    def add_chunks(self, chunks: Chunks) -> JoinedTensor:
        """Return the tensor with further chunks."""
        return JoinedTensor(self.info, (*self.chunks, *chunks))


def whole_box(shape: tuple[int, ...]) -> IndexBox:
    """Return the box of a whole tensor."""
    return IndexBox((0,) * len(shape), shape)


def chunks_of_extent(extent: FileExtent, info: TensorInfo) -> Chunks | None:
    """Return the chunks of a range of a tensor's bytes, or ``None`` if it is stored neither in ranges nor in boxes."""
    width = dtype_width(info.dtype)
    boxes = list(boxes_of_range(info.shape, extent.start // width, extent.stop // width))
    if isinstance(extent.file, ChunkedSource) and extent.file.shape == info.shape:
        return extent.file.chunks
    if isinstance(extent.file, ChunkedSource) and len(boxes) == 1 and boxes[0].shape == extent.file.shape:
        return offset_slices(extent.file.chunks, boxes[0].offset)
    if not isinstance(extent.file, Path):
        return None
    chunks: list[SourceChunk] = []
    offset = extent.offset
    for box in boxes:
        location = StridedLocation(extent.file, offset, row_major_strides(box.shape, width))
        chunks.append(SourceChunk(box, partial(StridedLocation._make, location), (extent.file, offset)))
        offset += math.prod(box.shape) * width
    return tuple(chunks)


def cut_slice(chunks: Iterable[SourceChunk], box: IndexBox) -> Chunks:
    """Return the chunks inside a box, with offsets in the box."""
    return tuple(common for chunk in chunks for common in _intersect(chunk, box))


def _intersect(chunk: SourceChunk, box: IndexBox) -> Chunks:
    """Return the part of a chunk that is inside a box; none if they do not overlap.

    For example, of a chunk with rows 0 to 3, a box with rows 2 to 5 has rows 2 and 3, which are the box's rows 0 and 1.
    """
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
    """Permute the dimensions: the first of the result is dimension ``order[0]``.

    For example, the order ``(1, 0)`` transposes matrices.
    """
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
    """Return the offset of the elements that begin at ``start`` in one dimension.

    For example, ``start`` 5 in dimension 1 of a matrix gives ``(0, 5)``.
    """
    return slice_along(shape, dim, start, start).offset


def unstack_slices(chunks: Iterable[SourceChunk], budget: ReadBudget) -> dict[int, Chunks]:
    """Return the chunks of each tensor of a stack, by its index in the first dimension. Each is charged to ``budget``.

    An index without an element in any chunk is absent.
    """
    tensors: dict[int, list[SourceChunk]] = {}
    for chunk in chunks:
        first, size = chunk.box.offset[0], chunk.box.shape[0]
        budget.spend(_STACKED * size)
        for index in range(first, first + size):
            box = IndexBox(chunk.box.offset[1:], chunk.box.shape[1:])
            locate = partial(_unstacked_location, chunk, index - first)
            tensors.setdefault(index, []).append(SourceChunk(box, locate, chunk.order_hint))
    return {index: tuple(of_index) for index, of_index in tensors.items()}


def _unstacked_location(chunk: SourceChunk, index: int) -> StridedLocation:
    location = _skip_to(chunk, (index, *(0 for _ in chunk.box.shape[1:])))
    return location._replace(strides=location.strides[1:])


def reshape_flat_slices(chunks: Iterable[SourceChunk], shape: tuple[int, ...], width: int) -> Chunks:
    """Return the chunks of a flat tensor, of elements of ``width`` bytes, as chunks of a tensor of ``shape``."""
    strides = row_major_strides(shape, width)
    return tuple(
        SourceChunk(box, partial(_reshaped_location, chunk, box, strides, width), chunk.order_hint)
        for chunk in chunks
        for box in boxes_of_range(shape, chunk.box.offset[0], chunk.box.offset[0] + chunk.box.shape[0])
    )


def _reshaped_location(chunk: SourceChunk, box: IndexBox, strides: tuple[int, ...], width: int) -> StridedLocation:
    location = chunk.location
    if chunk.box.shape[0] > 1 and location.strides[0] != width:
        raise CorruptCheckpointError(f"{location.file}: a flat tensor is not contiguous: its metadata is corrupt")
    skipped = sum(map(operator.mul, box.offset, strides)) - chunk.box.offset[0] * width
    return StridedLocation(location.file, location.offset + skipped, strides)


def unsqueeze_slices(chunks: Iterable[SourceChunk], number: int) -> Chunks:
    """Insert a first dimension, and put the chunks at index ``number`` of it."""
    boxes = ((IndexBox((number, *chunk.box.offset), (1, *chunk.box.shape)), chunk) for chunk in chunks)
    return tuple(SourceChunk(box, partial(_unsqueezed_location, chunk), chunk.order_hint) for box, chunk in boxes)


def _unsqueezed_location(chunk: SourceChunk) -> StridedLocation:
    return chunk.location._replace(strides=(0, *chunk.location.strides))
