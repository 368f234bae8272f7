"""The zip file around a pickle and its storages, as ``torch.save`` writes it, with all offsets known in advance.

So several processes can write the storages in any order. The bytes that depend on their CRCs are written last.
Source: ``caffe2/serialize/inline_container.cc`` of torch 2.13, and the miniz that comes with it.

The writer of the files of NeuronX Distributed lays files out with it, in the process of rank 0
(:mod:`rankless.nxd.writer.rank_file_plan`). torch reads the bytes, so they must keep the form that ``torch.save``
writes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

#: Storages start at multiples of this.
_ALIGNMENT = 64

_LARGE, _MANY, _BITS = 2**32 - 1, 2**16 - 1, 2**64 - 1

#: Flags of an entry: its name is UTF-8; and its size and CRC follow after its data.
_TEXT, _FOLLOWS = 0x0800, 0x0008

_LOCAL, _CENTRAL = struct.Struct("<4s3H2H3L2H"), struct.Struct("<4s4H2H3L5H2L")
_SIZES, _SIZES64 = struct.Struct("<4s3L"), struct.Struct("<4sL2Q")
_END64, _LOCATOR, _END = struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL"), struct.Struct("<4s4H2LH")

_FORMAT, _VERSION = b"1", b"3\n"

#: torch's hash of the names of a file's entries, for files with no storage and with one. For more storages it depends
#: on the order of a C++ hash table, and has to be asked from torch.
NAMES = {0: 2908468677762923104, 1: 15728199511854643026}


class ZipEntry(NamedTuple):
    """An entry of the file: the offset of its header, the offset of its bytes, and its size in bytes."""

    name: str
    header: int
    start: int
    size: int


@dataclass(frozen=True)
class ZipFrame:
    """The layout of a file before it is written.

    Args:
        root: The file's name without its extension.
        pickle: The pickle of the tree.
        storages: The sizes of the storages, in bytes.
        names: torch's hash of the names of the entries, see :data:`NAMES`.
    """

    root: str
    pickle: bytes
    storages: Sequence[int]
    names: int

    @cached_property
    def _entry_data(self) -> dict[str, bytes | None]:
        """The contents of each entry, or ``None`` if they are not known in advance."""
        return {
            "data.pkl": self.pickle,
            ".format_version": _FORMAT,
            ".storage_alignment": str(_ALIGNMENT).encode(),
            "byteorder": b"little",
            **{f"data/{number}": None for number in range(len(self.storages))},
            "version": _VERSION,
            ".data/serialization_id": None,
        }

    @cached_property
    def entries(self) -> Sequence[ZipEntry]:
        """All entries, in the order of the file."""
        entries, at = [], 0
        sizes = iter((*self.storages, 40))
        for name, data in self._entry_data.items():
            size = next(sizes) if data is None else len(data)
            start = at + len(_local_header(at, self._full_name(name), size))
            entries.append(ZipEntry(name, at, start, size))
            at = start + size + len(_data_descriptor(at, size, 0))
        return entries

    @property
    def _directory_offset(self) -> int:
        last = self.entries[-1]
        return last.start + last.size + len(_data_descriptor(last.header, last.size, 0))

    @cached_property
    def storage_offsets(self) -> Sequence[int]:
        """The offset of each storage in the file."""
        return [entry.start for entry in self.entries if entry.name.startswith("data/")]

    @cached_property
    def size(self) -> int:
        """The size of the file, in bytes."""
        return self._directory_offset + len(self._directory_bytes({entry.name: 0 for entry in self.entries}))

    def non_tensor_bytes(self, crcs: Mapping[int, int]) -> Iterator[tuple[int, bytes]]:
        """Yield all bytes but the storages, with their offsets. ``crcs``: the CRC-32 of each storage by its number."""
        entry_crcs = {name: zlib.crc32(data) for name, data in self._entry_data.items() if data is not None}
        entry_crcs |= {f"data/{number}": crc for number, crc in crcs.items()}
        contents = {**self._entry_data, ".data/serialization_id": self._serialization_id(entry_crcs)}
        for name, header, start, size in self.entries:
            data = contents[name]
            entry_crcs.setdefault(name, zlib.crc32(data or b""))
            yield header, _local_header(header, self._full_name(name), size) + (data or b"")
            yield start + size, _data_descriptor(header, size, entry_crcs[name])
        yield self._directory_offset, self._directory_bytes(entry_crcs)

    def _full_name(self, name: str) -> bytes:
        return f"{self.root}/{name}".encode()

    def _serialization_id(self, crcs: Mapping[str, int]) -> bytes:
        """Return torch's id of the file: a hash of the names and the contents of its entries."""
        combined = 0
        for entry in (entry for entry in self.entries[:-1] if entry.size):
            combined ^= (crcs[entry.name] + 0x9E3779B9 + (combined << 6) + (combined >> 2)) & _BITS
        return f"{self.names:020}{combined:020}".encode()

    def _directory_bytes(self, crcs: Mapping[str, int]) -> bytes:
        rows = b"".join(
            _directory_entry(entry, self._full_name(entry.name), crcs[entry.name]) for entry in self.entries
        )
        number, size, start = len(self.entries), len(rows), self._directory_offset
        end64 = _END64.pack(b"PK\6\6", _END64.size - 12, 0x031E, 45, 0, 0, number, number, size, start)
        locator = _LOCATOR.pack(b"PK\6\7", 0, start + size, 1)
        few, small = min(number, _MANY), min(size, _LARGE)
        return rows + end64 + locator + _END.pack(b"PK\5\6", 0, 0, few, few, small, min(start, _LARGE), 0)


def _entry_flags(size: int) -> int:
    return _TEXT | (_FOLLOWS if size else 0)


def _zip64_extra(at: int, size: int) -> bytes:
    """Return the extra field for numbers of more than 32 bits."""
    numbers = (size, size) if size >= _LARGE else ()
    numbers = (*numbers, at) if at >= _LARGE else numbers
    return struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""


def _local_header(at: int, name: bytes, size: int) -> bytes:
    """Return the header of an entry, padded so that the entry's bytes are aligned."""
    wide = _zip64_extra(at, size)
    padding = -(at + _LOCAL.size + len(name) + len(wide) + 4) % _ALIGNMENT
    extra = wide + b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    return _LOCAL.pack(b"PK\3\4", 0, _entry_flags(size), 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra


def _data_descriptor(at: int, size: int, crc: int) -> bytes:
    """Return the CRC and the size that follow the bytes of an entry; none if it is empty."""
    if not size:
        return b""
    return (_SIZES64 if _zip64_extra(at, size) else _SIZES).pack(b"PK\7\10", crc, size, size)


def _directory_entry(entry: ZipEntry, name: bytes, crc: int) -> bytes:
    wide, small = _zip64_extra(entry.header, entry.size), min(entry.size, _LARGE)
    places = (len(name), len(wide), 0, 0, 0, 0, min(entry.header, _LARGE))
    return _CENTRAL.pack(b"PK\1\2", 0, 0, _entry_flags(entry.size), 0, 0, 0, crc, small, small, *places) + name + wide
