"""Fragments of many ranks as columns of numbers: told to others, and those that touch in a block made one.

What assembles from folded fragments (:func:`holdfast.ondisk.blocks.assemble_crcs`) is what does from all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from holdfast.engine.integrity.crc_combine import Numbers, extend_crcs
from holdfast.engine.io.requests import Fragments
from holdfast.ondisk.blocks import BLOCK_BYTES, Fragment

_ROW = np.dtype([("tensor", "<u4"), ("start", "<u8"), ("stop", "<u8"), ("crc", "<u8")])

#: What a fragment takes when it is told.
BYTES = _ROW.itemsize

_Flags = NDArray[np.bool_]


class FragmentTable(NamedTuple):
    """Fragments: of each, the number of its tensor, the range of its bytes, and their CRC."""

    tensor: NDArray[np.uint32]
    start: Numbers
    stop: Numbers
    crc: Numbers

    @classmethod
    def told(cls, reports: Iterable[bytes]) -> Self:
        """What :meth:`report` of several ranks gave."""
        rows = np.frombuffer(b"".join(reports), _ROW)
        columns: list[Any] = [np.ascontiguousarray(rows[name]) for name in cls._fields]
        return cls(*columns)

    def report(self) -> bytes:
        """For another rank: 28 bytes each."""
        rows = np.empty(len(self.tensor), _ROW)
        for name, column in zip(self._fields, self, strict=True):
            rows[name] = column
        return rows.tobytes()

    def take(self, which: NDArray[np.intp] | _Flags) -> Self:
        """Some of them."""
        return type(self)(self.tensor[which], self.start[which], self.stop[which], self.crc[which])

    def fragments(self) -> Fragments:
        """Fragments by tensor."""
        result: Fragments = {}
        for tensor, *fragment in zip(*(column.tolist() for column in self), strict=True):
            result.setdefault(tensor, []).append(Fragment(*fragment))
        return result


def encode_fragments(fragments: Mapping[int, Iterable[Fragment]]) -> bytes:
    """Fragments for another rank: 28 bytes each."""
    rows = [(tensor, *fragment) for tensor, known in fragments.items() for fragment in known]
    return np.array(rows, dtype=_ROW).tobytes()


def decode_fragments(reports: Iterable[bytes]) -> Fragments:
    """The fragments that ranks reported, folded."""
    return merge_adjacent_fragments(FragmentTable.told(reports)).fragments()


def merge_adjacent_fragments(rows: FragmentTable) -> FragmentTable:
    """As few fragments as can be, in order: each is told once, and those that touch inside a block are one.

    A block in which some overlap, or have the same range but another CRC, is left as it is.
    """
    rows = _in_order(rows)
    if not len(rows.tensor):
        return rows
    first = np.flatnonzero(~_joins(rows))
    last = np.append(first[1:], len(rows.tensor)) - 1
    ends = np.repeat(rows.stop[last], last - first + 1)
    crcs = np.bitwise_xor.reduceat(extend_crcs(rows.crc, ends - rows.stop), first)
    return FragmentTable(rows.tensor[first], rows.start[first], rows.stop[last], crcs)


def _in_order(rows: FragmentTable) -> FragmentTable:
    """By tensor and range, each once."""
    rows = rows.take(np.lexsort((rows.start, rows.tensor)))
    if not _equal(rows.tensor, rows.start).any():
        return rows
    rows = rows.take(np.lexsort((rows.crc, rows.stop, rows.start, rows.tensor)))
    return rows.take(~np.append(_equal(*rows), False))


def _equal(*columns: NDArray[np.uint32] | Numbers) -> _Flags:
    """Whether each row but the last is as the one after it."""
    flags: _Flags = np.logical_and.reduce([column[1:] == column[:-1] for column in columns])
    return flags


def _joins(rows: FragmentTable) -> _Flags:
    """Whether each row goes on in the same block where the one before it ends."""
    together = _equal(rows.tensor, rows.start // np.uint64(BLOCK_BYTES))
    joins = np.append(False, together & (rows.start[1:] == rows.stop[:-1]))
    overlaps = together & (rows.start[1:] < rows.stop[:-1])
    if overlaps.any():
        block = np.append(0, np.cumsum(~together))
        joins &= ~np.isin(block, block[1:][overlaps])
    return joins
