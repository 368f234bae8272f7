"""Reading the bytes of stored tensors, for checks that compare tensors with each other.

The readers of Megatron, DeepSpeed and NxD compare tensors with it, on each rank that opens the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator

from rankless.formats.stored_tensor import StoredTensor
from rankless.ondisk.block_crcs import crc64

#: The number of bytes that are read at a time. It is a multiple of the size of any element.
CHUNK = 4 * 2**20


def read_tensor_bytes(stored: StoredTensor, start: int, stop: int) -> bytes:
    """Read a range of a tensor's bytes."""
    from rankless.engine.io.source_reader import SourceReader  # noqa: PLC0415 - importing NumPy is slow, and showing a file does not need it

    buffer = bytearray(stop - start)
    extents = stored.find_extents(start, stop)
    with SourceReader([extent.file for extent in extents]) as reader:
        for number, (_, offset, low, high) in enumerate(extents):
            reader.read(number, offset, memoryview(buffer)[low - start : high - start])
    return bytes(buffer)


def iterate_chunks(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of bytes that a tensor of ``nbytes`` bytes is read in."""
    return ((start, min(start + CHUNK, nbytes)) for start in range(0, nbytes, CHUNK))


def digest_tensor(stored: StoredTensor) -> int:
    """Return the CRC-64 of a tensor's bytes."""
    crc = 0
    for start, stop in iterate_chunks(stored.info.nbytes):
        crc = crc64(read_tensor_bytes(stored, start, stop), crc)
    return crc
