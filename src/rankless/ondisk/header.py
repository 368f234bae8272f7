"""The header of a safetensors file: 8 bytes of length, then JSON, then spaces up to the data.

Source: the safetensors format, https://github.com/huggingface/safetensors. Its invariants are
checked in full: tensors tile the data area, without holes or overlaps, to its last byte.

A save encodes headers on rank 0 in its commit (:mod:`rankless.ondisk.data_files`); every rank of a load decodes the
headers of all files (:mod:`rankless.formats.safetensors`). The bytes are a part of the format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from rankless.errors import CorruptCheckpointError, FormatError
from rankless.ondisk import strict_json
from rankless.ondisk.dtypes import PACKED_BITS, count_bytes_of_rows, count_values_of_rows, dtype_width
from rankless.process.prepared_types import prepared

#: In files that rankless writes, the data starts at a multiple of this many bytes, so that direct I/O can move it.
ALIGNMENT = 4096

#: The largest header that the format allows, in bytes.
HEADER_LIMIT = 100_000_000

LENGTH_BYTES = 8

#: The most dimensions of a tensor, and the most bytes: NumPy's and torch's limits.
DIMENSIONS, LARGEST = 64, 2**63 - 1

_Size = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]


@prepared
class HeaderEntry(msgspec.Struct, frozen=True):
    """One tensor of a file: dtype, shape in elements, and its byte range within the data area."""

    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return self.data_offsets[1] - self.data_offsets[0]


class SafetensorsHeader(msgspec.Struct, frozen=True):
    """A parsed header. ``size`` is the offset of the data area in the file, in bytes."""

    entries: dict[str, HeaderEntry]
    metadata: dict[str, str]
    size: int


def encode_header(entries: Mapping[str, HeaderEntry], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a file before its data, padded to :data:`ALIGNMENT`."""
    packed = {
        name: msgspec.structs.replace(entry, shape=count_values_of_rows(entry.dtype, entry.shape))
        for name, entry in entries.items()
        if entry.dtype in PACKED_BITS
    }
    text = msgspec.json.encode({"__metadata__": dict(metadata), **entries, **packed})
    size = -(-(LENGTH_BYTES + len(text)) // ALIGNMENT) * ALIGNMENT
    return (size - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little") + text.ljust(size - LENGTH_BYTES)


def header_length(prefix: bytes, file_size: int, file: str) -> int:
    """Return the offset in bytes of the data of ``file``, from the file's first 8 bytes.

    Raises ``CorruptCheckpointError`` if the offset is impossible, before any memory is allocated for the header.
    """
    if len(prefix) < LENGTH_BYTES:
        raise CorruptCheckpointError(f"{file} is {file_size} bytes, too short for a safetensors file")
    size = int.from_bytes(prefix, "little") + LENGTH_BYTES
    if size > min(file_size, HEADER_LIMIT + LENGTH_BYTES):
        raise CorruptCheckpointError(
            f"the header of {file} claims {size} bytes, but the file has {file_size}: it is corrupt or truncated"
        )
    return size


def decode_header(raw: bytes, file_size: int, file: str) -> SafetensorsHeader:
    """Parse and check the bytes before the data of ``file``. Raises ``CorruptCheckpointError`` naming it."""
    parsed = strict_json.parse_json(raw[LENGTH_BYTES:], f"the header of {file}")
    try:
        table = msgspec.convert(parsed, dict[str, Any])
        metadata = msgspec.convert(table.pop("__metadata__", {}), dict[str, str])
        entries = msgspec.convert(table, dict[str, HeaderEntry])
    except msgspec.ValidationError as error:
        raise CorruptCheckpointError(f"the header of {file} is corrupt: {error}") from error
    entries |= {name: _unpack(entry, name, file) for name, entry in entries.items() if entry.dtype in PACKED_BITS}
    _check_tiling(entries, file_size - len(raw), file)
    return SafetensorsHeader(entries, metadata, len(raw))


def _unpack(entry: HeaderEntry, name: str, file: str) -> HeaderEntry:
    """Return an entry with the shape in elements."""
    try:
        return msgspec.structs.replace(entry, shape=count_bytes_of_rows(entry.dtype, entry.shape))
    except FormatError as error:
        raise FormatError(f"{file}: tensor {name!r}: {error}") from None


def _check_tiling(entries: Mapping[str, HeaderEntry], data_size: int, file: str) -> None:
    """Raise ``CorruptCheckpointError`` if the tensors do not tile the data area exactly."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, stop = entry.data_offsets
        if start != end or stop < start:
            raise CorruptCheckpointError(
                f"{file}: tensor {name!r} at bytes {start} to {stop} leaves a gap or overlaps another"
            )
        if _expected_size(entry, name, file) != stop - start:
            raise CorruptCheckpointError(
                f"{file}: tensor {name!r} has {stop - start} bytes, not those of {entry.dtype} {list(entry.shape)}"
            )
        end = stop
    if end != data_size:
        raise CorruptCheckpointError(
            f"{file}: its tensors end at data byte {end}, but the file at {data_size}: it is corrupt or truncated"
        )


def _expected_size(entry: HeaderEntry, name: str, file: str) -> int:
    """Return the size in bytes of a tensor of the entry's dtype and shape. Raises if no tensor can have them."""
    try:
        size = dtype_width(entry.dtype)
    except FormatError as error:
        raise FormatError(f"{file}: tensor {name!r}: {error}") from None
    numel = math.prod(entry.shape)
    # torch computes strides over an empty dimension as over one of size 1, and they must fit into 64 bits.
    if (numel or math.prod(dim or 1 for dim in entry.shape)) * size > LARGEST:
        raise CorruptCheckpointError(f"{file}: no tensor can have the shape {list(entry.shape)} that {name!r} has")
    return numel * size


def parse_json_object(text: str, subject: str) -> dict[str, object]:
    """Parse a JSON object of a header's metadata. Raises ``CorruptCheckpointError`` naming ``subject``."""
    value = strict_json.parse_json(text.encode(), subject)
    if not isinstance(value, dict):
        raise CorruptCheckpointError(f"{subject} is not a JSON object")
    return value
