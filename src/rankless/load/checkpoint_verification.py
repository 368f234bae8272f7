"""Verifies all of a checkpoint, and reports every corruption, not just the first one.

``Checkpoint.verify`` and ``rankless verify`` run it in one process, without ranks. It changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rankless.engine.integrity.block_verification import ChecksumVerifier
from rankless.engine.integrity.range_verification import find_corrupt_ranges
from rankless.engine.io.byte_sinks import NullSink
from rankless.engine.io.read import read_file_ranges
from rankless.engine.io.tensor_sources import ChunkedSource, Source
from rankless.engine.plan.element_ranges import TensorRange
from rankless.errors import CorruptCheckpointError, RanklessError
from rankless.formats.file_checksums import FileChecksums, find_file_checksums
from rankless.formats.native import NativeReader, is_native
from rankless.formats.reader import Reader, find_file_ranges
from rankless.formats.safetensors import SafetensorsFile
from rankless.storage import posix

#: The size of a batch in bytes, a multiple of the block size, and the maximum number of ranges in it.
_BATCH_BYTES, _MAX_BATCH = 256 * 2**20, 4096


class VerificationResult(NamedTuple):
    """The result for one range of a tensor: ``nbytes`` bytes were read, and ``problem`` describes a corruption.

    ``checked``: whether the bytes were compared with a checksum. ``name`` is empty for a file without tensor data.
    """

    name: str
    nbytes: int
    problem: str | None
    checked: bool = True


class CheckpointVerification:
    """The verification of a checkpoint: compares tensors with their checksums, or only reads them if there are none."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._stored = sorted((group, name) for group, names in reader.groups.items() for name in names)
        self._verifier = ChecksumVerifier(reader, self._stored)
        self._file_checksums = (
            find_file_checksums(reader.files) if not isinstance(reader, NativeReader) else FileChecksums((), ())
        )
        #: By number, the result for each file range with a checksum that was compared: its error, or ``None``.
        self._checked_ranges: dict[int, RanklessError | None] = {}

    def verify_parts(self) -> Iterator[VerificationResult]:
        """Yield a result for each range that was read, in the order of the files, then the remaining corruptions."""
        reported: set[str | None] = set()
        for batch in self._split_into_batches():
            for result in self._verify_batch(batch):
                reported.add(result.problem)
                yield result
        checksums = self._file_checksums
        remaining = [number for number in range(len(checksums.sums)) if number not in self._checked_ranges]
        self._check_file_ranges(remaining)
        errors = [self._checked_ranges[number] for number in remaining]
        others = [*checksums.errors, *(error for error in errors if error is not None)]
        yield from (VerificationResult("", 0, str(error)) for error in others if str(error) not in reported)

    def _verify_batch(self, batch: list[TensorRange]) -> Iterator[VerificationResult]:
        others = []
        for verify_range in batch:
            checksums = self._checksums_covering(verify_range.tensor)
            if checksums is None:
                others.append(verify_range)
            else:
                yield self._compare_checksums(verify_range, checksums)
        yield from self._read_batch(others)

    def _checksums_covering(self, tensor: int) -> Sequence[int] | CorruptCheckpointError | None:
        """Return the file checksums that cover a tensor, or ``None`` if there are none or it has block CRCs."""
        group, name = self._stored[tensor]
        if self._reader.block_crcs(group, name) is not None or not self._file_checksums.sums:
            return None
        try:
            return self._file_checksums.find_covering(
                self._reader.find_extents(group, name, 0, self._tensor_nbytes(tensor))
            )
        except CorruptCheckpointError as error:
            return error

    def _compare_checksums(
        self, verify_range: TensorRange, checksums: Sequence[int] | CorruptCheckpointError
    ) -> VerificationResult:
        group, tensor_name = self._stored[verify_range.tensor]
        name, nbytes = f"{group}/{tensor_name}", verify_range.stop - verify_range.start
        if isinstance(checksums, CorruptCheckpointError):
            return VerificationResult(name, nbytes, str(checksums))
        self._check_file_ranges(checksums)
        error = next((self._checked_ranges[number] for number in checksums if self._checked_ranges[number]), None)
        return VerificationResult(name, nbytes, f"{group} tensor {tensor_name!r}: {error}" if error else None)

    def _check_file_ranges(self, numbers: Sequence[int]) -> None:
        """Read the file ranges with these numbers, except those that were read before, and record the results."""
        new = [number for number in numbers if number not in self._checked_ranges]
        errors = find_corrupt_ranges([self._file_checksums.sums[number] for number in new])
        self._checked_ranges |= {number: errors.get(index) for index, number in enumerate(new)}

    def _read_batch(self, batch: list[TensorRange]) -> Iterator[VerificationResult]:
        files: dict[Source, int] = {}
        try:
            file_ranges = [
                file_range
                for verify_range in batch
                for file_range in find_file_ranges(self._reader, self._stored[verify_range.tensor], verify_range, files)
            ]
            fragments = read_file_ranges(list(files), file_ranges, lambda _: NullSink())
            problems = {
                tensor: str(error)
                for tensor, error in self._verifier.find_wrong_blocks(fragments, {})
                if isinstance(error, CorruptCheckpointError)
            }
        except CorruptCheckpointError as error:
            if len(batch) > 1:
                for verify_range in batch:
                    yield from self._read_batch([verify_range])
                return
            problems = {batch[0].tensor: str(error)}
        for number, start, stop in batch:
            checked = self._reader.block_crcs(*self._stored[number]) is not None
            yield VerificationResult("/".join(self._stored[number]), stop - start, problems.get(number), checked)

    def _split_into_batches(self) -> Iterator[list[TensorRange]]:
        """Yield all tensors in the order of their files, in batches of about ``_BATCH_BYTES`` that end at blocks."""
        batch: list[TensorRange] = []
        filled = 0
        for number in sorted(range(len(self._stored)), key=self._file_position):
            nbytes = self._tensor_nbytes(number)
            for start in range(0, max(1, nbytes), _BATCH_BYTES):
                batch.append(TensorRange(number, start, min(nbytes, start + _BATCH_BYTES)))
                filled += batch[-1].stop - start
                if filled >= _BATCH_BYTES or len(batch) == _MAX_BATCH:
                    yield batch
                    batch, filled = [], 0
        yield batch

    def _tensor_nbytes(self, number: int) -> int:
        group, name = self._stored[number]
        return self._reader.groups[group][name].nbytes

    def _file_position(self, number: int) -> tuple[Path, int]:
        extents = self._reader.find_extents(*self._stored[number], 0, self._tensor_nbytes(number))
        first = extents[0] if extents else None
        if first is not None and isinstance(first.file, ChunkedSource):
            return first.file.chunks[0].order_hint
        path = self._reader.path
        return (first.file, first.offset) if first is not None and isinstance(first.file, Path) else (path, 0)


def find_all_corruption(path: Path, error: CorruptCheckpointError) -> list[str]:
    """Return all corruptions of a checkpoint that cannot be opened because of ``error``, including ``error``."""
    messages = str(error).splitlines()
    try:
        messages += _find_native_corruption(path) if is_native(path) else _find_file_corruption(posix.walk_files(path))
    except RanklessError as other:
        messages += str(other).splitlines()
    return list(dict.fromkeys(messages))


def _find_native_corruption(path: Path) -> Iterator[str]:
    errors: list[CorruptCheckpointError] = []
    reader = NativeReader(path, errors)
    yield from map(str, errors)
    yield from map(str, reader.find_corrupt_files())
    yield from (result.problem for result in CheckpointVerification(reader).verify_parts() if result.problem)


def _find_file_corruption(files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        if file.suffix == ".safetensors":
            try:
                SafetensorsFile.open(file)
            except CorruptCheckpointError as error:
                yield str(error)
    checksums = find_file_checksums(files)
    yield from map(str, checksums.errors)
    yield from map(str, find_corrupt_ranges(checksums.sums).values())
