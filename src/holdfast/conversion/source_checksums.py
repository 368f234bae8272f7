"""Verification of the source of a conversion against the checksums in its files, before anything is written."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from holdfast.conversion.tensor_filter import Key
from holdfast.engine.integrity.file_checksums import find_corrupt_ranges
from holdfast.formats.file_checksums import find_file_checksums
from holdfast.formats.reader import Reader


def check_source_checksums(reader: Reader, keys: Collection[Key], rank: int = 0, size: int = 1) -> None:
    """Compare the storages of these tensors with their checksums. Each of ``size`` ranks checks its share.

    A checksum covers a whole storage or record, but the conversion reads tensors in ranges by several ranks and
    threads. Therefore, this reads them once more. The blocks of holdfast's own files are checked as they are converted.
    Raises ``CorruptCheckpointError``.
    """
    checksums = find_file_checksums([] if all(reader.block_crcs(*key) is not None for key in keys) else reader.files)
    for error in checksums.errors:
        raise error
    wanted: set[int] = set()
    for group, name in keys:
        extents = reader.find_extents(group, name, 0, reader.groups[group][name].nbytes)
        wanted.update(checksums.find_covering(extents) or ())
    _raise_first(find_corrupt_ranges([checksums.sums[number] for number in sorted(wanted)[rank::size]]).values())


def check_file_checksums(files: Sequence[Path]) -> None:
    """Compare whole files with the checksums in them. Raises ``CorruptCheckpointError``."""
    checksums = find_file_checksums(files)
    _raise_first([*checksums.errors, *find_corrupt_ranges(checksums.sums).values()])


def _raise_first(errors: Collection[Exception]) -> None:
    for error in errors:
        raise error
