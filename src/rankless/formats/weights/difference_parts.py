"""The parts of a delta, open for reading: the changes of a tensor as layers over its older bytes.

:mod:`rankless.formats.weights.version_reader` opens them in each process that reads a version; the threads that read
tensors apply the layers. The table of ranges in a part is checked before any memory is taken for them. That the result
is right is proven by the CRCs of the version, so the bytes of streams are not verified here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rankless.errors import CorruptCheckpointError
from rankless.formats.reader import missing_as_corrupt
from rankless.formats.safetensors import SafetensorsFile
from rankless.formats.weights.recently_used import RecentlyUsed
from rankless.ondisk import block_crcs
from rankless.ondisk.differences import PLANES, RAW, DecodedRange, StoredRange, Words, decode_range, word_type
from rankless.ondisk.weight_versions import (
    CHANGED,
    COLUMNS,
    COUNT,
    DATA,
    ENCODING,
    FIRST_SIZE,
    LARGEST_PART,
    MOST_RANGES,
    MOST_WORDS,
    OFFSET,
    RANGES,
    START,
    TENSOR,
    PublishedFile,
)
from rankless.storage.reader_pool import ReaderPool
from rankless.storage.store import store_of

#: The most bytes of decoded ranges that are kept: reads of neighbouring bytes need one range several times.
_KEPT_BYTES = 16 * 2**20

#: The bytes of an object that are requested at a time, and the most that are kept.
_REQUESTED_BYTES, _MOST_REQUESTED = 4 * 2**20, 32 * 2**20

#: Ranges with more changed words are decoded one at a time: a publisher writes few, and they take much memory.
_MANY_CHANGED = 2**19

#: The rows of a table, as signed integers of 64 bits.
_Table = npt.NDArray[np.int64]


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
    """A part after its table was read and checked."""

    path: Path
    data_start: int
    data_size: int
    table: _Table

    def rows_of(self, tensor: int) -> _Table:
        """Return the rows of a tensor, in order."""
        first, last = np.searchsorted(self.table[:, TENSOR], [tensor, tensor + 1]).tolist()
        return self.table[first:last]


def open_part(folder: Path, part: PublishedFile, tensors: Sequence[TensorWords]) -> DifferencePart:
    """Read the table of a part, and check it. Raises ``CorruptCheckpointError``, ``StorageError``."""
    path = folder / part.name
    with missing_as_corrupt(path):
        file = SafetensorsFile.open(path)
    entries = file.header.entries
    table, data = entries.get(RANGES), entries.get(DATA)
    size = file.header.size + sum(entry.nbytes for entry in entries.values())
    if table is None or data is None or len(entries) != len((RANGES, DATA)) or size != part.size or size > LARGEST_PART:
        raise CorruptCheckpointError(f"{path} is not the part of a version that its manifest names")
    rows = table.shape[0] if table.shape else 0
    if rows > MOST_RANGES or (table.dtype, table.shape, data.dtype) != ("I64", (rows, COLUMNS), "U8"):
        raise CorruptCheckpointError(f"{path} has no table of ranges that a publisher writes")
    raw = bytearray(table.nbytes)
    with store_of(path).open_reader(path) as reader:
        reader.read(file.header.size + table.data_offsets[0], memoryview(raw))
    blocks = range(0, len(raw), block_crcs.BLOCK_BYTES)
    crcs = [block_crcs.crc64(memoryview(raw)[at : at + block_crcs.BLOCK_BYTES]) for at in blocks]
    if crcs != file.crcs.get(RANGES):
        raise CorruptCheckpointError(f"the table of ranges in {path} does not match its CRC: it is corrupt")
    checked = np.frombuffer(raw, "<i8").reshape(-1, COLUMNS)
    _check_table(checked, data.nbytes, tensors, path)
    return DifferencePart(path, file.header.size + data.data_offsets[0], data.nbytes, checked)


def _check_table(table: _Table, data_size: int, tensors: Sequence[TensorWords], path: Path) -> None:
    """Raise ``CorruptCheckpointError`` unless all rows are ranges of tensors, in order, and have their streams."""
    widths = np.array([tensor.word.itemsize for tensor in tensors], np.int64)
    counts = np.array([tensor.count for tensor in tensors], np.int64)
    tensor, start, count, changed = (table[:, column] for column in (TENSOR, START, COUNT, CHANGED))
    sizes = table[:, FIRST_SIZE:]
    is_bounded = (table >= 0).all() and (tensor < len(tensors)).all()
    is_bounded = is_bounded and (count <= MOST_WORDS).all() and (count >= 1).all() and (changed >= 1).all()
    is_bounded = is_bounded and (changed <= count).all() and (start <= counts[tensor] - count).all()
    if not is_bounded or not _ascend(table):
        raise CorruptCheckpointError(f"{path} is corrupt: its ranges overlap, or are in no tensor of its version")
    width = widths[tensor]
    first, last = start * width // block_crcs.BLOCK_BYTES, ((start + count) * width - 1) // block_crcs.BLOCK_BYTES
    nbytes = sizes.sum(axis=1) if (sizes <= data_size).all() else None
    if nbytes is None or (first != last).any() or (nbytes > count * width).any():
        raise CorruptCheckpointError(f"{path} is corrupt: it has a range in two blocks, or with too many bytes")
    if (table[:, OFFSET] > data_size - nbytes).any():
        raise CorruptCheckpointError(f"{path} is corrupt: the bytes of a range are not there")


def _ascend(table: _Table) -> bool:
    """Return whether the rows are in order, and do not overlap."""
    before, after = table[:-1], table[1:]
    is_later = before[:, TENSOR] < after[:, TENSOR]
    is_behind = (before[:, TENSOR] == after[:, TENSOR]) & (before[:, START] + before[:, COUNT] <= after[:, START])
    return bool((is_later | is_behind).all())


class PartCaches:
    """The ranges and requested bytes that the layers of a version keep, and a turn for large ranges."""

    def __init__(self) -> None:
        self.decoded = RecentlyUsed[DecodedRange](_KEPT_BYTES)
        self._requested = RecentlyUsed[memoryview](_MOST_REQUESTED)
        self.turn = threading.Lock()

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

            piece = self._requested.find((part.path, window), request)[skipped : skipped + len(into) - done]
            into[done : done + len(piece)] = piece
            done += len(piece)


class DifferenceLayer(msgspec.Struct, frozen=True, eq=False):
    """The changes of one tensor by one delta: a :class:`rankless.engine.io.tensor_sources.SourceLayer`.

    ``rows`` are the ranges of all parts, in order, and ``owners`` the numbers of their parts.
    """

    tensor: TensorWords
    rows: _Table
    owners: npt.NDArray[np.int64]
    parts: Sequence[DifferencePart]
    caches: PartCaches

    @classmethod
    def of(
        cls, tensor: TensorWords, number: int, parts: Sequence[DifferencePart], caches: PartCaches
    ) -> DifferenceLayer | None:
        """Return the layer of tensor ``number``; ``None`` if nothing in it has changed.

        Raises ``CorruptCheckpointError`` if ranges of two parts overlap.
        """
        of_parts = [part.rows_of(number) for part in parts]
        rows = np.concatenate(of_parts) if of_parts else np.empty((0, COLUMNS), np.int64)
        if not len(rows):
            return None
        owners = np.repeat(np.arange(len(parts)), [len(of_part) for of_part in of_parts])
        order = np.argsort(rows[:, START], kind="stable")
        rows, owners = rows[order], owners[order]
        if not _ascend(rows):
            raise CorruptCheckpointError(
                f"{parts[int(owners[0])].path} has a range of {tensor.name!r} that another part has, too"
            )
        return cls(tensor, rows, owners, parts, caches)

    def apply(self, offset: int, data: memoryview, readers: ReaderPool) -> None:
        """See :class:`rankless.engine.io.tensor_sources.SourceLayer`."""
        words = np.frombuffer(data, self.tensor.word)
        first = offset // words.itemsize
        for number in self._overlapping(first, first + len(words)):
            start, count = self.rows[number, START : COUNT + 1].tolist()
            low, high = max(start, first), min(start + count, first + len(words))
            self._apply_row(number, low - start, words[low - first : high - first], readers)

    def _overlapping(self, first: int, last: int) -> Iterator[int]:
        """Yield the numbers of the rows that have some of the words ``[first, last)``."""
        starts = self.rows[:, START]
        low, high = int(np.searchsorted(starts, first, "right")) - 1, int(np.searchsorted(starts, last))
        for number in range(max(low, 0), high):
            if self.rows[number, START] + self.rows[number, COUNT] > first:
                yield number

    def replaces(self, first: int, last: int) -> bool:
        """Return whether some of the words ``[first, last)`` are replaced, and nothing is added to them."""
        return any(self.rows[number, ENCODING] == RAW for number in self._overlapping(first, last))

    def _apply_row(self, number: int, start: int, words: Words, readers: ReaderPool) -> None:
        row, part = self.rows[number].tolist(), self.parts[int(self.owners[number])]
        if row[ENCODING] == RAW and sum(row[FIRST_SIZE:]) == row[COUNT] * words.itemsize:
            into = words.view(np.uint8).data
            self.caches.read(part, row[OFFSET] + start * words.itemsize, into, readers)
            return
        key = part.path, self.tensor.name, row[START]
        self.caches.decoded.find(key, lambda: self._decode(row, part, readers)).apply(words, start)

    def _decode(self, row: Sequence[int], part: DifferencePart, readers: ReaderPool) -> DecodedRange:
        sizes = row[FIRST_SIZE:]
        raw = memoryview(bytearray(sum(sizes)))
        self.caches.read(part, row[OFFSET], raw, readers)
        streams = (raw[: sizes[0]], raw[sizes[0] : sizes[0] + sizes[1]], raw[sizes[0] + sizes[1] :])
        subject = f"{part.path}: the range of {self.tensor.name!r} from word {row[START]} on"
        stored = StoredRange(row[ENCODING], row[CHANGED], row[COUNT], self.tensor.word, streams, subject)
        if row[CHANGED] <= _MANY_CHANGED and row[ENCODING] != PLANES:
            return decode_range(stored)
        with self.caches.turn:
            return decode_range(stored)
