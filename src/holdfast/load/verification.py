"""Reading all of a checkpoint, and telling of everything that is damaged, not just of the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.engine.integrity.file_checksums import find_corrupt_ranges
from holdfast.engine.integrity.verify import ChecksumVerifier
from holdfast.engine.io.read import read_pieces
from holdfast.engine.io.sources import ChunkedSource, Source
from holdfast.engine.io.tensor_bytes import NullSink
from holdfast.engine.plan.file_ranges import FileRange
from holdfast.errors import CorruptCheckpointError, HoldfastError
from holdfast.formats.file_checksums import FileChecksums, find_file_checksums
from holdfast.formats.native import NativeReader, is_native
from holdfast.formats.reader import Reader
from holdfast.formats.safetensors import SafetensorsFile
from holdfast.storage import posix

#: Bytes verified at a time, a multiple of a block; and the most tensors.
_BATCH, _MANY = 256 * 2**20, 4096


class VerificationResult(NamedTuple):
    """``nbytes`` of a tensor were read; ``problem`` says what is wrong with them, if anything is.

    ``checked`` says whether they were compared with a checksum. An empty ``name`` stands for a file without tensor
    data.
    """

    name: str
    nbytes: int
    problem: str | None
    checked: bool = True


class _Part(NamedTuple):
    """Bytes ``[start, stop)`` of a stored tensor, by its number."""

    tensor: int
    start: int
    stop: int


class CheckpointVerification:
    """Compares the tensors of a checkpoint with the checksums that it has of them, or else reads them."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._stored = sorted((group, name) for group, names in reader.groups.items() for name in names)
        self._checks = ChecksumVerifier(reader, self._stored)
        self._sums = (
            find_file_checksums(reader.files) if not isinstance(reader, NativeReader) else FileChecksums((), ())
        )
        #: What was found of each range of a file that has a checksum.
        self._compared: dict[int, CorruptCheckpointError | None] = {}

    def parts(self) -> Iterator[VerificationResult]:
        """Give each part that was read: tensors in the order of their files, then what is wrong with the rest."""
        told: set[str | None] = set()
        for batch in self._batches():
            for part in self._verify(batch):
                told.add(part.problem)
                yield part
        rest = [number for number in range(len(self._sums.sums)) if number not in self._compared]
        self._look(rest)
        others = [*self._sums.damage, *(error for number in rest if (error := self._compared[number]) is not None)]
        yield from (VerificationResult("", 0, str(error)) for error in others if str(error) not in told)

    def _verify(self, batch: list[_Part]) -> Iterator[VerificationResult]:
        others = []
        for part in batch:
            covered = self._covering(part.tensor)
            if covered is None:
                others.append(part)
            else:
                yield self._compare(part, covered)
        yield from self._read(others)

    def _covering(self, tensor: int) -> Sequence[int] | CorruptCheckpointError | None:
        """The checksums of files that cover a tensor; ``None`` if it has others, or none."""
        group, name = self._stored[tensor]
        if self._reader.crcs(group, name) is not None or not self._sums.sums:
            return None
        try:
            return self._sums.covering(self._reader.extents(group, name, 0, self._nbytes(tensor)))
        except CorruptCheckpointError as error:
            return error

    def _compare(self, part: _Part, covered: Sequence[int] | CorruptCheckpointError) -> VerificationResult:
        name, nbytes = "/".join(self._stored[part.tensor]), part.stop - part.start
        if isinstance(covered, CorruptCheckpointError):
            return VerificationResult(name, nbytes, str(covered))
        self._look(covered)
        damage = next((self._compared[number] for number in covered if self._compared[number]), None)
        group, own = self._stored[part.tensor]
        return VerificationResult(name, nbytes, f"{group} tensor {own!r}: {damage}" if damage else None)

    def _look(self, numbers: Sequence[int]) -> None:
        new = [number for number in numbers if number not in self._compared]
        found = find_corrupt_ranges([self._sums.sums[number] for number in new])
        self._compared |= {number: found.get(index) for index, number in enumerate(new)}

    def _read(self, batch: list[_Part]) -> Iterator[VerificationResult]:
        files: dict[Source, int] = {}
        try:
            pieces = [piece for part in batch for piece in self._pieces(part, files)]
            found = read_pieces(list(files), pieces, lambda _: NullSink())
            problems = {tensor: str(error) for tensor, error in self._checks.damage(found, {})}
        except CorruptCheckpointError as error:
            if len(batch) > 1:
                for part in batch:
                    yield from self._read([part])
                return
            problems = {batch[0].tensor: str(error)}
        for number, start, stop in batch:
            checked = self._reader.crcs(*self._stored[number]) is not None
            yield VerificationResult("/".join(self._stored[number]), stop - start, problems.get(number), checked)

    def _batches(self) -> Iterator[list[_Part]]:
        """All tensors in the order of their files, in parts that end at blocks, about ``_BATCH`` bytes at a time."""
        batch: list[_Part] = []
        filled = 0
        for number in sorted(range(len(self._stored)), key=self._position):
            nbytes = self._nbytes(number)
            for start in range(0, max(1, nbytes), _BATCH):
                batch.append(_Part(number, start, min(nbytes, start + _BATCH)))
                filled += batch[-1].stop - start
                if filled >= _BATCH or len(batch) == _MANY:
                    yield batch
                    batch, filled = [], 0
        yield batch

    def _nbytes(self, number: int) -> int:
        group, name = self._stored[number]
        return self._reader.groups[group][name].nbytes

    def _position(self, number: int) -> tuple[Path, int]:
        extents = self._reader.extents(*self._stored[number], 0, self._nbytes(number))
        first = extents[0] if extents else None
        if first is not None and isinstance(first.file, ChunkedSource):
            return first.file.parts[0].near
        path = self._reader.path
        return (first.file, first.offset) if first is not None and isinstance(first.file, Path) else (path, 0)

    def _pieces(self, part: _Part, files: dict[Source, int]) -> Iterator[FileRange]:
        for extent in self._reader.extents(*self._stored[part.tensor], part.start, part.stop):
            file = files.setdefault(extent.file, len(files))
            yield FileRange(part.tensor, extent.start, extent.stop, extent.start - part.start, file, extent.offset)


def find_all_corruption(path: Path, error: CorruptCheckpointError) -> list[str]:
    """Say all that is wrong with a checkpoint that cannot be opened because of ``error``, that included."""
    found = str(error).splitlines()
    try:
        found += _damaged_native(path) if is_native(path) else _damaged_files(posix.walk_files(path))
    except HoldfastError as other:
        found += str(other).splitlines()
    return list(dict.fromkeys(found))


def _damaged_native(path: Path) -> Iterator[str]:
    unopened: list[CorruptCheckpointError] = []
    reader = NativeReader(path, unopened)
    yield from map(str, unopened)
    yield from map(str, reader.damaged_files())
    yield from (part.problem for part in CheckpointVerification(reader).parts() if part.problem)


def _damaged_files(files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        if file.suffix == ".safetensors":
            try:
                SafetensorsFile.open(file)
            except CorruptCheckpointError as error:
                yield str(error)
    sums = find_file_checksums(files)
    yield from map(str, sums.damage)
    yield from map(str, find_corrupt_ranges(sums.sums).values())
