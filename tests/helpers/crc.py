"""CRC-64/NVME bit by bit, as its specification says."""

from __future__ import annotations

POLYNOMIAL = 0x9A6C9329AC4BC9B5


ONES = 2**64 - 1


def crc64_by_bits(data: bytes) -> int:
    """CRC-64/NVME: reflected polynomial, all ones at the start and at the end."""
    crc = ONES
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (POLYNOMIAL if crc & 1 else 0)
    return crc ^ ONES
