"""Reading the directory of a zip file without compressed entries, so that their bytes can be read in place.

Source: PKWARE's APPNOTE.TXT 6.3.10, as miniz writes it for torch.

:mod:`rankless.formats.torchfile.archive` and the collectors of checksums read directories with it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rankless.errors import CorruptCheckpointError, FormatError

#: The most bytes of a directory or of a small entry; and how many bytes at the end of a file are read to find it.
_LIMIT, _TAIL = 2**30, 4096

_END, _END64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_ENTRY, _LOCAL = struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s5H3L2H")
_WIDE, _NONE = 0xFFFFFFFF, 0xFFFF

#: An extra field after an entry's name: its kind and size; and the kind that has numbers of 64 bits.
_EXTRA, _EXTRA64 = struct.Struct("<2H"), 1


#: Advice in messages about unsafe pickles in files of ``torch.save``.
TORCH_LOAD = "If you trust who wrote it, load it with torch.load(weights_only=False), and save it again without that"


class FileRangeReader(Protocol):
    """A reader of bytes of files."""

    def read(self, path: Path, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes of the file ``path`` from ``offset`` on."""


@dataclass(frozen=True, slots=True)
class FileWindow:
    """A byte range of a file that is read like a file: all of it, or one of several records in it.

    ``advice`` is a sentence for messages about an unsafe pickle in it.
    """

    path: Path
    start: int
    size: int
    readers: FileRangeReader
    advice: str = TORCH_LOAD

    @property
    def label(self) -> str:
        """The name for messages."""
        return str(self.path) if self.start == 0 else f"{self.path} (from byte {self.start} on)"

    def read(self, offset: int, size: int) -> bytes:
        """Return ``size`` bytes from ``offset`` on. Raises ``CorruptCheckpointError`` if there are fewer."""
        if not 0 <= offset <= offset + size <= self.size:
            raise CorruptCheckpointError(
                f"{self.label} is corrupt or truncated: it refers to its bytes {offset} to {offset + size}, but has "
                f"only {self.size}"
            )
        data = bytearray(size)
        self.readers.read(self.path, self.start + offset, memoryview(data))
        return bytes(data)


@dataclass(frozen=True, slots=True)
class ZipMember:
    """An entry of a zip file.

    ``header`` is the offset of its header in the window, ``size`` its size in bytes, ``crc`` its CRC-32 or 0 if none
    was written.
    """

    name: str
    header: int
    size: int
    crc: int
    is_compressed: bool

    def find_data(self, window: FileWindow) -> int:
        """Return the offset of its bytes in the window.

        Raises ``CorruptCheckpointError`` if its header contradicts the directory, ``FormatError`` if it is compressed.
        """
        if self.is_compressed:
            raise FormatError(
                f"{window.label}: its entry {self.name!r} is compressed, which torch.save never does: load it with "
                "torch.load, and save it again"
            )
        raw = window.read(self.header, _LOCAL.size)
        magic, _, _, method, *_, name, extra = _LOCAL.unpack(raw)
        start: int = self.header + _LOCAL.size + name + extra
        if magic != b"PK\3\4" or method or start + self.size > window.size:
            raise _corrupt_error(window, f"the header of its entry {self.name!r} contradicts its directory")
        return start


def is_zip(window: FileWindow) -> bool:
    """Return whether it begins as a zip file does."""
    return window.size >= _LOCAL.size and window.read(0, 4) == b"PK\3\4"


def read_first_name(window: FileWindow) -> str:
    """Return the name of the first entry of a zip file. Raises ``CorruptCheckpointError``."""
    *_, length, _ = _LOCAL.unpack(window.read(0, _LOCAL.size))
    return _decode_name(window.read(_LOCAL.size, length), window)


def read_members(window: FileWindow) -> Mapping[str, ZipMember]:
    """Return the entries by name. Raises ``CorruptCheckpointError``."""
    number, size, start = _find_directory(window)
    if size > _LIMIT or number * _ENTRY.size > size:
        raise _corrupt_error(window, f"its directory of {size} bytes cannot have {number} entries")
    members: dict[str, ZipMember] = {}
    for entry in _iterate_members(window.read(start, size), number, window):
        if entry.name in members:
            raise _corrupt_error(window, f"two of its entries have the name {entry.name!r}")
        if not entry.is_compressed and entry.header + _LOCAL.size + entry.size > window.size:
            raise _corrupt_error(window, f"its entry {entry.name!r} of {entry.size} bytes ends outside of the file")
        members[entry.name] = entry
    return members


def _find_directory(window: FileWindow) -> tuple[int, int, int]:
    """Return the number of entries, and the size and offset of the directory."""
    tail = window.read(max(0, window.size - _TAIL), min(window.size, _TAIL))
    at = tail.rfind(b"PK\5\6")
    if at < 0 or len(tail) - at < _END.size:
        raise _corrupt_error(window, "it has no directory at its end")
    _, *_, number, size, start, _ = _END.unpack_from(tail, at)
    if at >= _LOCATOR.size and tail[at - _LOCATOR.size : at - _LOCATOR.size + 4] == b"PK\6\7":
        _, _, end64_offset, _ = _LOCATOR.unpack_from(tail, at - _LOCATOR.size)
        magic, *_, number, size, start = _END64.unpack(window.read(end64_offset, _END64.size))
        if magic != b"PK\6\6":
            raise _corrupt_error(window, "the 64-bit end record of its directory is missing")
    return number, size, start


def _iterate_members(raw: bytes, number: int, window: FileWindow) -> Iterator[ZipMember]:
    at = 0
    for _ in range(number):
        if at + _ENTRY.size > len(raw):
            raise _corrupt_error(window, "its directory ends inside an entry")
        magic, _, _, _, method, _, _, crc, packed, size, *lengths, _, _, _, header = _ENTRY.unpack_from(raw, at)
        name, extra, comment = lengths
        start = at + _ENTRY.size
        at = start + name + extra + comment
        if magic != b"PK\1\2" or at > len(raw):
            raise _corrupt_error(window, "its directory has an invalid entry")
        text = _decode_name(raw[start : start + name], window)
        size, packed, header = _with_64bit_values(raw[start + name : start + name + extra], size, packed, header)
        yield ZipMember(text, header, size, crc, bool(method) or size != packed)


def _with_64bit_values(extra: bytes, *numbers: int) -> list[int]:
    """Return ``numbers`` (size, packed size, offset). Numbers of more than 32 bits come from the extra field."""
    values = _parse_zip64_extra(extra)
    return [next(values, number) if number == _WIDE else number for number in numbers]


def _parse_zip64_extra(extra: bytes) -> Iterator[int]:
    at = 0
    while at + _EXTRA.size <= len(extra):
        kind, size = _EXTRA.unpack_from(extra, at)
        at += _EXTRA.size
        if kind == _EXTRA64:
            whole = min(size, len(extra) - at) // 8 * 8
            yield from (value for (value,) in struct.iter_unpack("<Q", extra[at : at + whole]))
            return
        at += size


def _decode_name(raw: bytes, window: FileWindow) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise _corrupt_error(window, f"the name of an entry is not UTF-8: {error}") from error


def _corrupt_error(window: FileWindow, why: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{window.label} is corrupt or truncated: {why}")
