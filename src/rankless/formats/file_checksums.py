"""The checksums of byte ranges that other systems' files have, and the ranges that cover the bytes of a tensor.

Conversions and ``rankless verify`` compare all such checksums. Loads of files of ``torch.save`` compare the checksums
of the bytes that they read (:mod:`rankless.load.torch_file_crcs`).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rankless.engine.io.tensor_sources import ChunkedSource, SourceChunk
from rankless.errors import CorruptCheckpointError, RanklessError
from rankless.formats.reader import FileExtent
from rankless.formats.registry import DCP, DCP_RECORD_CHECKSUMS, READABLE, load_attribute
from rankless.formats.torchfile.entry_checksums import read_entry_checksums
from rankless.formats.torchfile.zip_reader import FileWindow, is_zip
from rankless.ondisk.range_checksums import RangeChecksum
from rankless.storage.reader_pool import ReaderPool
from rankless.storage.store import store_of


@dataclass(frozen=True)
class FileChecksums:
    """The checksums in files, sorted, and the errors of files that have unreadable checksums."""

    sums: Sequence[RangeChecksum]
    errors: Sequence[CorruptCheckpointError]

    @cached_property
    def _range_starts(self) -> Sequence[tuple[Path, int]]:
        return [(checksum.file, checksum.start) for checksum in self.sums]

    def find_covering(self, extents: Iterable[FileExtent]) -> list[int] | None:
        """Return the indices of the checksums that cover the bytes of a tensor, or ``None`` if some bytes have none.

        Raises ``CorruptCheckpointError`` if the location of the bytes cannot be read.
        """
        numbers: set[int] = set()
        for file, start, stop in (file_range for extent in extents for file_range in _file_ranges(extent)):
            at, number = start, bisect.bisect_right(self._range_starts, (file, start)) - 1
            while at < stop:
                checksum = self.sums[number] if 0 <= number < len(self.sums) else None
                if checksum is None or checksum.file != file or not checksum.start <= at < checksum.stop:
                    return None
                numbers.add(number)
                at, number = checksum.stop, number + 1
        return sorted(numbers) if self.sums else None


def find_file_checksums(files: Sequence[Path]) -> FileChecksums:
    """Return the checksums in the files of a checkpoint: of zip files, and of records of distributed checkpoints."""
    results = list(_find_checksums(files))
    sums = {result for result in results if isinstance(result, RangeChecksum)}
    return FileChecksums(sorted(sums), [result for result in results if isinstance(result, CorruptCheckpointError)])


def _find_checksums(files: Sequence[Path]) -> Iterator[RangeChecksum | CorruptCheckpointError]:
    remaining = set(files)
    for folder in sorted({file.parent for file in remaining}):
        if not READABLE[DCP].is_at(folder):
            continue
        try:
            records = load_attribute(DCP_RECORD_CHECKSUMS)(folder)
        except RanklessError as error:
            yield CorruptCheckpointError(*error.args)
            remaining -= {file for file in remaining if file.parent == folder and file.suffix == ".distcp"}
            continue
        yield from records.find_checksums(remaining & records.files)
        remaining -= records.files
    for file in sorted(remaining):
        window = FileWindow(file, 0, store_of(file).file_size(file), ReaderPool())
        if is_zip(window):
            yield from read_entry_checksums(window)


def _file_ranges(extent: FileExtent) -> Iterator[tuple[Path, int, int]]:
    """Yield the file ranges of an extent, if its bytes lie in files as they are.

    Bytes in memory were checked when the values were read. Bytes of published versions have CRCs of their own.
    """
    if isinstance(extent.file, Path):
        yield extent.file, extent.offset, extent.offset + extent.stop - extent.start
    elif isinstance(extent.file, ChunkedSource):
        for chunk in extent.file.chunks:
            yield _file_range_of(chunk, extent.file.width)


def _file_range_of(chunk: SourceChunk, width: int) -> tuple[Path, int, int]:
    file, offset, strides = chunk.location
    reach = sum((size - 1) * stride for size, stride in zip(chunk.box.shape, strides, strict=True))
    return file, offset, offset + reach + width
