"""A bound for the cost of a read, and pickles written by hand."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

from tests.helpers.bounded_reads import limit_memory

#: The bytes that a bomb may take.
MAX_BYTES = 128 * 2**20

#: The time that a bomb may take, as a multiple of the time for :func:`_do_reference_work`. A megabyte of honest pickle
#: takes a quarter of that. A cost that grows with the square of the input takes hundreds of times as much.
_MAX_REFERENCES = 360


#: Python's integers are their own hashes, but for multiples of this, whose hash is 0.
HASH_MODULUS = 2**61 - 1


def pickle_text(word: str) -> bytes:
    return b"X" + struct.pack("<I", len(word)) + word.encode()


def pickle_integer(number: int) -> bytes:
    raw = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


@contextmanager
def limit_time() -> Iterator[None]:
    """Check that the block takes no more processor time than a fixed multiple of reference work.

    The reference runs before and after the block: a slow or busy machine slows both.
    """
    before = _measure_reference()
    started = time.process_time()
    yield
    seconds = time.process_time() - started
    assert seconds < _MAX_REFERENCES * max(before, _measure_reference())


@contextmanager
def limit_cost(*, memory: bool) -> Iterator[None]:
    """Check the memory that the block takes, or its time: each memory allocation takes longer while it is traced."""
    with limit_memory(), _limit_allocations() if memory else limit_time():
        yield


@contextmanager
def _limit_allocations() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()


def _measure_reference() -> float:
    started = time.process_time()
    _do_reference_work()
    return time.process_time() - started


def _do_reference_work() -> int:
    """Do what readers do: format names, hash them and keep small objects."""
    return len({f"layer.{number}.weight": (number, [number]) for number in range(30_000)})
