"""Which ranges of a checkpoint's files have checksums of their own, and which tensors lie in them."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from holdfast.engine.woven import Kept, Part
from holdfast.errors import DamagedError, HoldfastError
from holdfast.formats.dcp.folder import is_dcp
from holdfast.formats.dcp.sums import RecordSums
from holdfast.formats.reader import Extent
from holdfast.formats.torchfile.crc32 import entry_sums
from holdfast.formats.torchfile.zips import Window, is_zip
from holdfast.layout.sums import Sum
from holdfast.storage import local
from holdfast.storage.readers import Readers


@dataclass(frozen=True)
class FileSums:
    """The checksums in files, in their order, and what is wrong with files whose checksums cannot be told."""

    sums: Sequence[Sum]
    damage: Sequence[DamagedError]

    @cached_property
    def _starts(self) -> Sequence[tuple[Path, int]]:
        return [(one.file, one.start) for one in self.sums]

    def covering(self, extents: Iterable[Extent]) -> list[int] | None:
        """Return the numbers of the checksums that cover bytes of a tensor; ``None`` if they do not cover all.

        Raises ``DamagedError`` if nobody can tell where it lies.
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


def find_sums(files: Sequence[Path]) -> FileSums:
    """Find the checksums in the files of a checkpoint; those of another format than zip files have none here."""
    found = list(_find(files))
    sums = {one for one in found if isinstance(one, Sum)}
    return FileSums(sorted(sums), [one for one in found if isinstance(one, DamagedError)])


def _find(files: Sequence[Path]) -> Iterator[Sum | DamagedError]:
    wanted = set(files)
    for folder in sorted({file.parent for file in wanted}):
        if not is_dcp(folder):
            continue
        try:
            records = RecordSums(folder)
        except HoldfastError as error:
            yield DamagedError(*error.args)
            wanted -= {file for file in wanted if file.parent == folder and file.suffix == ".distcp"}
            continue
        yield from records.find(wanted & records.files)
        wanted -= records.files
    for file in sorted(wanted):
        window = Window(file, 0, local.size_of(file), Readers())
        if is_zip(window):
            yield from entry_sums(window)


def _ranges(extent: Extent) -> Iterator[tuple[Path, int, int]]:
    """The ranges of files that hold an extent; what came with the values was checked with them."""
    if isinstance(extent.file, Path):
        yield extent.file, extent.offset, extent.offset + extent.stop - extent.start
    elif not isinstance(extent.file, Kept):
        for part in extent.file.parts:
            yield _range(part, extent.file.width)


def _range(part: Part, width: int) -> tuple[Path, int, int]:
    file, offset, strides = part.place
    reach = sum((size - 1) * stride for size, stride in zip(part.box.shape, strides, strict=True))
    return file, offset, offset + reach + width
