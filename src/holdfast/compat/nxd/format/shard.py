"""Whole tensors, divided among tensor-parallel ranks as a layout says: the way back of :mod:`.assembly`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from holdfast.compat.nxd.format.sharding_spec import (
    EXPERT,
    ShardingRule,
    ShardingSpec,
    ShardPiece,
    held_range,
    number_of,
    shard_pieces,
)
from holdfast.compat.nxd.format.slicing import (
    JoinedTensor,
    Parts,
    cut_slice,
    offset_slices,
    permute_slices,
    slice_along,
    slice_at,
    unsqueeze_slices,
)
from holdfast.compat.nxd.format.unshard import slices_of
from holdfast.engine.io.sources import ChunkedSource, SourceChunk, StridedLocation, row_major_strides
from holdfast.engine.plan.ranges import boxes_of_range
from holdfast.errors import FormatError, InvalidArgumentError
from holdfast.formats.reader import FileExtent, Reader
from holdfast.formats.stored_tensor import StoredTensor
from holdfast.ondisk.dtypes import dtype_width
from holdfast.ondisk.files import TensorInfo


def stored_slices(reader: Reader, group: str, name: str) -> JoinedTensor:
    """A tensor of a checkpoint of any format, as the boxes that it lies in."""
    info = reader.groups[group][name]
    parts: Parts = ()
    for extent in reader.extents(group, name, 0, info.nbytes):
        found = _boxes(extent, info)
        if found is None:
            raise FormatError(
                f"{reader.path}: {group} tensor {name!r} lies neither in ranges nor in boxes of files; convert it to "
                "native first"
            )
        parts += found
    return JoinedTensor(info, parts)


def _boxes(extent: FileExtent, info: TensorInfo) -> Parts | None:
    size = dtype_width(info.dtype)
    rows = list(boxes_of_range(info.shape, extent.start // size, extent.stop // size))
    if isinstance(extent.file, ChunkedSource) and extent.file.shape == info.shape:
        return extent.file.parts
    if isinstance(extent.file, ChunkedSource) and len(rows) == 1 and rows[0].shape == extent.file.shape:
        return offset_slices(extent.file.parts, rows[0].offset)
    if not isinstance(extent.file, Path):
        return None
    found: list[SourceChunk] = []
    offset = extent.offset
    for box in rows:
        place = StridedLocation(extent.file, offset, row_major_strides(box.shape, size))
        found.append(SourceChunk(box, partial(StridedLocation._make, place), (extent.file, offset)))
        offset += math.prod(box.shape) * size
    return tuple(found)


@dataclass(frozen=True)
class ShardedTensor:
    """A parameter of NxD: its rule, and the names of what it is made of, in the order of its pieces."""

    name: str
    rule: ShardingRule
    names: Sequence[str]


def shard_tensor(spec: ShardingSpec, whole: Sequence[str]) -> list[ShardedTensor]:
    """The parameters of NxD that some whole ones make up, in their order.

    Raises ``InvalidArgumentError`` where the layout does not say it, or where one is missing that it needs.
    """
    names = dict.fromkeys(spec.stored(name) for name in whole)
    found = []
    for name in names:
        rule = spec.rule(name)
        parts = list(dict.fromkeys(one for piece in shard_pieces(rule, name) for one in _each(piece.name, whole)))
        missing = next((one for one in parts if one not in set(whole)), None)
        if missing is not None or not parts:
            raise InvalidArgumentError(
                f"{name!r} of NxD is made of {missing or name!r} among others, which is not there"
            )
        found.append(ShardedTensor(name, rule, parts))
    taken = {part for one in found for part in one.names}
    left = next((name for name in whole if name not in taken), None)
    if left is not None:
        raise InvalidArgumentError(
            f"the layout puts {left!r} into {spec.stored(left)!r} of NxD, which is not made of it"
        )
    return found


def _each(pattern: str, whole: Sequence[str]) -> list[str]:
    """The names of all experts."""
    if EXPERT not in pattern:
        return [pattern]
    numbers = sorted({found for name in whole if (found := number_of(pattern, name)) is not None})
    return [pattern.replace(EXPERT, str(one)) for one in range(len(numbers))]


def local_slices(parameter: ShardedTensor, whole: Mapping[str, StoredTensor], tp: int, rank: int) -> StoredTensor:
    """What one of some tensor-parallel ranks has of it."""
    rule = parameter.rule
    every = shard_pieces(rule, parameter.name)
    joined = {piece.name: _joined(rule, piece.name, parameter.names, whole) for piece in every}
    if rule.dim is None:
        return joined[every[0].name]
    shape, parts = _Row(rule.dim, tp, rank, parameter.name).of(every, joined)
    return JoinedTensor(TensorInfo(joined[every[0].name].info.dtype, shape), parts)


@dataclass(frozen=True)
class _Row:
    """The pieces of one rank beside each other in a dimension."""

    dim: int
    tp: int
    rank: int
    name: str

    def of(self, every: Sequence[ShardPiece], joined: Mapping[str, StoredTensor]) -> tuple[tuple[int, ...], Parts]:
        done: dict[str, int] = {}
        parts: Parts = ()
        size, shape = 0, joined[every[0].name].info.shape
        repeats = {piece.name: sum(other.name == piece.name for other in every) for piece in every}
        for piece in every:
            whole = joined[piece.name]
            count, block = held_range(piece, self.tp, self.rank)
            each = self._each(whole.info.shape, count * repeats[piece.name])
            start = (done.setdefault(piece.name, 0) + block) * each
            done[piece.name] += count
            own = cut_slice(slices_of(whole), slice_along(whole.info.shape, self.dim, start, start + each))
            parts += offset_slices(own, slice_at(whole.info.shape, self.dim, size))
            size += each
        return slice_along(shape, self.dim, 0, size).shape, parts

    def _each(self, shape: tuple[int, ...], blocks: int) -> int:
        if self.dim >= len(shape) or shape[self.dim] % blocks:
            raise InvalidArgumentError(
                f"{self.name!r} is made of what has shape {list(shape)}, whose dimension {self.dim} is no multiple "
                f"of {blocks}, as {self.tp} tensor-parallel ranks need"
            )
        return shape[self.dim] // blocks


def _joined(rule: ShardingRule, pattern: str, names: Sequence[str], whole: Mapping[str, StoredTensor]) -> StoredTensor:
    """A piece as NxD has it: experts together, and columns for rows."""
    if EXPERT not in pattern:
        return _turned(rule, whole[pattern])
    rows = [_turned(rule, whole[name]) for name in names if number_of(pattern, name) is not None]
    parts = tuple(part for index, row in enumerate(rows) for part in unsqueeze_slices(slices_of(row), index))
    return JoinedTensor(TensorInfo(rows[0].info.dtype, (len(rows), *rows[0].info.shape)), parts)


def _turned(rule: ShardingRule, stored: StoredTensor) -> StoredTensor:
    if not rule.transposed or len(stored.info.shape) < 2:  # noqa: PLR2004 - rows and columns
        return stored
    order = list(range(len(stored.info.shape)))
    order[-2:] = order[:-3:-1]
    shape = tuple(stored.info.shape[index] for index in order)
    return JoinedTensor(TensorInfo(stored.info.dtype, shape), permute_slices(slices_of(stored), order))
