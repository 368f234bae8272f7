"""Levels: deltas over several versions, so that a follower that is behind reads fewer bytes than all deltas have.

Differences add up. So a rank makes the difference to an older version from the parts that it has written since, and
needs no copy of that version. :class:`~rankless.weights.version_output.VersionOutput` calls it on each rank, in the
threads that encode.

With levels, to go on by 64 versions takes about eight reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rankless.errors import StorageError
from rankless.formats.weights.difference_parts import DifferenceLayer, PartCaches, TensorWords, open_part
from rankless.ondisk.block_crcs import crc64
from rankless.ondisk.differences import RAW, EncodedRange, StoredRange, Words, decode_range, encode_range, encode_raw
from rankless.ondisk.weight_versions import PublishedFile
from rankless.storage.reader_pool import ReaderPool
from rankless.storage.store import store_of
from rankless.weights.publisher_state import OwnDelta
from rankless.weights.version_parts import Encode, Piece, TensorPlaces


def encode_level(
    directory: Path, deltas: Sequence[OwnDelta] | None, tensors: TensorPlaces, encode_last: Encode
) -> Encode:
    """Return an encoder of pieces as the sum of this rank's ``deltas`` and of the last one, made by ``encode_last``.

    Without ``deltas``, or if a part of them is no longer there, pieces are stored as they are. So they are if a delta
    replaces a block instead of adding to it.
    """
    if deltas is None or not all(
        _is_intact(directory / delta.folder, part) for delta in deltas for part in delta.parts
    ):
        return lambda _, new: encode_raw(new)
    words = [
        TensorWords(str(number), size, itemsize)
        for number, (size, itemsize) in enumerate(zip(tensors.sizes, tensors.itemsizes, strict=True))
    ]
    opened = [[open_part(directory / delta.folder, part, words) for part in delta.parts] for delta in deltas]
    caches, readers = PartCaches(), ReaderPool()
    layers = {
        number: [layer for parts in opened if (layer := DifferenceLayer.of(tensor, number, parts, caches)) is not None]
        for number, tensor in enumerate(words)
    }

    def encode(piece: Piece, new: Words) -> EncodedRange | None:
        start, count = piece.words
        if any(layer.replaces(start, start + count) for layer in layers[piece.tensor]):
            return encode_raw(new)
        total = np.zeros_like(new)
        for layer in layers[piece.tensor]:
            layer.apply(start * new.itemsize, total.view(np.uint8).data, readers)
        last = encode_last(piece, new)
        if last is not None:
            subject = f"the new range of tensor {piece.tensor}"
            stored = StoredRange(last.encoding, last.changed, count, new.dtype, last.streams, subject)
            decoded = decode_range(stored)
            if decoded.replaces:
                return encode_raw(new)
            decoded.apply(total)
        summed = encode_range(np.zeros_like(total), total)
        return encode_raw(new) if summed is not None and summed.encoding == RAW else summed

    return encode


def _is_intact(folder: Path, part: PublishedFile) -> bool:
    """Return whether a part that this rank has written is still there, with the same bytes."""
    try:
        raw = store_of(folder).read_small(folder / part.name, part.size)
    except StorageError:
        return False
    return len(raw) == part.size and f"{crc64(raw):016x}" == part.crc64nvme
