"""Shared code of writing and reading: fragments of tensors, and callbacks.

Writes, reads, comparisons and uploads have these types in their arguments. Callbacks of progress are called from
several threads of one rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from rankless.engine.io.byte_sinks import ByteSink
from rankless.engine.plan.file_ranges import FileRange, split_at_blocks
from rankless.ondisk.block_crcs import BLOCK_BYTES, Fragment, combine, crc64
from rankless.storage.aligned_memory import Bytes

if TYPE_CHECKING:
    from rankless.engine.io.tensor_bytes import TensorBytes  # imports torch

#: ``{tensor number: its fragments}``.
Fragments = dict[int, list[Fragment]]

#: The same, of all ranks, to be looked at.
KnownFragments = Mapping[int, Sequence[Fragment]]


class ByteProvider(Protocol):
    """A source of the bytes of a tensor."""

    @property
    def slice_bytes(self) -> int:
        """The number of bytes to copy at a time."""

    def view(self, start: int, stop: int) -> Bytes | None:
        """Return bytes ``[start, stop)`` in place, or ``None`` if they must be copied."""

    def copy_out(self, start: int, into: Bytes) -> None:
        """Fill ``into`` with the bytes from ``start`` on. ``start`` and the length are whole elements."""


#: Returns this rank's shard of tensor number n.
ShardOf = Callable[[int], "TensorBytes"]

#: Returns the source of the bytes of tensor number n.
ProviderOf = Callable[[int], ByteProvider]

#: Moves the bytes of file ranges, which it gets from their tensors, into files or to a store. Returns the CRCs of the
#: hashed bytes.
MoveRanges = Callable[[Sequence[FileRange], ProviderOf], Fragments]

#: Returns the destination of the bytes of tensor number n.
SinkOf = Callable[[int], ByteSink]

#: Called with the number of bytes that have just been moved; from several threads.
OnBytesMoved = Callable[[int], None]


def ignore_progress(nbytes: int) -> None:
    """Ignore the number of bytes moved."""
    del nbytes


def make_fragment(file_range: FileRange, crc: int) -> tuple[int, Fragment]:
    """Return the fragment of a tensor that a file range has, with its tensor."""
    return file_range.tensor, Fragment(file_range.start, file_range.stop, crc)


def merge_fragments(results: Iterable[Iterable[tuple[int, Fragment]]]) -> Fragments:
    """Group fragments by tensor, and combine adjacent ones of one block."""
    result: Fragments = {}
    for tensor, fragment in sorted(itertools.chain.from_iterable(results)):
        tensor_fragments = result.get(tensor)
        if tensor_fragments is None:
            result[tensor] = [fragment]
        elif tensor_fragments[-1].stop == fragment.start and fragment.start % BLOCK_BYTES:
            last = tensor_fragments[-1]
            tensor_fragments[-1] = Fragment(
                last.start, fragment.stop, combine(last.crc, fragment.crc, fragment.stop - fragment.start)
            )
        else:
            tensor_fragments.append(fragment)
    return result


def hash_fragments(file_range: FileRange, data: Bytes) -> Iterator[tuple[int, Fragment]]:
    """Yield the fragments of a file range that may span several blocks."""
    for piece in split_at_blocks(file_range):
        crc = crc64(data[piece.start - file_range.start : piece.stop - file_range.start])
        yield piece.tensor, Fragment(piece.start, piece.stop, crc)
