"""Verification of the source of a conversion against the checksums in its files."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from rankless.conversion.tensor_filter import Key
from rankless.engine.integrity.range_verification import find_corrupt_ranges
from rankless.engine.integrity.read_crcs import CrcPiece
from rankless.formats.file_checksums import find_file_checksums
from rankless.formats.reader import Reader
from rankless.ondisk.range_checksums import RangeChecksum


def find_source_checksums(reader: Reader, keys: Collection[Key]) -> list[RangeChecksum]:
    """Return the sorted checksums in the files that cover these tensors. rankless's own files have none.

    Raises ``CorruptCheckpointError`` if they cannot be read.
    """
    checksums = find_file_checksums([] if all(reader.block_crcs(*key) is not None for key in keys) else reader.files)
    for error in checksums.errors:
        raise error
    wanted: set[int] = set()
    for group, name in keys:
        extents = reader.find_extents(group, name, 0, reader.groups[group][name].nbytes)
        wanted.update(checksums.find_covering(extents) or ())
    return [checksums.sums[number] for number in sorted(wanted)]


def check_ranges(checksums: Sequence[RangeChecksum], pieces: Sequence[CrcPiece] = ()) -> None:
    """Compare ranges with their checksums. Bytes that are in no piece are read.

    A checksum covers a whole storage or record, of which a conversion may read only some bytes. Raises
    ``CorruptCheckpointError``.
    """
    _raise_first(find_corrupt_ranges(checksums, pieces).values())


def check_file_checksums(files: Sequence[Path]) -> None:
    """Compare whole files with the checksums in them. Raises ``CorruptCheckpointError``."""
    checksums = find_file_checksums(files)
    _raise_first([*checksums.errors, *find_corrupt_ranges(checksums.sums).values()])


def _raise_first(errors: Collection[Exception]) -> None:
    for error in errors:
        raise error
