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

from holdfast.cli.amounts import Amounts, Bits, amounts
from holdfast.cli.described import Described
from holdfast.cli.pairs import Key, Pair, info
from holdfast.cli.target import Target
from holdfast.engine.checks import Checks
from holdfast.engine.local import LocalPart
from holdfast.engine.read import read_pieces
from holdfast.engine.transfer import Fragments, Piece, in_threads
from holdfast.engine.woven import Kept, Source
from holdfast.errors import DamagedError
from holdfast.formats.reader import Extent
from holdfast.layout.dtypes import width

#: Elements that one thread compares at a time, and so many times as many are read at a time.
_SLICE, _SLICES = 2**19, 8

#: Elements lie in buffers at multiples of so many bytes.
_ALIGNED = 16


@dataclass(slots=True)
class Difference:
    """How two tensors of so many elements differ: see :class:`holdfast.cli.amounts.Amounts`."""

    elements: int
    differing: int = 0
    absolute: float = 0.0
    relative: float = 0.0


class _Segment(NamedTuple):
    """Elements ``[start, stop)`` of a tensor, by its number."""

    tensor: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def differences(found: Sequence[Pair], left: Target, right: Target, done: Callable[[int], None]) -> list[Difference]:
    """How each pair differs; both have one shape. ``done`` is told the bytes that were read.

    Raises ``DamagedError`` where what was read is not what was saved.
    """
    sides = _Side(left, [pair.left for pair in found]), _Side(right, [pair.right for pair in found])
    totals = [Difference(math.prod(one.shape)) for one in sides[0].infos]
    dtypes = list(zip(*([one.dtype for one in side.infos] for side in sides), strict=True))
    slices = _slices(totals, dtypes)
    while batch := list(islice(slices, _SLICES)):
        bits = [side.read(batch) for side in sides]
        kinds = [dtypes[segments[0].tensor] for segments in batch]
        tasks = list(zip(batch, zip(*bits, strict=True), kinds, strict=True))
        for segments, seen in zip(batch, in_threads(lambda task: _compare(*task), tasks), strict=True):
            _add(totals, segments, seen)
        done(sum(one.nbytes for one in chain(*bits)))
    for side in sides:
        side.finish()
    return totals


def _slices(totals: Sequence[Difference], dtypes: Sequence[tuple[str, str]]) -> Iterator[list[_Segment]]:
    """Segments of equal dtypes together, at most ``_SLICE`` elements of them; in the order of files of ours."""
    segments: list[_Segment] = []
    filled = 0
    for tensor in sorted(range(len(totals)), key=lambda number: -width(dtypes[number][0])):
        for start in range(0, totals[tensor].elements, _SLICE):
            segment = _Segment(tensor, start, min(totals[tensor].elements, start + _SLICE))
            if segments and (filled + segment.size > _SLICE or dtypes[segments[-1].tensor] != dtypes[tensor]):
                yield segments
                segments, filled = [], 0
            segments.append(segment)
            filled += segment.size
    if segments:
        yield segments


def _compare(segments: Sequence[_Segment], bits: tuple[Bits, Bits], dtypes: tuple[str, str]) -> Amounts:
    starts = np.cumsum([0, *(segment.size for segment in segments[:-1])])
    return amounts(*bits, dtypes, starts)


def _add(totals: Sequence[Difference], segments: Sequence[_Segment], seen: Amounts) -> None:
    for segment, differing, absolute, relative in zip(segments, *(column.tolist() for column in seen), strict=True):
        total = totals[segment.tensor]
        total.differing += differing
        total.absolute = max(total.absolute, absolute)
        total.relative = max(total.relative, relative)


class _Side:
    """The tensors of one checkpoint, by number."""

    def __init__(self, target: Target, keys: Sequence[Key | None]) -> None:
        self.infos = [one for one in (info(target, key) for key in keys) if one is not None]
        self._sources = [key if isinstance(key, tuple) else _kept(key) for key in keys]
        self._reader = target.reader
        self._checks = Checks(target.reader, [key if isinstance(key, tuple) else ("", "") for key in keys])
        self._partial: Fragments = {}

    def read(self, batch: Sequence[Sequence[_Segment]]) -> list[Bits]:
        """The elements of each slice, as integers of their width. Blocks that were read whole are verified."""
        widths = [width(self.infos[segments[0].tensor].dtype) for segments in batch]
        sizes = [sum(one.size for one in segments) * wide for segments, wide in zip(batch, widths, strict=True)]
        offsets = np.cumsum([0, *(-(-size // _ALIGNED) * _ALIGNED for size in sizes)]).tolist()
        buffer = np.empty(offsets[-1], np.uint8)
        sink, files = LocalPart(torch.from_numpy(buffer)), dict[Source, int]()
        pieces = [
            piece for segments, at in zip(batch, offsets, strict=False) for piece in self._pieces(segments, at, files)
        ]
        self._check(read_pieces(list(files), pieces, lambda _: sink))
        places = zip(offsets, sizes, widths, strict=False)
        return [buffer[at : at + size].view(f"u{wide}") for at, size, wide in places]

    def _pieces(self, segments: Sequence[_Segment], at: int, files: dict[Source, int]) -> Iterator[Piece]:
        for tensor, start, stop in segments:
            wide = width(self.infos[tensor].dtype)
            for extent in self._extents(tensor, start * wide, stop * wide):
                local = at + extent.start - start * wide
                yield Piece(
                    tensor, extent.start, extent.stop, local, files.setdefault(extent.file, len(files)), extent.offset
                )
            at += (stop - start) * wide

    def _extents(self, tensor: int, start: int, stop: int) -> Sequence[Extent]:
        source = self._sources[tensor]
        return (
            [Extent(source, start, start, stop)]
            if isinstance(source, Kept)
            else self._reader.extents(*source, start, stop)
        )

    def _check(self, found: Fragments) -> None:
        stored = {tensor: row for tensor, row in found.items() if not isinstance(self._sources[tensor], Kept)}
        for tensor, row in self._checks.check_own(stored).items():
            self._partial.setdefault(tensor, []).extend(row)

    def finish(self) -> None:
        """Verify blocks that were read in parts."""
        self._checks.check_shared(self._partial)


def _kept(key: Described | None) -> Kept:
    """A tensor inside of values. Raises ``DamagedError``."""
    if key is None:
        raise DamagedError("a tensor is not there")
    try:
        data = base64.b64decode(key.inline, validate=True)
    except ValueError:
        data = b""
    if len(data) != key.info.nbytes:
        raise DamagedError("a small tensor among the values is damaged: it has another size than it says")
    return Kept(data)
