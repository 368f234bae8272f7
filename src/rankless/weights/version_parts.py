"""The work of a rank for a version: it hashes its bytes, encodes their differences to older ones, and writes parts.

:class:`~rankless.weights.version_output.VersionOutput` calls it on every rank in the vote "publishing", in the thread
that publishes. It needs no byte of another rank. Threads encode blocks; the rows of a part stay in order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import msgspec
import numpy as np

from rankless.engine.io.requests import Fragments, ProviderOf, make_fragment, merge_fragments
from rankless.engine.plan.file_ranges import FileRange, split_at_blocks
from rankless.ondisk.block_crcs import Fragment, crc64
from rankless.ondisk.differences import EncodedRange, Words, encode_range, encode_raw, word_type
from rankless.ondisk.weight_versions import MOST_WORDS
from rankless.process.prepared_types import prepared
from rankless.process.worker_threads import THREADS, count_threads, run_in_threads
from rankless.storage.aligned_memory import Bytes
from rankless.weights.part_writer import PartWriter
from rankless.weights.published_copy import PublishedCopy

#: The most blocks that have their streams in memory at a time, until they are in a part.
_BATCH = 4 * THREADS


@prepared
class TensorPlaces(msgspec.Struct, frozen=True, array_like=True):
    """The places of all tensors, in order: the file of each, its offset, the size of an element, and its own size."""

    files: list[int] = []
    offsets: list[int] = []
    itemsizes: list[int] = []
    sizes: list[int] = []


class Piece(msgspec.Struct, frozen=True):
    """A part of a block that this rank has: the range, the range of the plan that it is in, and its tensor."""

    part: FileRange
    whole: FileRange
    tensor: int
    itemsize: int

    @property
    def words(self) -> tuple[int, int]:
        """The number of the first word, and the number of words.

        For example, bytes 8 to 16 of a tensor of float32 give 2 and 2.
        """
        width = word_type(self.itemsize).itemsize
        return self.part.start // width, (self.part.stop - self.part.start) // width


def cut_into_pieces(file_ranges: Iterable[FileRange], tensors: TensorPlaces) -> list[Piece]:
    """Return parts of blocks of this rank's ranges in the order of the files, and so of the rows in parts."""
    places = list(zip(tensors.files, tensors.offsets, strict=True))
    pieces = []
    for whole in sorted(file_ranges, key=lambda file_range: (file_range.file, file_range.offset)):
        number = bisect_right(places, (whole.file, whole.offset)) - 1
        most = MOST_WORDS * word_type(tensors.itemsizes[number]).itemsize
        pieces += [
            Piece(
                part.slice_bytes(at, min(most, part.stop - part.start - at)), whole, number, tensors.itemsizes[number]
            )
            for part in split_at_blocks(whole)
            for at in range(0, part.stop - part.start, most)
        ]
    return pieces


#: Returns how a piece differs from an older version; ``None`` if it is equal.
Encode = Callable[[Piece, Words], EncodedRange | None]


def encode_against(copy: PublishedCopy, *, is_valid: bool) -> Encode:
    """Return an encoder of pieces as differences to a copy; as they are, unless the copy has the base's bytes."""

    def encode(piece: Piece, new: Words) -> EncodedRange | None:
        if not is_valid:
            return encode_raw(new)
        return encode_range(copy.bytes_of(piece.part, piece.whole).view(new.dtype), new)

    return encode


def hash_and_encode(
    pieces: Sequence[Piece], bytes_of: ProviderOf, outputs: Sequence[tuple[Encode, PartWriter]]
) -> Fragments:
    """Hash the pieces, and write the parts of each delta. Return the fragments that were hashed."""

    def work(piece: Piece) -> tuple[tuple[int, Fragment], list[EncodedRange | None]]:
        data = _read_piece(piece, bytes_of)
        words = data.view(word_type(piece.itemsize))
        return make_fragment(piece.part, crc64(data)), [encode(piece, words) for encode, _ in outputs]

    fragments = []
    remaining = iter(pieces)
    while batch := list(islice(remaining, _BATCH)):
        results = run_in_threads(work, batch, count_threads(sum(piece.part.stop - piece.part.start for piece in batch)))
        for piece, (fragment, encoded) in zip(batch, results, strict=True):
            fragments.append(fragment)
            for difference, (_, writer) in zip(encoded, outputs, strict=True):
                if difference is not None:
                    writer.add(piece.tensor, *piece.words, difference)
    return merge_fragments([fragments])


def _read_piece(piece: Piece, bytes_of: ProviderOf) -> Bytes:
    """Return the bytes of a piece: those in memory, or a copy if they are on a device or must be cast."""
    part, provider = piece.part, bytes_of(piece.part.tensor)
    size = part.stop - part.start
    in_place = provider.view(part.local, part.local + size)
    if in_place is not None:
        return in_place
    data = np.empty(size, np.uint8)
    provider.copy_out(part.local, data)
    return data
