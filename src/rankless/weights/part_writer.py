"""The parts that a rank writes for a version: ranges and their streams, in files of a few megabytes.

:mod:`rankless.weights.version_parts` has one for each delta of a version, in the thread that publishes. A part is a
safetensors file with the CRCs of its blocks. It is durable when :meth:`PartWriter.finish` returns.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import numpy as np

from rankless.ondisk.block_crcs import BLOCK_BYTES, combine_crcs, crc64
from rankless.ondisk.data_files import DataFile
from rankless.ondisk.differences import EncodedRange
from rankless.ondisk.header import HeaderEntry
from rankless.ondisk.weight_versions import COLUMNS, DATA, MOST_RANGES, RANGES, PublishedFile
from rankless.storage.store import store_of

#: A part is written when it has this many bytes, or :data:`MOST_RANGES`. A rank keeps no more encoded bytes than these.
_PART_BYTES = 24 * 2**20


class PartWriter:
    """A writer of the parts of one delta by one rank. Ranges must be added in order: by tensor, then by position."""

    def __init__(self, folder: Path, stem: str) -> None:
        self._folder, self._stem = folder, stem
        self._rows: list[tuple[int, ...]] = []
        self._streams: list[bytes] = []
        self._nbytes = 0
        self._written: list[PublishedFile] = []

    def add(self, tensor: int, start: int, count: int, encoded: EncodedRange) -> None:
        """Add a range of words that has changed."""
        self._rows.append((tensor, start, count, encoded.encoding, encoded.changed, self._nbytes, *encoded.sizes))
        self._streams += encoded.streams
        self._nbytes += sum(encoded.sizes)
        if self._nbytes >= _PART_BYTES or len(self._rows) >= MOST_RANGES:
            self._write()

    def finish(self) -> list[PublishedFile]:
        """Write the rest, and return all parts."""
        if self._rows:
            self._write()
        return self._written

    def _write(self) -> None:
        table = np.array(self._rows, "<i8").reshape(-1, COLUMNS)
        data = b"".join(self._streams)
        ends = list(accumulate((table.nbytes, len(data))))
        entries = {
            RANGES: HeaderEntry("I64", table.shape, (0, ends[0])),
            DATA: HeaderEntry("U8", (len(data),), (ends[0], ends[1])),
        }
        name = f"{self._stem}-{len(self._written):03d}.safetensors"
        blocks = [_blocks_of(table.tobytes()), _blocks_of(data)]
        header = DataFile(name, entries, {}).build_header(crc for of_tensor in blocks for crc, _ in of_tensor)
        content = b"".join((header, table.tobytes(), data))
        crc = combine_crcs([(crc64(header), len(header)), *blocks[0], *blocks[1]])
        store_of(self._folder).replace_small(self._folder / name, content)
        self._written.append(PublishedFile(name, len(content), f"{crc:016x}"))
        self._rows, self._streams, self._nbytes = [], [], 0


def _blocks_of(data: bytes) -> list[tuple[int, int]]:
    """Return the CRC and the size of each block."""
    view = memoryview(data)
    blocks = (view[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES))
    return [(crc64(block), len(block)) for block in blocks]
