"""Tensors of two checkpoints read side by side, some buffers at a time, and verified."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import torch

from holdfast.cli.diff.distances import Bits, ChangeMetrics, measure_change
from holdfast.cli.diff.pairs import Key, TensorPair, info_of
from holdfast.cli.placeholders import TensorPlaceholder
from holdfast.cli.target import InspectedCheckpoint
from holdfast.engine.integrity.verify import ChecksumVerifier
from holdfast.engine.io.read import read_pieces
from holdfast.engine.io.requests import Fragments, run_in_threads
from holdfast.engine.io.sources import InMemorySource, Source
from holdfast.engine.io.tensor_bytes import TensorBytes
from holdfast.engine.plan.file_ranges import FileRange
from holdfast.errors import CorruptCheckpointError
from holdfast.formats.reader import FileExtent
from holdfast.ondisk.dtypes import dtype_width

#: Elements that one thread compares at a time, and so many times as many are read at a time.
_SLICE, _SLICES = 2**19, 8

#: Elements lie in buffers at multiples of so many bytes.
_ALIGNED = 16


@dataclass(slots=True)
class TensorDifference:
    """How two tensors of so many elements differ: see :class:`holdfast.cli.diff.distances.ChangeMetrics`."""

    elements: int
    differing: int = 0
    absolute: float = 0.0
    relative: float = 0.0


class _ByteSegment(NamedTuple):
    """Elements ``[start, stop)`` of a tensor, by its number."""

    tensor: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def compare_tensors(
    found: Sequence[TensorPair], left: InspectedCheckpoint, right: InspectedCheckpoint, done: Callable[[int], None]
) -> list[TensorDifference]:
    """How each pair differs; both have one shape. ``done`` is told the bytes that were read.

    Raises ``CorruptCheckpointError`` where what was read is not what was saved.
    """
    sides = _TensorSide(left, [pair.left for pair in found]), _TensorSide(right, [pair.right for pair in found])
    totals = [TensorDifference(math.prod(one.shape)) for one in sides[0].infos]
    dtypes = list(zip(*([one.dtype for one in side.infos] for side in sides), strict=True))
    slices = _split_segments(totals, dtypes)
    while batch := list(islice(slices, _SLICES)):
        bits = [side.read(batch) for side in sides]
        kinds = [dtypes[segments[0].tensor] for segments in batch]
        tasks = list(zip(batch, zip(*bits, strict=True), kinds, strict=True))
        for segments, seen in zip(batch, run_in_threads(lambda task: _compare_segment(*task), tasks), strict=True):
            _add_difference(totals, segments, seen)
        done(sum(one.nbytes for one in chain(*bits)))
    for side in sides:
        side.finish()
    return totals


def _split_segments(
    totals: Sequence[TensorDifference], dtypes: Sequence[tuple[str, str]]
) -> Iterator[list[_ByteSegment]]:
    """Segments of equal dtypes together, at most ``_SLICE`` elements of them; in the order of files of ours."""
    segments: list[_ByteSegment] = []
    filled = 0
    for tensor in sorted(range(len(totals)), key=lambda number: -dtype_width(dtypes[number][0])):
        for start in range(0, totals[tensor].elements, _SLICE):
            segment = _ByteSegment(tensor, start, min(totals[tensor].elements, start + _SLICE))
            if segments and (filled + segment.size > _SLICE or dtypes[segments[-1].tensor] != dtypes[tensor]):
                yield segments
                segments, filled = [], 0
            segments.append(segment)
            filled += segment.size
    if segments:
        yield segments


def _compare_segment(
    segments: Sequence[_ByteSegment], bits: tuple[Bits, Bits], dtypes: tuple[str, str]
) -> ChangeMetrics:
    starts = np.cumsum([0, *(segment.size for segment in segments[:-1])])
    return measure_change(*bits, dtypes, starts)


def _add_difference(totals: Sequence[TensorDifference], segments: Sequence[_ByteSegment], seen: ChangeMetrics) -> None:
    for segment, differing, absolute, relative in zip(segments, *(column.tolist() for column in seen), strict=True):
        total = totals[segment.tensor]
        total.differing += differing
        total.absolute = max(total.absolute, absolute)
        total.relative = max(total.relative, relative)


class _TensorSide:
    """The tensors of one checkpoint, by number."""

    def __init__(self, target: InspectedCheckpoint, keys: Sequence[Key | None]) -> None:
        self.infos = [one for one in (info_of(target, key) for key in keys) if one is not None]
        self._sources = [key if isinstance(key, tuple) else _keep_largest(key) for key in keys]
        self._reader = target.reader
        self._checks = ChecksumVerifier(target.reader, [key if isinstance(key, tuple) else ("", "") for key in keys])
        self._partial: Fragments = {}

    def read(self, batch: Sequence[Sequence[_ByteSegment]]) -> list[Bits]:
        """The elements of each slice, as integers of their width. Blocks that were read whole are verified."""
        widths = [dtype_width(self.infos[segments[0].tensor].dtype) for segments in batch]
        sizes = [sum(one.size for one in segments) * wide for segments, wide in zip(batch, widths, strict=True)]
        offsets = np.cumsum([0, *(-(-size // _ALIGNED) * _ALIGNED for size in sizes)]).tolist()
        buffer = np.empty(offsets[-1], np.uint8)
        sink, files = TensorBytes(torch.from_numpy(buffer)), dict[Source, int]()
        pieces = [
            piece for segments, at in zip(batch, offsets, strict=False) for piece in self._pieces(segments, at, files)
        ]
        self._check(read_pieces(list(files), pieces, lambda _: sink))
        places = zip(offsets, sizes, widths, strict=False)
        return [buffer[at : at + size].view(f"u{wide}") for at, size, wide in places]

    def _pieces(self, segments: Sequence[_ByteSegment], at: int, files: dict[Source, int]) -> Iterator[FileRange]:
        for tensor, start, stop in segments:
            wide = dtype_width(self.infos[tensor].dtype)
            for extent in self._extents(tensor, start * wide, stop * wide):
                local = at + extent.start - start * wide
                yield FileRange(
                    tensor, extent.start, extent.stop, local, files.setdefault(extent.file, len(files)), extent.offset
                )
            at += (stop - start) * wide

    def _extents(self, tensor: int, start: int, stop: int) -> Sequence[FileExtent]:
        source = self._sources[tensor]
        return (
            [FileExtent(source, start, start, stop)]
            if isinstance(source, InMemorySource)
            else self._reader.extents(*source, start, stop)
        )

    def _check(self, found: Fragments) -> None:
        stored = {tensor: row for tensor, row in found.items() if not isinstance(self._sources[tensor], InMemorySource)}
        for tensor, row in self._checks.check_own(stored).items():
            self._partial.setdefault(tensor, []).extend(row)

    def finish(self) -> None:
        """Verify blocks that were read in parts."""
        self._checks.check_shared(self._partial)


def _keep_largest(key: TensorPlaceholder | None) -> InMemorySource:
    """A tensor inside of values. Raises ``CorruptCheckpointError``."""
    if key is None:
        raise CorruptCheckpointError("a tensor is not there")
    try:
        data = base64.b64decode(key.inline, validate=True)
    except ValueError:
        data = b""
    if len(data) != key.info.nbytes:
        raise CorruptCheckpointError("a small tensor among the values is damaged: it has another size than it says")
    return InMemorySource(data)
