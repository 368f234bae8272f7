"""Verification of the source of a conversion against the checksums in its files.

:mod:`rankless.conversion.pipeline` finds them on each rank in the vote "reading the source's checksums", and compares
on rank 0 in the decision of the vote on the writing. The converters to NxD verify in one process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from rankless.conversion.tensor_filter import Key
from rankless.engine.integrity.range_verification import find_corrupt_ranges
from rankless.engine.integrity.read_crcs import CrcPiece
from rankless.formats.edited_reader import EditedReader
from rankless.formats.file_checksums import FileChecksums, find_file_checksums
from rankless.formats.reader import Reader
from rankless.formats.remapped_reader import find_mappings, underlying_reader
from rankless.ondisk.block_crcs import block_range
from rankless.ondisk.range_checksums import RangeChecksum


def find_source_checksums(reader: Reader, keys: Collection[Key]) -> list[RangeChecksum]:
    """Return the sorted checksums in the files that cover these tensors. Tensors with CRCs of their own are left out.

    Raises ``CorruptCheckpointError`` if they cannot be read.
    """
    if isinstance(reader, EditedReader):
        inputs: dict[Reader, list[Key]] = {}
        for stored, own_key in {pair for key in keys for pair in reader.input_keys(*key)}:
            inputs.setdefault(stored, []).append(own_key)
        return sorted(found for stored, own in inputs.items() for found in find_source_checksums(stored, own))
    joined = [key for key in keys if reader.block_crcs(*key) is None]
    blocks = list(_list_blocks(reader, joined))
    checksums = FileChecksums(sorted({*blocks}), []) if blocks else find_file_checksums(reader.files if joined else [])
    for error in checksums.errors:
        raise error
    wanted: set[int] = set()
    for group, name in keys:
        extents = reader.find_extents(group, name, 0, reader.groups[group][name].nbytes)
        wanted.update(checksums.find_covering(extents) or ())
    return [checksums.sums[number] for number in sorted(wanted)]


def _list_blocks(reader: Reader, keys: Collection[Key]) -> Iterator[RangeChecksum]:
    """Yield the blocks with CRCs of the stored tensors that tensors without CRCs of their own consist of."""
    inner = underlying_reader(reader)
    mappings = find_mappings(reader, keys) if inner is not reader else {}
    for group, name in {(group, name) for (group, _), mapping in mappings.items() for name in mapping.names}:
        for block, crc in enumerate(inner.block_crcs(group, name) or ()):
            start, stop = block_range(block, inner.groups[group][name].nbytes)
            for file, offset, first, last in inner.find_extents(group, name, start, stop):
                if isinstance(file, Path):
                    yield RangeChecksum(file, offset, offset + last - first, crc, "CRC-64", f"{group} tensor {name!r}")


def check_ranges(checksums: Sequence[RangeChecksum], pieces: Sequence[CrcPiece] = ()) -> None:
    """Compare ranges with their checksums. Bytes that are in no piece are read.

    A checksum covers a whole storage or record. A conversion may read only some bytes of it. Raises
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
