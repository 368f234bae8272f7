"""Published versions of a model's weights: the manifest of a version, and the table of a part. Pure.

A *weights directory* has a manifest for each version in ``versions/``. The exclusive creation of a manifest commits the
version. A version may be an *anchor*, a folder as ``save_model`` writes it, and have *deltas*: parts that say how its
model files differ from the files of an older version, the base. The manifest has the headers of its model files, with
the CRCs of their blocks, also if these files were never written. So a reader that puts a version together can prove it.

Rank 0 of a publisher encodes manifests (:mod:`rankless.weights.version_output`), each rank its parts; readers decode
them (:mod:`rankless.formats.weights`). All of it is a part of the format: see ``docs/format.md``.
"""

from __future__ import annotations

import re

import msgspec

from rankless.errors import CorruptCheckpointError, FormatError
from rankless.ondisk import strict_json
from rankless.ondisk.block_crcs import crc64
from rankless.ondisk.header import LENGTH_BYTES, SafetensorsHeader, decode_header
from rankless.ondisk.manifest import LARGEST, Count, Hex64, Step
from rankless.ondisk.validation import check_relative_path
from rankless.process.prepared_types import prepared

FORMAT, VERSION = "rankless-weights", 1

#: The most bytes of a manifest: the headers of a million tensors.
LARGEST_MANIFEST = 2**28

#: The tensors of a part: the table of its ranges, and their streams one after another.
RANGES, DATA = "ranges", "data"

#: The most bytes of a part, and the most parts of a delta.
LARGEST_PART, MOST_PARTS = 2**31, 2**20

#: The most ranges of a part: a writer begins another part then, and a reader refuses more.
MOST_RANGES = 2**17

#: The most spaces after the header of a model file.
_MOST_PADDING = 2**16

_NAME = re.compile(r"([0-9]{20})\.json")

_TAIL = re.compile(rb',"crc64nvme":"([0-9a-f]{16})"}\n\Z')


def manifest_name(number: int) -> str:
    """Return the name of the manifest of a version: its number with 20 digits, so that names sort.

    For example, version 7 has ``00000000000000000007.json``.
    """
    return f"{number:020d}.json"


def number_of_name(name: str) -> int | None:
    """Return the number of a version, given the name of its manifest; ``None`` for other names."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match and int(match[1]) <= LARGEST else None


@prepared
class VersionKey(msgspec.Struct, frozen=True):
    """The identity of a version. Numbers only rise; the id is random, so that two publishers do not mix."""

    number: Count
    id: Hex64

    def __str__(self) -> str:
        return f"{self.number} ({self.id[:8]})"


def anchor_name(key: VersionKey) -> str:
    """Return the name of the folder of an anchor."""
    return f"anchor-{key.number}-{key.id}"


def delta_name(key: VersionKey) -> str:
    """Return the name of the folder of the parts of a version."""
    return f"delta-{key.number}-{key.id}"


class TrainingPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The point of a training when a version was published: its run and incarnation.

    ``checkpoint`` is the id of the checkpoint that the job has begun to save last by then, or else has loaded, and
    ``tag`` its tag.
    """

    run: str
    incarnation: Count
    checkpoint: str = ""
    tag: str = ""


class PublishedFile(msgspec.Struct, frozen=True):
    """A file that a publisher has written: its name in the folder of its version, its size and its CRC."""

    name: str
    size: Count
    crc64nvme: Hex64


class VersionFile(msgspec.Struct, frozen=True):
    """A model file of a version. A delta stores only the header of it.

    ``header`` is the JSON in the file; spaces follow up to ``data_start``. ``crc64nvme`` is the CRC of the whole file.
    """

    name: str
    size: Count
    data_start: Count
    crc64nvme: Hex64
    header: str

    @property
    def header_bytes(self) -> bytes:
        """The bytes of the file before its data."""
        size = self.data_start - LENGTH_BYTES
        return size.to_bytes(LENGTH_BYTES, "little") + self.header.encode().ljust(size)


class Delta(msgspec.Struct, frozen=True):
    """A way from a base to a version: parts with ranges that say which words differ."""

    base: VersionKey
    parts: list[PublishedFile]

    @property
    def nbytes(self) -> int:
        """The size of all parts in bytes."""
        return sum(part.size for part in self.parts)


class Anchor(msgspec.Struct, frozen=True):
    """The newest version by then with written files, and their folder. It has the small files of a delta, too."""

    number: Count
    id: Hex64
    folder: str


