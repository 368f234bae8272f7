"""Fragments of many ranks as columns of numbers: their encoding, and the merging of those that are adjacent in a block.

:func:`rankless.ondisk.block_crcs.assemble_crcs` gives the same result for merged fragments as for the original ones.

Each rank encodes its fragments for the vote on the writing of a save, a drain, a component or a conversion
(:mod:`rankless.engine.integrity.crc_gather`), and on the reads of a load, of a conversion's source and of
:func:`~rankless.inference.open_weights.open_weights` ("reading the weights"). Rank 0 decodes them; after a write by
more than 64 ranks, the first rank of each bucket merges the bucket's fragments before. :mod:`rankless.tier.generation`
merges the fragments in the tables of parts. Encoded rows are in messages between the ranks of one job, not in files.

A row is 28 bytes for each tensor that a rank writes a part of; above 64 ranks rows are compressed to 8.3 to 8.9 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from rankless.engine.io.column_tables import decode_rows, encode_rows
from rankless.engine.io.extend_crcs import Numbers, extend_crcs
from rankless.engine.io.requests import Fragments
from rankless.ondisk.block_crcs import BLOCK_BYTES, Fragment

_ROW = np.dtype([("tensor", "<u4"), ("start", "<u8"), ("stop", "<u8"), ("crc", "<u8")])

#: The size of an encoded fragment.
FRAGMENT_BYTES = _ROW.itemsize

_Flags = NDArray[np.bool_]


class FragmentTable(NamedTuple):
    """Fragments as columns: the number of the tensor, the byte range, and the CRC of each."""

    tensor: NDArray[np.uint32]
    start: Numbers
    stop: Numbers
    crc: Numbers

    @classmethod
    def from_bytes(cls, reports: Iterable[bytes]) -> Self:
        """Decode and concatenate the results of :meth:`to_bytes` of several ranks."""
        return cls(*decode_rows(reports, _ROW))

    def to_bytes(self) -> bytes:
        """Encode the fragments, 28 bytes each."""
        return encode_rows(self, _ROW)

    def select_rows(self, selection: NDArray[np.intp] | _Flags) -> Self:
        """Return some of the rows."""
        return type(self)(self.tensor[selection], self.start[selection], self.stop[selection], self.crc[selection])

    def to_fragments(self) -> Fragments:
        """Return the fragments by tensor."""
        result: Fragments = {}
        for tensor, *fragment in zip(*(column.tolist() for column in self), strict=True):
            result.setdefault(tensor, []).append(Fragment(*fragment))
        return result


class GatheredFragments(Mapping[int, Sequence[Fragment]]):
    """Merged fragments of all ranks by the number of the tensor. ``table`` has them sorted, as columns.

    There may be hundreds of thousands, so they become objects only for the tensors that are asked for. Rank 0 has one
    in the decision of a vote on CRCs, and so has each rank that opens a generation of a local tier.
    """

    def __init__(self, table: FragmentTable) -> None:
        self.table = table

    def __getitem__(self, tensor: int) -> Sequence[Fragment]:
        """Return the fragments of a tensor."""
        first, stop = np.searchsorted(self.table.tensor, [tensor, tensor + 1])
        if first == stop:
            raise KeyError(tensor)
        columns = (column[first:stop].tolist() for column in self.table[1:])
        return [Fragment(*fragment) for fragment in zip(*columns, strict=True)]

    def __iter__(self) -> Iterator[int]:
        """Iterate over the numbers of the tensors."""
        return iter(np.unique(self.table.tensor).tolist())

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(np.unique(self.table.tensor))

    def find_blocks(self, sizes: Sequence[int]) -> BlockCrcs | None:
        """Return the CRCs of all blocks of tensors of these sizes; ``None`` if the fragments are not just all blocks.

        A caller then looks at each tensor, and names the missing bytes.
        """
        nbytes = np.array(sizes, np.uint64)
        counts = (-(-nbytes.astype(np.int64) // BLOCK_BYTES)).astype(np.intp)
        tensor = np.repeat(np.arange(len(sizes), dtype=np.uint32), counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        start = (np.arange(len(tensor)) - first).astype(np.uint64) * np.uint64(BLOCK_BYTES)
        stop = np.minimum(start + np.uint64(BLOCK_BYTES), np.repeat(nbytes, counts))
        table = self.table
        pairs = ((tensor, table.tensor), (start, table.start), (stop, table.stop))
        if not all(np.array_equal(expected, actual) for expected, actual in pairs):
            return None
        return BlockCrcs(self.table.crc, stop - start, counts)


class BlockCrcs(NamedTuple):
    """The CRC and the length of each block of all tensors, in order, and the number of the blocks of each tensor."""

    crc: Numbers
    length: Numbers
    counts: NDArray[np.intp]


def encode_fragments(fragments: Mapping[int, Iterable[Fragment]]) -> bytes:
    """Encode fragments, 28 bytes each."""
    rows = [(tensor, *fragment) for tensor, tensor_fragments in fragments.items() for fragment in tensor_fragments]
    return np.array(rows, dtype=_ROW).tobytes()


def decode_fragments(reports: Iterable[bytes]) -> GatheredFragments:
    """Decode and merge the fragments of all ranks."""
    return GatheredFragments(merge_adjacent_fragments(FragmentTable.from_bytes(reports)))


def merge_adjacent_fragments(rows: FragmentTable) -> FragmentTable:
    """Sort fragments, drop duplicates, and merge adjacent ones within a block.

    A block is left as it is if its fragments overlap, or have the same range but different CRCs.
    """
    rows = _sort_unique(rows)
    if not len(rows.tensor):
        return rows
    first = np.flatnonzero(~_continues_previous(rows))
    last = np.append(first[1:], len(rows.tensor)) - 1
    ends = np.repeat(rows.stop[last], last - first + 1)
    crcs = np.bitwise_xor.reduceat(extend_crcs(rows.crc, ends - rows.stop), first)
    return FragmentTable(rows.tensor[first], rows.start[first], rows.stop[last], crcs)


def _sort_unique(rows: FragmentTable) -> FragmentTable:
    """Sort rows by tensor and range, and drop duplicates."""
    rows = rows.select_rows(np.lexsort((rows.start, rows.tensor)))
    if not _equal_to_next(rows.tensor, rows.start).any():
        return rows
    rows = rows.select_rows(np.lexsort((rows.crc, rows.stop, rows.start, rows.tensor)))
    return rows.select_rows(~np.append(_equal_to_next(*rows), False))


def _equal_to_next(*columns: NDArray[np.uint32] | Numbers) -> _Flags:
    """Return, for each row but the last, whether it equals the next one."""
    flags: _Flags = np.logical_and.reduce([column[1:] == column[:-1] for column in columns])
    return flags


def _continues_previous(rows: FragmentTable) -> _Flags:
    """Return, for each row, whether it begins in the same block where the previous one ends."""
    in_same_block = _equal_to_next(rows.tensor, rows.start // np.uint64(BLOCK_BYTES))
    joins = np.append(False, in_same_block & (rows.start[1:] == rows.stop[:-1]))
    overlaps = in_same_block & (rows.start[1:] < rows.stop[:-1])
    if overlaps.any():
        block = np.append(0, np.cumsum(~in_same_block))
        joins &= ~np.isin(block, block[1:][overlaps])
    return joins
