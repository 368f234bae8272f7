"""Integrity: CRC-64/NVME of byte ranges, and how CRCs of neighbours become the CRC of the whole.

A tensor's bytes are cut into blocks of 16 MiB (the last one shorter), and each block has a CRC.
A *fragment* is what one rank hashed of a block. Fragments that tile their block exactly combine
into its CRC whoever hashed what, so that no rank needs a byte that it does not write or read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from awscrt.checksums import combine_crc64nvme, crc64nvme

#: Bytes covered by one CRC. Part of the format.
BLOCK_BYTES = 16 * 2**20

#: Hexadecimal digits of one CRC as it is written in files.
DIGITS = 16

#: The CRC of the bytes of anything that has bytes; a second argument is the CRC of what goes before.
crc64: Callable[..., int] = crc64nvme

#: The CRC of two ranges together, given both and the length in bytes of the second.
combine: Callable[[int, int, int], int] = combine_crc64nvme


class Fragment(NamedTuple):
    """The CRC of bytes ``[start, stop)`` of a tensor; the range lies inside one block."""

    start: int
    stop: int
    crc: int


def count_blocks(nbytes: int) -> int:
    """How many blocks ``nbytes`` bytes have. No bytes, no block."""
    return -(-nbytes // BLOCK_BYTES)


def block_range(block: int, nbytes: int) -> tuple[int, int]:
    """The byte range ``[start, stop)`` of one block of a tensor of ``nbytes`` bytes."""
    return block * BLOCK_BYTES, min(nbytes, (block + 1) * BLOCK_BYTES)


def combine_crcs(crcs: Iterable[tuple[int, int]]) -> int:
    """The CRC of neighbouring ranges, given the CRC and length in bytes of each, in order."""
    total = 0
    for crc, length in crcs:
        total = combine(total, crc, length)
    return total


def assemble_crcs(fragments: Sequence[Fragment], nbytes: int) -> list[int | None]:
    """The CRC of every block of a tensor; ``None`` where the fragments do not tile it exactly.

    Several ranks may hash the same fragment; a range that two fragments give different CRCs
    makes the block ``None``, as does a gap or a partial overlap.
    """
    if len(fragments) == 1 and nbytes <= BLOCK_BYTES:
        return [_tile(fragments, 0, nbytes)]
    result: list[int | None] = []
    ordered = sorted(set(fragments))
    at = 0
    for block in range(count_blocks(nbytes)):
        start, stop = block_range(block, nbytes)
        first = at
        while at < len(ordered) and ordered[at].start < stop:
            at += 1
        result.append(_tile(ordered[first:at], start, stop))
    return result


def _tile(fragments: Sequence[Fragment], start: int, stop: int) -> int | None:
    crc, reached = 0, start
    for fragment in fragments:
        if fragment.start != reached or fragment.stop > stop:
            return None
        crc = combine(crc, fragment.crc, fragment.stop - fragment.start)
        reached = fragment.stop
    return crc if reached == stop else None


def to_hex(crcs: Iterable[int]) -> str:
    """CRCs as text: 16 lower-case hexadecimal digits each, nothing between them."""
    return "".join(f"{crc:016x}" for crc in crcs)


def from_hex(text: str) -> list[int]:
    """The inverse of :func:`to_hex`. Raises ``ValueError`` for anything else."""
    if len(text) % DIGITS or text.strip("0123456789abcdef"):
        raise ValueError("not a row of CRCs of 16 hexadecimal digits each")
    return list(struct.unpack(f">{len(text) // DIGITS}Q", bytes.fromhex(text)))
