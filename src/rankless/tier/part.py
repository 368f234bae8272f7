"""A part: the bytes of a generation that one rank has staged, as ranges of the final files, and the table of them.

A *generation* is a checkpoint in the local tier. Any set of parts with one id that covers all files is a checkpoint,
wherever the parts are. The table says, for each range, the tensor and the file that it belongs to, its offset in the
file with the bytes of the part, and its CRC. Ranges end at the blocks of their tensor, so the CRCs combine into the
CRCs of the blocks.

Each rank of a save writes the table of its part in the vote "completing the local checkpoint"
(:mod:`rankless.save.tier_stage`), the tables of copies in "copying to other hosts"
(:mod:`rankless.tier.copies_on_hosts`), and the table of a parity in "computing parity" (:mod:`rankless.tier.parity`).
:mod:`rankless.tier.rebuild` writes them for computed parts, and :mod:`rankless.tier.parts_in_run` and
:mod:`rankless.tier.parts_in_store` for parts in the run. Loads, drains and commands read them, also in later jobs. The
columns of a row, the fields of ``_Header`` and :class:`ParityTable`, and their order are on disks: with other ones,
raise :data:`VERSION`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from rankless.engine.io.column_tables import decode_rows, encode_rows
from rankless.engine.io.requests import Fragments
from rankless.engine.plan.file_ranges import FileRange, split_at_blocks
from rankless.errors import CorruptCheckpointError
from rankless.ondisk.block_crcs import Fragment, crc64
from rankless.ondisk.manifest import Count
from rankless.process.prepared_types import prepared
from rankless.process.worker_threads import run_in_threads
from rankless.storage.aligned_memory import Bytes
from rankless.tier.part_names import PartName, parse_part_name

#: The version of the files in the local tier. They do not outlive a job for long, so there is no other version to read.
VERSION = 1

_ROW = np.dtype(
    [
        ("tensor", "<u4"),
        ("start", "<u8"),
        ("stop", "<u8"),
        ("local", "<u8"),
        ("file", "<u4"),
        ("offset", "<u8"),
        ("crc", "<u8"),
    ]
)

_CRC_BYTES = 8

#: The name of a file with the bytes of a part.
_DATA_NAME = re.compile(r"[^/\0]+\.data")


class PartRows(NamedTuple):
    """The ranges of a part as columns. ``local`` is the offset in the file with the bytes of the part."""

    tensor: NDArray[np.uint32]
    start: NDArray[np.uint64]
    stop: NDArray[np.uint64]
    local: NDArray[np.uint64]
    file: NDArray[np.uint32]
    offset: NDArray[np.uint64]
    crc: NDArray[np.uint64]

    @classmethod
    def from_ranges(cls, hashed: Sequence[tuple[FileRange, int]]) -> Self:
        """Return the rows of file ranges with their CRCs."""
        rows = np.array(
            [(r.tensor, r.start, r.stop, r.local, r.file, r.offset, crc) for r, crc in hashed],
            dtype=_ROW,
        )
        return cls(*decode_rows([rows.tobytes()], _ROW))

    def are_within(self, nbytes: int) -> bool:
        """Return whether all ranges are in the first ``nbytes`` bytes of the file with the bytes of the part."""
        lengths = self.stop - self.start  # of unsigned numbers, which are not below 0
        is_valid = (self.start <= self.stop) & (lengths <= nbytes)
        return bool((is_valid & (self.local <= nbytes - np.minimum(lengths, np.uint64(nbytes)))).all())

    def iter_ranges(self) -> Iterator[tuple[FileRange, int]]:
        """Yield each range with its CRC."""
        for tensor, start, stop, local, file, offset, crc in zip(*(c.tolist() for c in self), strict=True):
            yield FileRange(tensor, start, stop, local, file, offset), crc

    def to_fragments(self) -> Fragments:
        """Return the fragments by tensor."""
        fragments: Fragments = {}
        for file_range, crc in self.iter_ranges():
            fragments.setdefault(file_range.tensor, []).append(Fragment(file_range.start, file_range.stop, crc))
        return fragments


@prepared
class _Header(msgspec.Struct, frozen=True, array_like=True):
    version: int
    name: str
    data: str
    nbytes: Count
    rows: bytes


@prepared
class PartTable(NamedTuple):
    """The table of a part. ``data`` is the name of the file with its ``nbytes`` bytes."""

    name: PartName
    data: str
    nbytes: int
    rows: PartRows

    def encode(self) -> bytes:
        """Return the bytes of the table's file, which end in their CRC."""
        return encode_checked(_Header(VERSION, self.name.name, self.data, self.nbytes, encode_rows(self.rows, _ROW)))

    @classmethod
    def decode(cls, raw: bytes, file: str) -> Self:
        """Parse and check the bytes of :meth:`encode`. Raises ``CorruptCheckpointError`` naming ``file``."""
        header = decode_checked(raw, _Header, file)
        name = parse_part_name(header.name)
        is_named = name is not None and _DATA_NAME.fullmatch(header.data) is not None
        if name is None or not is_named or header.version != VERSION or len(header.rows) % _ROW.itemsize:
            raise CorruptCheckpointError(f"{file} is corrupt, or another version of rankless wrote it")
        table = cls(name, header.data, header.nbytes, PartRows(*decode_rows([header.rows], _ROW)))
        if not table.rows.are_within(header.nbytes):
            raise CorruptCheckpointError(f"{file} is corrupt: a range ends after the bytes of the part")
        return table


