"""``manifest.json``: the list of a checkpoint's files, checked by a schema, with its own CRC at the end.

The manifest is the commit record: every directory with its final name has one. It names every file
with its size and CRC.

Rank 0 encodes it as the last file of a commit, and all readers decode it first (:mod:`rankless.formats.native`). The
members, and the CRC as the last line, are parts of the format; ``manifest.schema.json`` in the package must be the
result of :func:`manifest_schema`.
"""

from __future__ import annotations

import inspect
import re
from typing import Annotated

import msgspec

from rankless.errors import CorruptCheckpointError, FormatError
from rankless.ondisk import strict_json
from rankless.ondisk.block_crcs import crc64
from rankless.ondisk.validation import check_relative_path
from rankless.process.prepared_types import prepared

NAME = "manifest.json"
VERSION = 1

#: The largest integer that a manifest may have.
LARGEST = 2**63 - 1

#: The length is limited too, because in Python ``$`` also matches before a line break at the end.
Hex64 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$", max_length=16)]
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Step = Annotated[int, msgspec.Meta(ge=-LARGEST, le=LARGEST)]

_TAIL = re.compile(rb',\n  "crc64nvme": "([0-9a-f]{16})"\n}\n\Z')


class FileRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file: its size in bytes and the CRC of all of it. For a data file, also the size and the CRC of its header."""

    size: Count
    crc64nvme: Hex64
    header_size: Count = 0
    header_crc64nvme: Hex64 | None = None


class Provenance(msgspec.Struct, frozen=True):
    """The versions and the world size that wrote the checkpoint. Informational only."""

    rankless: str = ""
    torch: str = ""
    python: str = ""
    world_size: Count = 0


class EditRecord(msgspec.Struct, frozen=True):
    """An edit by which a checkpoint came about: the ids of the checkpoints that were edited, and the recipe as JSON."""

    parents: list[str]
    recipe: str


@prepared
class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of ``manifest.json`` without its last line, which is the CRC of all bytes before it.

    ``sequence`` counts the saves into a run's directory. Together with ``time`` (seconds since 1970) and ``id`` it
    decides which checkpoint is the latest. ``run`` is a random id, chosen at the first save of a run. ``incarnation``
    is the number of the job that saved it, among all jobs of the directory; 0 if that is unknown. ``edits`` are the
    edits that led to the training, oldest first; a training that was never edited has no such member. A metric that was
    not finite is ``None``. Readers ignore members that they do not know: a change that a reader must know about
    increments the version.
    """

    format: str
    version: int
    tag: str
    id: Hex64
    run: Hex64
    incarnation: Count = 0
    sequence: Count
    time: float
    step: Step | float | None
    metrics: dict[str, float | None]
    provenance: Provenance
    files: dict[str, FileRecord]
    edits: list[EditRecord] | msgspec.UnsetType = msgspec.UNSET

    @property
    def nbytes(self) -> int:
        """The total size in bytes of all files that the manifest names."""
        return sum(record.size for record in self.files.values())


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of ``manifest.json``.

    Raises ``UnsafeNameError`` if no reader would accept the name of a file.
    """
    for name in manifest.files:
        check_relative_path(name, "the new checkpoint")
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    body = text.removesuffix(b"\n}")
    return body + b',\n  "crc64nvme": "%016x"\n}\n' % crc64(body)


def has_end(raw: bytes) -> bool:
    """Return whether a manifest has its end, which :func:`encode_manifest` writes: a part of one does not.

    A save asks it about a folder that has the tag: :mod:`rankless.run.interrupted_copy`.
    """
    return _TAIL.search(raw) is not None


def decode_manifest(raw: bytes, file: str) -> Manifest:
    """Parse and check a manifest.

    Raises ``FormatError`` if it has a newer version or another format, else ``CorruptCheckpointError``.
    """
    table = strict_json.parse_json(raw, file)
    tail = _TAIL.search(raw)
    if tail is not None and crc64(raw[: tail.start()]) != int(tail[1], 16):
        raise CorruptCheckpointError(f"{file} does not match its own CRC: it is corrupt")
    if not isinstance(table, dict):
        raise CorruptCheckpointError(f"{file} is corrupt: it is not a JSON object")
    _check_version(table.get("format"), table.get("version"), file)
    if tail is None:
        raise CorruptCheckpointError(f"{file} does not end in its CRC: it is corrupt or truncated")
    del table["crc64nvme"]
    try:
        manifest = msgspec.convert(table, Manifest)
    except msgspec.ValidationError as error:
        raise CorruptCheckpointError(f"{file} is corrupt: {error}") from error
    for name in manifest.files:
        check_relative_path(name, file)
    return manifest


def _check_version(format_name: object, version: object, file: str) -> None:
    number = version if isinstance(version, int) else VERSION
    if format_name != "rankless" or number < 1:
        raise FormatError(f"{file} is not a rankless manifest")
    if number > VERSION:
        raise FormatError(f"{file} has format version {number}, this rankless reads up to {VERSION}: update rankless")


def manifest_schema() -> bytes:
    """Return the JSON Schema of ``manifest.json``, as it is published in the package."""
    schema = msgspec.json.schema(Manifest)
    for definition in schema["$defs"].values():
        # Python 3.13 removes the indentation of docstrings by itself.
        definition["description"] = inspect.cleandoc(definition["description"])
    fields = schema["$defs"]["Manifest"]
    fields["properties"]["crc64nvme"] = {"type": "string", "pattern": "^[0-9a-f]{16}$"}
    fields["required"].append("crc64nvme")
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return msgspec.json.format(msgspec.json.encode(dialect | schema), indent=2) + b"\n"
