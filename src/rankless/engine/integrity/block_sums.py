"""CRCs of blocks from the bytes of many ranks, where no rank has a contiguous part.

The CRC of a block is the XOR of the CRCs of its pieces, each extended to the end of the block (see
:mod:`rankless.engine.io.extend_crcs`). So a rank adds up its bytes of a block, however scattered, to one number, and
rank 0 adds up the numbers of all ranks. For example, a block of 16 MiB that 8 ranks hold by columns needs 8 numbers,
instead of a CRC for each row of each rank. Unlike fragments, sums do not show which bytes are missing: only how many.

Each rank makes sums for :func:`~rankless.engine.integrity.crc_gather.vote_with_sums`; rank 0 compares them with the
CRCs of the base (:mod:`rankless.save.incremental`). A byte may be added once only, by one rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from rankless.engine.io.column_tables import concatenate_tables, decode_rows, encode_rows
from rankless.engine.io.extend_crcs import Numbers, extend_crcs
from rankless.engine.io.fragments import FragmentTable
from rankless.engine.plan.range_columns import TensorRanges
from rankless.ondisk.block_crcs import BLOCK_BYTES, block_range, count_blocks

_ROW = np.dtype([("tensor", "<u4"), ("block", "<u4"), ("hashed", "<u8"), ("trusted", "<u8"), ("crc", "<u8")])

#: The size of an encoded sum.
SUM_BYTES = _ROW.itemsize


class BlockSums(NamedTuple):
    """Sums as columns, one row for each block of a tensor, in order.

    ``crc`` adds up the CRCs of ``hashed`` bytes. ``trusted`` is the number of bytes that a rank takes for unchanged,
    and has not hashed yet.
    """

    tensor: NDArray[np.uint32]
    block: NDArray[np.uint32]
    hashed: Numbers
    trusted: Numbers
    crc: Numbers

    @classmethod
    def from_bytes(cls, reports: Iterable[bytes]) -> Self:
        """Decode and add up the results of :meth:`to_bytes` of several ranks."""
        return cls(*decode_rows(reports, _ROW)).add_up()

    def to_bytes(self) -> bytes:
        """Encode the sums, 32 bytes each."""
        return encode_rows(self, _ROW)

    def add_up(self) -> Self:
        """Return one row for each block."""
        order = np.lexsort((self.block, self.tensor))
        tensor, block = self.tensor[order], self.block[order]
        if not len(tensor):
            return self
        first = np.flatnonzero(np.append(True, (tensor[1:] != tensor[:-1]) | (block[1:] != block[:-1])))
        hashed, trusted = (np.add.reduceat(column[order], first) for column in (self.hashed, self.trusted))
        crc = np.bitwise_xor.reduceat(self.crc[order], first)
        return type(self)(tensor[first], block[first], hashed, trusted, crc)

    def without_trust(self) -> Self:
        """Return the sums of the hashed bytes."""
        return self._replace(trusted=np.zeros_like(self.trusted))

    def matching_blocks(self, crcs: Mapping[int, Sequence[int]], sizes: Sequence[int]) -> dict[int, set[int]]:
        """Return the blocks, by tensor, that have the given CRCs, as far as they are hashed.

        ``crcs`` has the CRCs of the blocks of some tensors, and ``sizes`` the size of every tensor in bytes. A block
        matches if all of its bytes are hashed, and have its CRC, or if all are trusted.
        """
        matching: dict[int, set[int]] = {}
        for tensor, block, hashed, trusted, crc in zip(*(column.tolist() for column in self), strict=True):
            if tensor not in crcs:
                continue
            start, stop = block_range(block, sizes[tensor])
            if trusted == stop - start or (hashed == stop - start and crc == crcs[tensor][block]):
                matching.setdefault(tensor, set()).add(block)
        return matching


def sum_fragments(table: FragmentTable, sizes: Sequence[int]) -> BlockSums:
    """Add up the CRCs of fragments, which may be pieces of a block in any number and order."""
    block, ends = _blocks_and_ends(table.tensor, table.start, sizes)
    hashed = table.stop - table.start
    sums = BlockSums(table.tensor, block, hashed, np.zeros_like(hashed), extend_crcs(table.crc, ends - table.stop))
    return sums.add_up()


def trust_ranges(ranges: TensorRanges, sizes: Sequence[int]) -> BlockSums:
    """Return sums that trust some bytes of tensors. No range crosses the boundary of a block."""
    block, _ = _blocks_and_ends(ranges.tensor, ranges.start, sizes)
    nothing = np.zeros_like(ranges.start)
    return BlockSums(ranges.tensor, block, nothing, ranges.stop - ranges.start, nothing).add_up()


def concatenate_sums(first: BlockSums, second: BlockSums) -> BlockSums:
    """Add up the rows of both."""
    return concatenate_tables([first, second]).add_up()


def has_all_blocks(blocks: Collection[int], nbytes: int) -> bool:
    """Return whether ``blocks`` are all blocks of a tensor of ``nbytes`` bytes."""
    return len(blocks) == count_blocks(nbytes)


def _blocks_and_ends(
    tensor: NDArray[np.uint32], start: Numbers, sizes: Sequence[int]
) -> tuple[NDArray[np.uint32], Numbers]:
    """Return the number of the block of each position of a tensor, and the end of that block."""
    block = start // np.uint64(BLOCK_BYTES)
    ends = np.minimum((block + np.uint64(1)) * np.uint64(BLOCK_BYTES), np.array(sizes, np.uint64)[tensor])
    return block.astype(np.uint32), ends
