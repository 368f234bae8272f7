"""CRCs of many ranges at once, each moved to the end of a longer range: the XOR of them is that range's CRC.

The CRC of two neighbours is the first one's, moved over the bytes of the second, XOR the second's (CRC-64/NVME begins
and ends with all ones, which cancel out). To move a CRC is linear: each of its bytes adds its own image.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from holdfast.ondisk.blocks import combine

#: An unsigned number of 64 bits each.
Numbers = NDArray[np.uint64]

#: CRCs moved at a time: what they need stays in the processor's cache.
_MANY = 8192

#: Bytes of a CRC, and values of a byte.
_BYTES, _VALUES = 8, 256


def extend_crcs(crcs: Numbers, distances: Numbers) -> Numbers:
    """What each CRC becomes when as many bytes as its distance, all zero, follow, before the CRC of these is added."""
    moved = crcs.copy()
    for at in range(0, len(moved), _MANY):
        _shift(moved[at : at + _MANY], distances[at : at + _MANY])
    return moved


def _shift(crcs: Numbers, distances: Numbers) -> None:
    """In place, by the powers of two that each distance is made of."""
    for bit in range(int(distances.max()).bit_length()):
        (which,) = np.nonzero(distances >> np.uint64(bit) & np.uint64(1))
        if len(which):
            crcs[which] = _look_up(_shift_tables(bit), crcs[which])


def _look_up(images: Numbers, crcs: Numbers) -> Numbers:
    values = crcs.astype("<u8").view(np.uint8).reshape(-1, _BYTES)
    moved = np.zeros_like(crcs)
    for place in range(_BYTES):
        moved ^= images[place][values[:, place]]
    return moved


@lru_cache(maxsize=64)
def _shift_tables(bit: int) -> Numbers:
    """What each value of each byte of a CRC, the lowest byte first, becomes over ``2**bit`` bytes."""
    images = np.zeros((_BYTES, _VALUES), np.uint64)
    for place in range(_BYTES):
        for number in range(8):
            one = np.uint64(combine(1 << (8 * place + number), 0, 1 << bit))
            images[place, 1 << number : 2 << number] = images[place, : 1 << number] ^ one
    images.flags.writeable = False
    return images
