"""CRC-64/NVME of byte ranges, and the combination of the CRCs of adjacent ranges.

A tensor's bytes are split into blocks of 16 MiB (the last one may be shorter), and each block has a CRC.
A *fragment* is the CRC of the part of a block that one rank hashed. Fragments that tile a block exactly
combine into its CRC, whichever ranks hashed them. So no rank needs a byte that it does not write or read.

Saves hash with it on each rank, and rank 0 combines; loads and verifications compare. :data:`BLOCK_BYTES`, the
polynomial and the form of :func:`to_hex` are parts of the format: do not change them.
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

#: The CRC of a bytes-like object. The second argument, if given, is the CRC of the bytes before it.
crc64: Callable[..., int] = crc64nvme

#: The CRC of two adjacent ranges, given the CRC of each and the length in bytes of the second.
combine: Callable[[int, int, int], int] = combine_crc64nvme


class Fragment(NamedTuple):
    """The CRC of bytes ``[start, stop)`` of a tensor; the range is inside one block."""

    start: int
    stop: int
    crc: int


def count_blocks(nbytes: int) -> int:
    """Return the number of blocks in ``nbytes`` bytes; 0 for no bytes."""
    return -(-nbytes // BLOCK_BYTES)


def block_range(block: int, nbytes: int) -> tuple[int, int]:
    """Return the byte range ``[start, stop)`` of one block of a tensor of ``nbytes`` bytes."""
    return block * BLOCK_BYTES, min(nbytes, (block + 1) * BLOCK_BYTES)


def block_sizes(nbytes: int) -> list[int]:
    """Return the size of each block of a tensor of ``nbytes`` bytes: for example, 16 MiB and 4 MiB for 20 MiB."""
    full, left = divmod(nbytes, BLOCK_BYTES)
    return [BLOCK_BYTES] * full + ([left] if left else [])


def combine_crcs(crcs: Iterable[tuple[int, int]]) -> int:
    """Return the CRC of adjacent ranges, given the CRC and the length in bytes of each, in order."""
    total = 0
    for crc, length in crcs:
        total = combine(total, crc, length)
    return total


def assemble_crcs(fragments: Sequence[Fragment], nbytes: int) -> list[int | None]:
    """Return the CRC of every block of a tensor; ``None`` for a block that the fragments do not tile exactly.

    Several ranks may hash the same fragment. A gap, a partial overlap or two different CRCs of one
    range make the block ``None``.
    """
    if len(fragments) == 1 and nbytes <= BLOCK_BYTES:
        return [_combine_fragments(fragments, 0, nbytes)]
    block_crcs: list[int | None] = [
        crc
        for block, (start, stop, crc) in enumerate(fragments)
        if start == block * BLOCK_BYTES and stop == min(start + BLOCK_BYTES, nbytes)
    ]
    if len(block_crcs) == len(fragments) == count_blocks(nbytes):  # as after a merge: there are very many
        return block_crcs
    block_crcs = []
    ordered = sorted(set(fragments))
    position = 0
    for block in range(count_blocks(nbytes)):
        start, stop = block_range(block, nbytes)
        first = position
        while position < len(ordered) and ordered[position].start < stop:
            position += 1
        block_crcs.append(_combine_fragments(ordered[first:position], start, stop))
    return block_crcs


def _combine_fragments(fragments: Sequence[Fragment], start: int, stop: int) -> int | None:
    crc, end = 0, start
    for fragment in fragments:
        if fragment.start != end or fragment.stop > stop:
            return None
        crc = combine(crc, fragment.crc, fragment.stop - fragment.start)
        end = fragment.stop
    return crc if end == stop else None


def to_hex(crcs: Iterable[int]) -> str:
    """Encode CRCs as text: 16 lower-case hexadecimal digits each, without separators.

    For example, ``[1, 255]`` gives ``000000000000000100000000000000ff``.
    """
    numbers = list(crcs)
    return struct.pack(f">{len(numbers)}Q", *numbers).hex()


def from_hex(text: str) -> list[int]:
    """Decode the text of :func:`to_hex`. Raises ``ValueError`` for any other text."""
    if len(text) % DIGITS or text.strip("0123456789abcdef"):
        raise ValueError("not a sequence of CRCs of 16 hexadecimal digits each")
    return list(struct.unpack(f">{len(text) // DIGITS}Q", bytes.fromhex(text)))
