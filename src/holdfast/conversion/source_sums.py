"""Comparing the source of a conversion with the checksums that its files have, before anything is written."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from holdfast.conversion.choice import Key
from holdfast.engine.sums import find_damage
from holdfast.formats.reader import Reader
from holdfast.formats.sums import find_sums


def check_sums(reader: Reader, keys: Collection[Key], rank: int = 0, size: int = 1) -> None:
    """Compare what holds these tensors with its checksums; each of ``size`` ranks does its share.

    A checksum is of a whole storage or record, and tensors are read in pieces by several ranks and threads: this reads
    them once more. The blocks of our own files are compared as they are converted. Raises ``DamagedError``.
    """
    found = find_sums([] if all(reader.crcs(*key) is not None for key in keys) else reader.files)
    for error in found.damage:
        raise error
    wanted: set[int] = set()
    for group, name in keys:
        extents = reader.extents(group, name, 0, reader.groups[group][name].nbytes)
        wanted.update(found.covering(extents) or ())
    _raise_first(find_damage([found.sums[number] for number in sorted(wanted)[rank::size]]).values())


def check_file_sums(files: Sequence[Path]) -> None:
    """Compare whole files with the checksums that they have. Raises ``DamagedError``."""
    found = find_sums(files)
    _raise_first([*found.damage, *find_damage(found.sums).values()])


def _raise_first(errors: Collection[Exception]) -> None:
    for error in errors:
        raise error
