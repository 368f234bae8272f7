"""Which ranges of a checkpoint's files have checksums of their own, and which tensors lie in them."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from holdfast.engine.io.sources import InMemorySource, SourceChunk
from holdfast.errors import CorruptCheckpointError, HoldfastError
from holdfast.formats.dcp.folder import is_dcp
from holdfast.formats.dcp.record_checksums import RecordChecksumIndex
from holdfast.formats.reader import FileExtent
from holdfast.formats.torchfile.entry_checksums import read_entry_checksums
from holdfast.formats.torchfile.zip_reader import FileWindow, is_zip
from holdfast.ondisk.range_checksums import RangeChecksum
from holdfast.storage import posix
from holdfast.storage.reader_pool import ReaderPool


@dataclass(frozen=True)
class FileChecksums:
    """The checksums in files, in their order, and what is wrong with files whose checksums cannot be told."""

    sums: Sequence[RangeChecksum]
    damage: Sequence[CorruptCheckpointError]

    @cached_property
    def _starts(self) -> Sequence[tuple[Path, int]]:
        return [(one.file, one.start) for one in self.sums]

    def covering(self, extents: Iterable[FileExtent]) -> list[int] | None:
        """Return the numbers of the checksums that cover bytes of a tensor; ``None`` if they do not cover all.

        Raises ``CorruptCheckpointError`` if nobody can tell where it lies.
        """
        numbers: set[int] = set()
        for file, start, stop in (one for extent in extents for one in _ranges(extent)):
            at, number = start, bisect.bisect_right(self._starts, (file, start)) - 1
            while at < stop:
                one = self.sums[number] if 0 <= number < len(self.sums) else None
                if one is None or one.file != file or not one.start <= at < one.stop:
                    return None
                numbers.add(number)
                at, number = one.stop, number + 1
        return sorted(numbers) if self.sums else None


def find_file_checksums(files: Sequence[Path]) -> FileChecksums:
    """Find the checksums in the files of a checkpoint; those of another format than zip files have none here."""
    found = list(_find(files))
    sums = {one for one in found if isinstance(one, RangeChecksum)}
    return FileChecksums(sorted(sums), [one for one in found if isinstance(one, CorruptCheckpointError)])


def _find(files: Sequence[Path]) -> Iterator[RangeChecksum | CorruptCheckpointError]:
    wanted = set(files)
    for folder in sorted({file.parent for file in wanted}):
        if not is_dcp(folder):
            continue
        try:
            records = RecordChecksumIndex(folder)
        except HoldfastError as error:
            yield CorruptCheckpointError(*error.args)
            wanted -= {file for file in wanted if file.parent == folder and file.suffix == ".distcp"}
            continue
        yield from records.find(wanted & records.files)
        wanted -= records.files
    for file in sorted(wanted):
        window = FileWindow(file, 0, posix.size_of(file), ReaderPool())
        if is_zip(window):
            yield from read_entry_checksums(window)


def _ranges(extent: FileExtent) -> Iterator[tuple[Path, int, int]]:
    """The ranges of files that hold an extent; what came with the values was checked with them."""
    if isinstance(extent.file, Path):
        yield extent.file, extent.offset, extent.offset + extent.stop - extent.start
    elif not isinstance(extent.file, InMemorySource):
        for part in extent.file.parts:
            yield _range(part, extent.file.width)


def _range(part: SourceChunk, width: int) -> tuple[Path, int, int]:
    file, offset, strides = part.place
    reach = sum((size - 1) * stride for size, stride in zip(part.box.shape, strides, strict=True))
    return file, offset, offset + reach + width
