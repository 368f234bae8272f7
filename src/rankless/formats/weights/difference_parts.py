"""The parts of a delta, open for reading: the changes of a tensor as layers over its older bytes.

:mod:`rankless.formats.weights.version_reader` opens them in each process that reads a version; the threads that read
tensors apply the layers. What a part says of its ranges is checked before any memory is taken for them. That the result
is right is proven by the CRCs of the version, so the bytes of streams are not verified here.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import numpy as np

from rankless.errors import CorruptCheckpointError
from rankless.formats.safetensors import SafetensorsFile
from rankless.ondisk import block_crcs
from rankless.ondisk.differences import RAW, DecodedRange, StoredRange, Words, decode_range, word_type
from rankless.ondisk.weight_versions import (
    COLUMNS,
    DATA,
    LARGEST_PART,
    MOST_RANGES,
    RANGES,
    PartRange,
    PublishedFile,
    split_rows,
)
from rankless.storage.reader_pool import ReaderPool
from rankless.storage.store import store_of

#: The most bytes of decoded ranges that are kept: reads of neighbouring bytes need one range several times.
_KEPT_BYTES = 48 * 2**20

#: The bytes of an object that are requested at a time.
_REQUESTED_BYTES = 8 * 2**20


#: The part and two numbers that name what is kept.
_Key = tuple[Path, int, int]


class _HasSize(Protocol):
    @property
    def nbytes(self) -> int: ...


Kept = TypeVar("Kept", bound=_HasSize)


class TensorWords(msgspec.Struct, frozen=True):
    """The words of a tensor: see :mod:`rankless.ondisk.differences`."""

    name: str
    nbytes: int
    itemsize: int

    @property
    def word(self) -> np.dtype[Any]:
        """The type of a word."""
        return word_type(self.itemsize)

    @property
    def count(self) -> int:
        """The number of words."""
        return self.nbytes // self.word.itemsize


class DifferencePart(msgspec.Struct, frozen=True, eq=False):
    """A part whose table was read. ``ranges`` are by the number of the tensor, each list in order."""

    path: Path
    data_start: int
    data_size: int
    ranges: Mapping[int, Sequence[PartRange]]


def open_part(folder: Path, part: PublishedFile, tensors: Sequence[TensorWords]) -> DifferencePart:
    """Read the table of a part, and check it. Raises ``CorruptCheckpointError``, ``StorageError``."""
    path = folder / part.name
    file = SafetensorsFile.open(path)
    entries = file.header.entries
    table, data = entries.get(RANGES), entries.get(DATA)
    size = file.header.size + sum(entry.nbytes for entry in entries.values())
    if table is None or data is None or len(entries) != len((RANGES, DATA)) or size != part.size or size > LARGEST_PART:
        raise CorruptCheckpointError(f"{path} is not the part of a version that its manifest names")
    rows = len(table.shape) and table.shape[0]
    if (table.dtype, table.shape, data.dtype) != ("I64", (rows, COLUMNS), "U8") or rows > MOST_RANGES:
        raise CorruptCheckpointError(f"{path} has no table of ranges that a publisher writes")
    raw = bytearray(table.nbytes)
    with store_of(path).open_reader(path) as reader:
        reader.read(file.header.size + table.data_offsets[0], memoryview(raw))
    blocks = range(0, len(raw), block_crcs.BLOCK_BYTES)
    crcs = [block_crcs.crc64(memoryview(raw)[at : at + block_crcs.BLOCK_BYTES]) for at in blocks]
    if crcs != file.crcs.get(RANGES):
        raise CorruptCheckpointError(f"the table of ranges in {path} does not match its CRC: it is corrupt")
    ranges = split_rows(np.frombuffer(raw, "<i8").reshape(-1, COLUMNS).tolist(), data.nbytes, str(path))
    start = file.header.size + data.data_offsets[0]
    return DifferencePart(path, start, data.nbytes, _by_tensor(ranges, tensors, path))


def _by_tensor(
    ranges: Sequence[PartRange], tensors: Sequence[TensorWords], path: Path
) -> Mapping[int, Sequence[PartRange]]:
    by_tensor: dict[int, list[PartRange]] = {}
    for row in ranges:
        if row.tensor >= len(tensors) or row.stop > tensors[row.tensor].count:
            raise CorruptCheckpointError(f"{path} is corrupt: it has a range that is in no tensor of its version")
        width = tensors[row.tensor].word.itemsize
        first, last = row.start * width // block_crcs.BLOCK_BYTES, (row.stop * width - 1) // block_crcs.BLOCK_BYTES
        if first != last:  # it bounds the memory of a reader
            raise CorruptCheckpointError(f"{path} is corrupt: it has a range in two blocks of a tensor")
        by_tensor.setdefault(row.tensor, []).append(row)
    return by_tensor


class RecentlyUsed(Generic[Kept]):
    """What was made last, by part and position. Of several threads that ask for one thing, one makes it."""

    def __init__(self, most_bytes: int) -> None:
        self._kept: OrderedDict[_Key, Kept] = OrderedDict()
        self._nbytes, self._most = 0, most_bytes
        self._lock = threading.Lock()
        self._turns: dict[_Key, threading.Lock] = {}

    def find(self, key: _Key, make: Callable[[], Kept]) -> Kept:
        """Return what is kept, or make it."""
        with self._lock:
            turn = self._turns.setdefault(key, threading.Lock())
        with turn:
            with self._lock:
                kept = self._kept.get(key)
                if kept is not None:
                    self._kept.move_to_end(key)
            if kept is None:
                kept = make()
                self._keep(key, kept)
        return kept

    def _keep(self, key: _Key, made: Kept) -> None:
        with self._lock:
            self._kept[key] = made
            self._nbytes += made.nbytes
            while self._nbytes > self._most and len(self._kept) > 1:
                old, forgotten = self._kept.popitem(last=False)
                self._turns.pop(old, None)
                self._nbytes -= forgotten.nbytes


class PartCaches:
    """What the layers of a version keep: decoded ranges, and the bytes that were requested of objects."""

    def __init__(self) -> None:
        self.decoded = RecentlyUsed[DecodedRange](_KEPT_BYTES)
        self._requested = RecentlyUsed[memoryview](_KEPT_BYTES)

    def read(self, part: DifferencePart, offset: int, into: memoryview, readers: ReaderPool) -> None:
        """Fill ``into`` with the data of a part from ``offset`` on. Neighbouring ranges of an object share requests."""
        if not store_of(part.path).is_remote:
            readers.read(part.path, part.data_start + offset, into)
            return
        done = 0
        while done < len(into):
            window, skipped = divmod(offset + done, _REQUESTED_BYTES)
            start = window * _REQUESTED_BYTES
            size = min(_REQUESTED_BYTES, part.data_size - start)

            def request(start: int = start, size: int = size) -> memoryview:
                requested = memoryview(bytearray(size))
                readers.read(part.path, part.data_start + start, requested)
                return requested

            piece = self._requested.find((part.path, window, -1), request)[skipped : skipped + len(into) - done]
            into[done : done + len(piece)] = piece
            done += len(piece)


class DifferenceLayer(msgspec.Struct, frozen=True, eq=False):
    """The changes of one tensor by one delta: a :class:`rankless.engine.io.tensor_sources.Layer`.

    ``rows`` are the ranges of all parts, in order, each with its part. ``starts`` are their first words.
    """

    tensor: TensorWords
    rows: Sequence[tuple[PartRange, DifferencePart]]
    starts: Sequence[int]
    caches: PartCaches

    @classmethod
    def of(
        cls, tensor: TensorWords, number: int, parts: Sequence[DifferencePart], caches: PartCaches
    ) -> DifferenceLayer | None:
        """Return the layer of tensor ``number``; ``None`` if nothing in it has changed.

        Raises ``CorruptCheckpointError`` if ranges of two parts overlap.
        """
        rows = [(row, part) for part in parts for row in part.ranges.get(number, ())]
        rows.sort(key=lambda item: item[0].start)
        for (one, part), (two, _) in pairwise(rows):
            if one.stop > two.start:
                raise CorruptCheckpointError(f"{part.path} has a range of {tensor.name!r} that another part has, too")
        return cls(tensor, rows, [row.start for row, _ in rows], caches) if rows else None

    def apply(self, offset: int, data: memoryview, readers: ReaderPool) -> None:
        """See :class:`rankless.engine.io.tensor_sources.Layer`."""
        word = self.tensor.word
        words = np.frombuffer(data, word)
        first = offset // word.itemsize
        last = first + len(words)
        for row, part in self.rows[max(0, bisect_right(self.starts, first) - 1) :]:
            if row.start >= last:
                return
            low, high = max(row.start, first), min(row.stop, last)
            if low < high:
                self._apply_row(row, part, low - row.start, words[low - first : high - first], readers)

    def replaces(self, first: int, last: int) -> bool:
        """Return whether some of the words ``[first, last)`` are replaced, and nothing is added to them."""
        return any(row.encoding == RAW and row.start < last and first < row.stop for row, _ in self.rows)

    def _apply_row(
        self,
        row: PartRange,
        part: DifferencePart,
        start: int,
        words: Words,
        readers: ReaderPool,
    ) -> None:
        if row.encoding == RAW and row.nbytes == row.count * words.itemsize:
            self.caches.read(part, row.offset + start * words.itemsize, words.view(np.uint8).data, readers)
            return
        decoded = self.caches.decoded.find((part.path, row.tensor, row.start), lambda: self._decode(row, part, readers))
        decoded.apply(words, start)

    def _decode(self, row: PartRange, part: DifferencePart, readers: ReaderPool) -> DecodedRange:
        word, subject = self.tensor.word, f"{part.path}: the range of {self.tensor.name!r} from word {row.start} on"
        if row.nbytes > row.count * word.itemsize:
            raise CorruptCheckpointError(f"{subject} has {row.nbytes} bytes for {row.count} words: it is corrupt")
        raw = memoryview(bytearray(row.nbytes))
        self.caches.read(part, row.offset, raw, readers)
        first, second = row.sizes[0], row.sizes[0] + row.sizes[1]
        streams = (raw[:first], raw[first:second], raw[second:])
        return decode_range(StoredRange(row.encoding, row.changed, row.count, word, streams, subject))
