"""The directory of a zip file whose entries are not compressed, so that their bytes can be read where they lie.

Source: PKWARE's APPNOTE.TXT 6.3.10, as miniz writes it for torch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from holdfast.errors import CorruptCheckpointError, FormatError

#: The most bytes of a directory or of a small entry, and what is read at first of the end of a file.
_LIMIT, _TAIL = 2**30, 4096

_END, _END64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_ENTRY, _LOCAL = struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s5H3L2H")
_WIDE, _NONE = 0xFFFFFFFF, 0xFFFF

#: What follows an entry's name: pairs of a kind and a size; the kind that has sizes of more than 32 bits.
_EXTRA, _EXTRA64 = struct.Struct("<2H"), 1


#: What to do about pickles that would run code: in files of ``torch.save``.
TORCH_LOAD = "If you trust who wrote it, load it with torch.load(weights_only=False), and save it again without that"


class RangeReader(Protocol):
    """Reads bytes of files."""

    def read(self, path: Path, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset`` bytes on."""


@dataclass(frozen=True, slots=True)
class FileWindow:
    """Part of a file: a whole one, or one of several that lie in it one after another.

    ``advice`` is what to do about a pickle in it that would run code.
    """

    path: Path
    start: int
    size: int
    readers: RangeReader
    advice: str = TORCH_LOAD

    @property
    def label(self) -> str:
        """What it is called in messages."""
        return str(self.path) if self.start == 0 else f"{self.path} (from byte {self.start} on)"

    def read(self, offset: int, size: int) -> bytes:
        """Some bytes of it. Raises ``CorruptCheckpointError`` where there are not so many."""
        if not 0 <= offset <= offset + size <= self.size:
            raise CorruptCheckpointError(
                f"{self.label} is damaged or cut short: it names bytes {offset} to {offset + size}"
            )
        found = bytearray(size)
        self.readers.read(self.path, self.start + offset, memoryview(found))
        return bytes(found)


@dataclass(frozen=True, slots=True)
class ZipMember:
    """One entry: where its header is in the window, its size in bytes, and its CRC-32, 0 where none was written."""

    name: str
    header: int
    size: int
    crc: int
    is_compressed: bool

    def data(self, window: FileWindow) -> int:
        """Where its bytes start in the window. Raises ``CorruptCheckpointError`` where its header is not the directory's.

        Raises ``FormatError`` where the bytes are compressed.
        """
        if self.is_compressed:
            raise FormatError(
                f"{window.label}: its entry {self.name!r} is compressed, which no file of torch.save is; load it with "
                "torch.load, and save it again"
            )
        raw = window.read(self.header, _LOCAL.size)
        magic, _, _, method, *_, name, extra = _LOCAL.unpack(raw)
        start: int = self.header + _LOCAL.size + name + extra
        if magic != b"PK\3\4" or method or start + self.size > window.size:
            raise _damaged(window, f"the header of {self.name!r} is not what its directory says")
        return start


def is_zip(window: FileWindow) -> bool:
    """Whether it begins as a zip file does."""
    return window.size >= _LOCAL.size and window.read(0, 4) == b"PK\3\4"


def read_members(window: FileWindow) -> Mapping[str, ZipMember]:
    """The entries by name. Raises ``CorruptCheckpointError``."""
    number, size, start = _end(window)
    if size > _LIMIT or number * _ENTRY.size > size:
        raise _damaged(window, f"its directory of {size} bytes cannot have {number} entries")
    found: dict[str, ZipMember] = {}
    for entry in _parse(window.read(start, size), number, window):
        if entry.name in found:
            raise _damaged(window, f"two of its entries are called {entry.name!r}")
        if not entry.is_compressed and entry.header + _LOCAL.size + entry.size > window.size:
            raise _damaged(window, f"its entry {entry.name!r} of {entry.size} bytes ends outside of it")
        found[entry.name] = entry
    return found


def _end(window: FileWindow) -> tuple[int, int, int]:
    """How many entries there are, and the size of the directory and where it starts."""
    tail = window.read(max(0, window.size - _TAIL), min(window.size, _TAIL))
    at = tail.rfind(b"PK\5\6")
    if at < 0 or len(tail) - at < _END.size:
        raise _damaged(window, "it has no directory at its end")
    _, *_, number, size, start, _ = _END.unpack_from(tail, at)
    if at >= _LOCATOR.size and tail[at - _LOCATOR.size : at - _LOCATOR.size + 4] == b"PK\6\7":
        _, _, place, _ = _LOCATOR.unpack_from(tail, at - _LOCATOR.size)
        magic, *_, number, size, start = _END64.unpack(window.read(place, _END64.size))
        if magic != b"PK\6\6":
            raise _damaged(window, "its directory is not where it says")
    return number, size, start


def _parse(raw: bytes, number: int, window: FileWindow) -> Iterator[ZipMember]:
    at = 0
    for _ in range(number):
        if at + _ENTRY.size > len(raw):
            raise _damaged(window, "its directory ends inside an entry")
        magic, _, _, _, method, _, _, crc, packed, size, *lengths, _, _, _, header = _ENTRY.unpack_from(raw, at)
        name, extra, comment = lengths
        start = at + _ENTRY.size
        at = start + name + extra + comment
        if magic != b"PK\1\2" or at > len(raw):
            raise _damaged(window, "its directory is none")
        text = _name(raw[start : start + name], window)
        size, packed, header = _wide(raw[start + name : start + name + extra], size, packed, header)
        yield ZipMember(text, header, size, crc, bool(method) or size != packed)


def _wide(extra: bytes, *numbers: int) -> list[int]:
    """Size, packed size and offset; those that do not fit into 32 bits are in an extra field, in this order."""
    values = _values64(extra)
    return [next(values, number) if number == _WIDE else number for number in numbers]


def _values64(extra: bytes) -> Iterator[int]:
    at = 0
    while at + _EXTRA.size <= len(extra):
        kind, size = _EXTRA.unpack_from(extra, at)
        at += _EXTRA.size
        if kind == _EXTRA64:
            whole = min(size, len(extra) - at) // 8 * 8
            yield from (value for (value,) in struct.iter_unpack("<Q", extra[at : at + whole]))
            return
        at += size


def _name(raw: bytes, window: FileWindow) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise _damaged(window, f"the name of an entry is no text: {error}") from error


def _damaged(window: FileWindow, why: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{window.label} is damaged or cut short: {why}")
