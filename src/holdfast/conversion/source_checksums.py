"""Comparing the source of a conversion with the checksums that its files have, before anything is written."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from holdfast.conversion.tensor_filter import Key
from holdfast.engine.integrity.file_checksums import find_corrupt_ranges
from holdfast.formats.file_checksums import find_file_checksums
from holdfast.formats.reader import Reader


def check_source_checksums(reader: Reader, keys: Collection[Key], rank: int = 0, size: int = 1) -> None:
    """Compare what holds these tensors with its checksums; each of ``size`` ranks does its share.

    A checksum is of a whole storage or record, and tensors are read in pieces by several ranks and threads: this reads
    them once more. The blocks of our own files are compared as they are converted. Raises ``CorruptCheckpointError``.
    """
    found = find_file_checksums([] if all(reader.crcs(*key) is not None for key in keys) else reader.files)
    for error in found.damage:
        raise error
    wanted: set[int] = set()
    for group, name in keys:
        extents = reader.extents(group, name, 0, reader.groups[group][name].nbytes)
        wanted.update(found.covering(extents) or ())
    _raise_first(find_corrupt_ranges([found.sums[number] for number in sorted(wanted)[rank::size]]).values())


def check_file_checksums(files: Sequence[Path]) -> None:
    """Compare whole files with the checksums that they have. Raises ``CorruptCheckpointError``."""
    found = find_file_checksums(files)
    _raise_first([*found.damage, *find_corrupt_ranges(found.sums).values()])


def _raise_first(errors: Collection[Exception]) -> None:
    for error in errors:
        raise error
