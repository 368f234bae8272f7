"""The header of a safetensors file: 8 bytes of length, then JSON, then spaces up to the data.

Source: the safetensors format, https://github.com/huggingface/safetensors. Its invariants are
checked in full: tensors tile the data area, without holes or overlaps, to its last byte.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from holdfast.errors import DamagedError
from holdfast.layout.dtypes import width

#: Data starts at a multiple of this many bytes in files of ours, so that it can be moved by direct I/O.
ALIGNMENT = 4096

#: The largest header that the format allows, in bytes.
LIMIT = 100_000_000

LENGTH = 8


class Entry(msgspec.Struct, frozen=True):
    """One tensor of a file: dtype, shape, and its byte range within the data area."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return self.data_offsets[1] - self.data_offsets[0]


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header. ``size`` is where the data area starts in the file, in bytes."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    size: int


def encode(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a file before its data, padded to :data:`ALIGNMENT`."""
    text = b"".join(_text(entries, metadata))
    size = -(-(LENGTH + len(text)) // ALIGNMENT) * ALIGNMENT
    return (size - LENGTH).to_bytes(LENGTH, "little") + text.ljust(size - LENGTH)


def _text(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> Iterator[bytes]:
    yield b'{"__metadata__":' + msgspec.json.encode(dict(metadata))
    encode_json = msgspec.json.Encoder().encode
    for name, entry in entries.items():
        yield b"," + encode_json(name) + b":" + encode_json(entry)
    yield b"}"


def length(prefix: bytes, file_size: int, file: str) -> int:
    """Where the data of ``file`` starts, from its first 8 bytes; checked before anything is allocated."""
    if len(prefix) < LENGTH:
        raise DamagedError(f"{file} is {file_size} bytes, too short for a safetensors file")
    size = int.from_bytes(prefix, "little") + LENGTH
    if size > min(file_size, LIMIT + LENGTH):
        raise DamagedError(
            f"the header of {file} claims {size} bytes, the file has {file_size}: it is damaged or cut short"
        )
    return size


def decode(raw: bytes, file_size: int, file: str) -> Header:
    """Parse and check the bytes before the data of ``file``. Raises ``DamagedError`` naming it."""
    try:
        table = _DECODE_TABLE(raw[LENGTH:])
        metadata = _DECODE_METADATA(table.pop("__metadata__", msgspec.Raw(b"{}")))
        entries = {name: _DECODE_ENTRY(entry) for name, entry in table.items()}
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise DamagedError(f"the header of {file} is damaged: {error}") from error
    _check(entries, file_size - len(raw), file)
    return Header(entries, metadata, len(raw))


def _check(entries: Mapping[str, Entry], data: int, file: str) -> None:
    reached = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, stop = entry.data_offsets
        if start != reached or stop < start:
            raise DamagedError(f"{file}: tensor {name!r} at bytes {start} to {stop} leaves a hole or overlaps another")
        if min(entry.shape, default=0) < 0 or math.prod(entry.shape) * width(entry.dtype) != stop - start:
            raise DamagedError(
                f"{file}: tensor {name!r} has {stop - start} bytes, not those of {entry.dtype} {list(entry.shape)}"
            )
        reached = stop
    if reached != data:
        raise DamagedError(
            f"{file}: its tensors end at byte {reached} of the data, the file at {data}: it is damaged or cut short"
        )


def parse_json_object(text: str, what: str) -> dict[str, object]:
    """A JSON object out of a header's metadata. Raises ``DamagedError`` naming ``what``."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{what} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DamagedError(f"{what} is not a JSON object")
    return value


_DECODE_TABLE = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_DECODE_METADATA = msgspec.json.Decoder(dict[str, str]).decode
_DECODE_ENTRY = msgspec.json.Decoder(Entry).decode
