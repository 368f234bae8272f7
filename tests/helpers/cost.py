"""A bound for the cost of a read, and pickles written by hand."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

from tests.helpers.bounded_reads import limit_memory

#: Seconds of the processor, and bytes, that a bomb may take. A megabyte of honest pickle takes about as much.
MAX_SECONDS, MAX_BYTES = 4.0, 128 * 2**20


#: Python's integers are their own hashes, but for multiples of this, whose hash is 0.
HASH_MODULUS = 2**61 - 1


def pickle_text(word: str) -> bytes:
    return b"X" + struct.pack("<I", len(word)) + word.encode()


def pickle_integer(number: int) -> bytes:
    raw = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


@contextmanager
def limit_cost(*, memory: bool) -> Iterator[None]:
    if memory:
        tracemalloc.start()
    started = time.process_time()
    try:
        with limit_memory():
            yield
    finally:
        seconds = time.process_time() - started
        peak = tracemalloc.get_traced_memory()[1] if memory else 0
        tracemalloc.stop()
    assert memory or seconds < MAX_SECONDS
    assert peak < MAX_BYTES
