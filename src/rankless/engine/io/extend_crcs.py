"""Combination of the CRCs of many ranges at once: each is extended to the end of a longer range, and XORed.

The CRC of two adjacent ranges is the CRC of the first, extended over the bytes of the second, XOR the CRC of the
second. (CRC-64/NVME begins and ends with all ones, which cancel out.) Extending a CRC is linear: each of its bytes
contributes independently.

:mod:`rankless.engine.io.fragments` and :mod:`rankless.engine.integrity.block_sums` combine CRCs with it. The format
fixes the polynomial: stored checksums depend on it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rankless.ondisk.block_crcs import combine

#: Unsigned 64-bit numbers.
Numbers = NDArray[np.uint64]

#: CRCs extended at a time, so that the data stays in the processor's cache.
_BATCH = 8192

#: The number of bytes of a CRC, and of values of a byte.
_BYTES, _VALUES = 8, 256


def extend_crcs(crcs: Numbers, distances: Numbers) -> Numbers:
    """Advance each CRC over ``distance`` zero bytes, as needed to XOR-combine CRCs of adjacent ranges."""
    extended = crcs.copy()
    for start in range(0, len(extended), _BATCH):
        _shift_in_place(extended[start : start + _BATCH], distances[start : start + _BATCH])
    return extended


def combine_groups(crcs: Numbers, lengths: Numbers, counts: NDArray[np.intp]) -> Numbers:
    """Return the CRC of each group of adjacent ranges, given the CRCs and lengths in bytes of all ranges in order.

    ``counts`` has the number of ranges of each group: for example, ``[2, 0, 1]`` makes three groups of three ranges. A
    number may be 0: the CRC of no bytes is 0.
    """
    stops = np.cumsum(counts)
    ends = np.append(np.uint64(0), np.cumsum(lengths))
    distances = np.repeat(ends[stops], counts) - ends[1:]
    totals = np.append(np.uint64(0), np.bitwise_xor.accumulate(extend_crcs(crcs, distances)))
    combined: Numbers = totals[stops] ^ totals[stops - counts]
    return combined


def _shift_in_place(crcs: Numbers, distances: Numbers) -> None:
    """Advance each CRC by the powers of two that its distance consists of."""
    for bit in range(int(distances.max()).bit_length()):
        (rows,) = np.nonzero(distances >> np.uint64(bit) & np.uint64(1))
        if len(rows):
            crcs[rows] = _look_up(_shift_tables(bit), crcs[rows])


def _look_up(tables: Numbers, crcs: Numbers) -> Numbers:
    """Return the XOR of the table entries of all bytes of each CRC."""
    values = crcs.astype("<u8").view(np.uint8).reshape(-1, _BYTES)
    extended = np.zeros_like(crcs)
    for byte_index in range(_BYTES):
        extended ^= tables[byte_index][values[:, byte_index]]
    return extended


@lru_cache(maxsize=64)
def _shift_tables(bit: int) -> Numbers:
    """Return the image of each value of each byte of a CRC, the lowest byte first, after ``2**bit`` zero bytes."""
    tables = np.zeros((_BYTES, _VALUES), np.uint64)
    for byte_index in range(_BYTES):
        for bit_index in range(8):
            image = np.uint64(combine(1 << (8 * byte_index + bit_index), 0, 1 << bit))
            tables[byte_index, 1 << bit_index : 2 << bit_index] = tables[byte_index, : 1 << bit_index] ^ image
    tables.flags.writeable = False
    return tables