@prepared
class VersionManifest(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The manifest of a version without its last member, which is the CRC of all bytes before it.

    ``deltas`` are the ways to it, the way from the version before first, and ``folder`` has their parts; it is empty
    without them. ``anchor`` is the version itself if its files were written. ``files`` are its model files, in order,
    whether or not they were written; ``small_files`` are in the folder of the anchor. Readers ignore members that they
    do not know: a change that a reader must know about increments ``version``.
    """

    format: str
    version: int
    number: Count
    id: Hex64
    time: float
    step: Step | float | None
    metrics: dict[str, float | None]
    training: TrainingPoint | None
    folder: str
    anchor: Anchor
    deltas: list[Delta]
    files: list[VersionFile]
    small_files: list[PublishedFile]

    @property
    def key(self) -> VersionKey:
        """The identity of the version."""
        return VersionKey(self.number, self.id)

    @property
    def is_anchor(self) -> bool:
        """True if the files of the version were written."""
        return self.anchor.id == self.id

    @property
    def nbytes(self) -> int:
        """The size in bytes of the model files, whether or not somebody wrote them."""
        return sum(file.size for file in self.files)

    @property
    def written_bytes(self) -> int:
        """The size in bytes of the files that were written for this version."""
        return sum(delta.nbytes for delta in self.deltas) + (self.anchor_bytes if self.is_anchor else 0)

    @property
    def anchor_bytes(self) -> int:
        """The size in bytes of all files of an anchor."""
        return self.nbytes + sum(file.size for file in self.small_files)

    @property
    def folders(self) -> list[str]:
        """The folders that were written for this version."""
        return [*([self.folder] if self.folder else []), *([self.anchor.folder] if self.is_anchor else [])]


def encode_version(manifest: VersionManifest) -> bytes:
    """Return the bytes of the manifest of a version. Raises ``UnsafeNameError`` if a name leads out of its folder."""
    _check_names(manifest, "the new version")
    body = msgspec.json.encode(manifest).removesuffix(b"}")
    return body + b',"crc64nvme":"%016x"}\n' % crc64(body)


def decode_version(raw: bytes, file: str) -> VersionManifest:
    """Parse and check the manifest of a version.

    Raises ``FormatError`` if it has a newer version or another format, ``UnsafeNameError`` if it names a file that is
    not in its folder, else ``CorruptCheckpointError``.
    """
    tail = _TAIL.search(raw[-64:])
    body = raw[: len(raw) - len(tail[0])] if tail else raw
    if tail is None or crc64(body) != int(tail[1], 16):
        raise CorruptCheckpointError(f"{file} does not end in its CRC: it is corrupt, or no manifest of weights")
    table = strict_json.parse_json(body + b"}", file)
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise FormatError(f"{file} is not a manifest of weights")
    if not isinstance(table.get("version"), int) or table["version"] > VERSION:
        raise FormatError(f"{file} has a newer version than {VERSION}, which this rankless reads: update it")
    try:
        manifest = msgspec.convert(table, VersionManifest)
    except msgspec.ValidationError as error:
        raise CorruptCheckpointError(f"{file} is corrupt: {error}") from error
    _check_names(manifest, file)
    _check_order(manifest, file)
    for model_file in manifest.files:
        _check_padding(model_file, file)
    return manifest


def _check_padding(file: VersionFile, subject: str) -> None:
    """Raise ``CorruptCheckpointError`` unless the header of a model file is its text and a few spaces."""
    used = len(file.header.encode()) + LENGTH_BYTES
    if not used <= file.data_start <= min(file.size, used + _MOST_PADDING):
        raise CorruptCheckpointError(f"{subject} is corrupt: {file.name} has another size than its header says")


def _check_names(manifest: VersionManifest, subject: str) -> None:
    """Raise ``CorruptCheckpointError``, or ``UnsafeNameError``, if a file could belong to another version."""
    names = [*(file.name for file in manifest.files), *(file.name for file in manifest.small_files)]
    parts = [part.name for delta in manifest.deltas for part in delta.parts]
    for name in (*names, *parts):
        check_relative_path(name, subject)
    if len(set(names)) != len(names) or len(set(parts)) != len(parts) or len(parts) > MOST_PARTS:
        raise CorruptCheckpointError(f"{subject} names a file twice, or too many")
    folders = (manifest.folder, manifest.anchor.folder)
    anchor = VersionKey(manifest.anchor.number, manifest.anchor.id)
    if folders != (delta_name(manifest.key) if manifest.deltas else "", anchor_name(anchor)):
        raise CorruptCheckpointError(f"{subject} has folders that are not those of its version")


def _check_order(manifest: VersionManifest, file: str) -> None:
    """Raise ``CorruptCheckpointError`` unless all bases are older, and something leads to the version."""
    anchor = manifest.anchor
    is_older = all(delta.base.number < manifest.number for delta in manifest.deltas)
    is_own = anchor.id == manifest.id and anchor.number == manifest.number
    if not is_older or not (is_own or (anchor.number < manifest.number and manifest.deltas)):
        raise CorruptCheckpointError(f"{file} is corrupt: a version cannot be based on itself or on a newer one")


def decode_model_header(file: VersionFile, subject: str) -> SafetensorsHeader:
    """Return the header of a model file of a version. Raises ``CorruptCheckpointError``."""
    return decode_header(file.header_bytes, file.size, f"{file.name} in {subject}")


#: The columns of the table of a part, one row for each range: words ``[start, start + count)`` of a tensor, and where
#: their streams are. ``tensor`` counts the tensors of a version: its model files in order, and in each of them by the
#: offset of the data. ``offset`` is in bytes of the part's data; streams lie one after another. Rows ascend, and no two
#: overlap. A range is in one block of its tensor.
TENSOR, START, COUNT, ENCODING, CHANGED, OFFSET, FIRST_SIZE = range(7)

#: The numbers of a row.
COLUMNS = FIRST_SIZE + 3

#: The most words of a range: it bounds the memory that a reader takes for one.
MOST_WORDS = 2**21
