"""The zip file around a pickle and its storages, as ``torch.save`` makes it: where all lies, before a byte is written.

Storages may so be written in any order and by anybody; what depends on their CRCs comes last.
Source: ``caffe2/serialize/inline_container.cc`` of torch 2.13, and the miniz that comes with it.
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

#: Names are UTF-8; and where there is data, its size follows it.
_TEXT, _FOLLOWS = 0x0800, 0x0008

_LOCAL, _CENTRAL = struct.Struct("<4s3H2H3L2H"), struct.Struct("<4s4H2H3L5H2L")
_SIZES, _SIZES64 = struct.Struct("<4s3L"), struct.Struct("<4sL2Q")
_END64, _LOCATOR, _END = struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL"), struct.Struct("<4s4H2LH")

_FORMAT, _VERSION = b"1", b"3\n"

#: What torch makes of the names of a file's entries, where it has no storage, and where it has one. It depends on the
#: order in which a hash table of C++ has them; whoever needs it for more asks torch.
NAMES = {0: 2908468677762923104, 1: 15728199511854643026}


class ZipEntry(NamedTuple):
    """An entry of the file: where its header is, where its bytes are, and how many."""

    name: str
    header: int
    start: int
    size: int


@dataclass(frozen=True)
class ZipFrame:
    """A file about to be written. ``root``: its name without the ending; ``storages``: their sizes in bytes.

    ``names``: torch's hash of the names of entries, see :data:`NAMES`.
    """

    root: str
    pickle: bytes
    storages: Sequence[int]
    names: int

    @cached_property
    def _contents(self) -> dict[str, bytes | None]:
        """The entries, with what is in them where that is known."""
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
        found, at = [], 0
        sizes = iter((*self.storages, 40))
        for name, data in self._contents.items():
            size = next(sizes) if data is None else len(data)
            start = at + len(_header(at, self._full(name), size))
            found.append(ZipEntry(name, at, start, size))
            at = start + size + len(_descriptor(at, size, 0))
        return found

    @property
    def _directory(self) -> int:
        last = self.entries[-1]
        return last.start + last.size + len(_descriptor(last.header, last.size, 0))

    @cached_property
    def starts(self) -> Sequence[int]:
        """Where each storage starts in the file."""
        return [entry.start for entry in self.entries if entry.name.startswith("data/")]

    @cached_property
    def size(self) -> int:
        """The size of the file, in bytes."""
        return self._directory + len(self._tail({entry.name: 0 for entry in self.entries}))

    def around(self, crcs: Mapping[int, int]) -> Iterator[tuple[int, bytes]]:
        """All but the storages, given the CRC-32 of each by its number: offsets, and what is written there."""
        known = {name: zlib.crc32(data) for name, data in self._contents.items() if data is not None}
        known |= {f"data/{number}": crc for number, crc in crcs.items()}
        contents = {**self._contents, ".data/serialization_id": self._id(known)}
        for name, header, start, size in self.entries:
            data = contents[name]
            known.setdefault(name, zlib.crc32(data or b""))
            yield header, _header(header, self._full(name), size) + (data or b"")
            yield start + size, _descriptor(header, size, known[name])
        yield self._directory, self._tail(known)

    def _full(self, name: str) -> bytes:
        return f"{self.root}/{name}".encode()

    def _id(self, crcs: Mapping[str, int]) -> bytes:
        """What torch tells files by: their names and contents."""
        combined = 0
        for entry in (entry for entry in self.entries[:-1] if entry.size):
            combined ^= (crcs[entry.name] + 0x9E3779B9 + (combined << 6) + (combined >> 2)) & _BITS
        return f"{self.names:020}{combined:020}".encode()

    def _tail(self, known: Mapping[str, int]) -> bytes:
        rows = b"".join(_row(entry, self._full(entry.name), known[entry.name]) for entry in self.entries)
        number, size, start = len(self.entries), len(rows), self._directory
        end64 = _END64.pack(b"PK\6\6", _END64.size - 12, 0x031E, 45, 0, 0, number, number, size, start)
        locator = _LOCATOR.pack(b"PK\6\7", 0, start + size, 1)
        few, small = min(number, _MANY), min(size, _LARGE)
        return rows + end64 + locator + _END.pack(b"PK\5\6", 0, 0, few, few, small, min(start, _LARGE), 0)


def _flags(size: int) -> int:
    return _TEXT | (_FOLLOWS if size else 0)


def _wide(at: int, size: int) -> bytes:
    """The extra field for numbers of more than 32 bits."""
    numbers = (size, size) if size >= _LARGE else ()
    numbers = (*numbers, at) if at >= _LARGE else numbers
    return struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""


def _header(at: int, name: bytes, size: int) -> bytes:
    """What goes before the bytes of an entry, which it aligns."""
    wide = _wide(at, size)
    padding = -(at + _LOCAL.size + len(name) + len(wide) + 4) % _ALIGNMENT
    extra = wide + b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    return _LOCAL.pack(b"PK\3\4", 0, _flags(size), 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra


def _descriptor(at: int, size: int, crc: int) -> bytes:
    """What goes after them."""
    if not size:
        return b""
    return (_SIZES64 if _wide(at, size) else _SIZES).pack(b"PK\7\10", crc, size, size)


def _row(entry: ZipEntry, name: bytes, crc: int) -> bytes:
    wide, small = _wide(entry.header, entry.size), min(entry.size, _LARGE)
    places = (len(name), len(wide), 0, 0, 0, 0, min(entry.header, _LARGE))
    return _CENTRAL.pack(b"PK\1\2", 0, 0, _flags(entry.size), 0, 0, 0, crc, small, small, *places) + name + wide