@prepared
class ParityTable(msgspec.Struct, frozen=True, array_like=True):
    """A parity on one host, kept by ``member`` of a group. ``data`` is the name of the file with its ``chunk`` bytes.

    ``tables`` are the encoded tables of the parts of all members, ``crc`` is the CRC of the bytes.
    """

    member: int
    tables: list[bytes]
    chunk: int
    data: str
    crc: int

    @property
    def members(self) -> list[PartTable]:
        """The tables of the parts of all members."""
        return [PartTable.decode(raw, "a table of the local tier") for raw in self.tables]


def hash_ranges(file_ranges: Iterable[FileRange], memory: Bytes) -> PartRows:
    """Hash staged ranges. Their ``local`` is the offset in ``memory``."""
    ranges = [part for file_range in file_ranges for part in split_at_blocks(file_range)]
    crcs = run_in_threads(lambda r: crc64(memory[r.local : r.local + r.stop - r.start]), ranges)
    return PartRows.from_ranges(list(zip(ranges, crcs, strict=True)))


def find_corrupt_ranges(table: PartTable, memory: Bytes) -> list[FileRange]:
    """Return the ranges of a part with other bytes than were staged."""

    def compare(item: tuple[FileRange, int]) -> FileRange | None:
        file_range, crc = item
        stored = memory[file_range.local : file_range.local + file_range.stop - file_range.start]
        is_intact = crc64(stored) == crc or crc64(stored.copy()) == crc  # a second read, into another buffer
        return None if is_intact else file_range

    return [found for found in run_in_threads(compare, list(table.rows.iter_ranges())) if found]


def find_corrupt_range(table: PartTable, memory: Bytes) -> FileRange | None:
    """Return the first range of a part with other bytes than were staged, or ``None`` if all are intact."""
    return next(iter(find_corrupt_ranges(table, memory)), None)


def encode_checked(value: Any) -> bytes:
    """Encode a value with a CRC at the end."""
    body = msgspec.msgpack.encode(value)
    return body + crc64(body).to_bytes(_CRC_BYTES, "little")


def decode_checked(raw: bytes, kind: Any, file: str) -> Any:
    """Decode the bytes of :func:`encode_checked`. Raises ``CorruptCheckpointError`` naming ``file``."""
    body, crc = raw[:-_CRC_BYTES], int.from_bytes(raw[-_CRC_BYTES:], "little")
    if crc64(body) != crc:
        raise CorruptCheckpointError(f"{file} is corrupt")
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise CorruptCheckpointError(f"{file} is corrupt: {error}") from error
