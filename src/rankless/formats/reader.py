"""The protocol that the reader of every checkpoint format implements.

A reader parses metadata and moves no tensor data. For any byte range of a tensor it returns the file ranges that hold
it, so that each rank reads just the bytes that it needs, however the checkpoint was sharded.

Loads open one reader on each rank, and the readers of all ranks must agree: equal fingerprints, groups, names and order
of extents. Views, conversions and commands open one in their process. Readers lock nothing; who reads asks
:meth:`Reader.is_current` afterwards, or on an error.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from rankless.engine.io.tensor_sources import Source
from rankless.engine.plan.element_ranges import TensorRange
from rankless.engine.plan.file_ranges import FileRange
from rankless.errors import CheckpointReplacedError, CorruptCheckpointError, FormatError, StorageError
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.manifest import EditRecord
from rankless.ondisk.values import ArrayCodec


class FileExtent(NamedTuple):
    """Bytes ``[start, stop)`` of a tensor, stored at ``offset`` in ``file`` or in a source that reads like a file."""

    file: Source
    offset: int
    start: int
    stop: int


class UnreadTensorNote(NamedTuple):
    """A part of a checkpoint that rankless cannot read: a tensor of a group or, with ``is_value``, a value.

    ``why`` completes a sentence that begins with its name: ``is quantized``. Reading it raises ``error``.
    """

    group: str
    name: str
    why: str
    is_value: bool = False
    error: type[FormatError] = FormatError


class CheckpointValues(msgspec.Struct, frozen=True):
    """The plain values of a checkpoint.

    Attributes:
        shared: Values that all ranks share, with the keys ``optimizer``, ``scheduler``, ``user_content`` and ``model``.
            A component that was not saved has no key.
        rank_values: Values of the requested rank, with the keys ``rng``, ``dataloader`` and ``content``; ``None`` if
            that rank saved none.
        world_size: The number of ranks that saved values of their own.
        ranks: The values of each of these ranks, not decoded yet.
    """

    shared: Mapping[str, Any]
    rank_values: Mapping[str, Any] | None = None
    world_size: int = 0
    ranks: Sequence[Any] = ()


class Reader(Protocol):
    """A checkpoint of some format, open for reading."""

    @property
    def path(self) -> Path:
        """The checkpoint's folder or file."""

    @property
    def format(self) -> str:
        """The format's name, for messages."""

    @property
    def fingerprint(self) -> str:
        """A digest that is equal on two ranks exactly if they opened the same checkpoint."""

    @property
    def groups(self) -> Mapping[str, Mapping[str, TensorInfo]]:
        """The tensors, by group (``"model"``, ``"optimizer"``, …) and name."""

    @property
    def tied(self) -> Mapping[str, Mapping[str, str]]:
        """The further names of tied tensors: ``{group: {tied name: stored name}}``."""

    @property
    def files(self) -> Sequence[Path]:
        """The files of the checkpoint, without optional files that any folder of its format may have."""

    @property
    def unread(self) -> Sequence[UnreadTensorNote]:
        """The tensors and values that rankless cannot read."""

    def find_extents(self, group: str, name: str, start: int, stop: int) -> Sequence[FileExtent]:
        """Return the file ranges of bytes ``[start, stop)`` of a tensor, in order, always with the same ``file``."""

    def block_crcs(self, group: str, name: str) -> Sequence[int] | None:
        """Return the CRC of each block of a tensor, or ``None`` if the format has none."""

    def read_values(self, rank: int, shared_codec: ArrayCodec, rank_codec: ArrayCodec) -> CheckpointValues:
        """Return the shared values and ``rank``'s values: their tensors are in the groups ``state`` and ``ranks``."""

    def check_files(self) -> None:
        """Verify every file that holds no tensor data. Raises ``CorruptCheckpointError`` naming the file."""

    def is_current(self) -> bool:
        """Return whether the path still holds the checkpoint that was opened, as far as the format can tell."""


@runtime_checkable
class FamilyReader(Protocol):
    """A reader that knows the family of models: so it can present the names and tensors of transformers."""

    def describe_family(self) -> str:
        """Return the family, where it is known from, and which layouts the checkpoint can be read in."""


@runtime_checkable
class EditedCheckpoint(Protocol):
    """A reader of a checkpoint as an edit changes it: :class:`rankless.formats.edited_reader.EditedReader`."""

    @property
    def original(self) -> Reader:
        """The reader of the checkpoint that was edited; if several were, the one that provides the values."""

    @property
    def edits(self) -> tuple[EditRecord, ...]:
        """The edits by which it came about, oldest first: the edits of the original, and this one."""

    @property
    def reconstructed(self) -> Sequence[str]:
        """The names of values that no stored tensor has."""

    def has_crcs(self, group: str, name: str) -> bool:
        """Return whether all that a tensor is computed from has CRCs."""

    def find_edited_groups(self) -> set[str]:
        """Return the groups that have another tensor than the original."""

    def verify_inputs(self) -> None:
        """Verify all blocks with bytes that computed tensors have read here. Raises ``CorruptCheckpointError``.

        Each rank calls it when it has read its share.
        """


def original_reader(reader: Reader) -> Reader:
    """Return the reader of the checkpoint that was edited; ``reader`` itself if none was."""
    return reader.original if isinstance(reader, EditedCheckpoint) else reader


@runtime_checkable
class DoubtfulReader(Protocol):
    """A reader of a folder with files that may be of different saves, as far as their records can tell."""

    def describe_doubts(self) -> Sequence[str]:
        """Return sentences that name the files and the folder."""


def describe_doubts(reader: Reader) -> Sequence[str]:
    """Return why files of a checkpoint may be of different saves; nothing of a format that has no such files."""
    return reader.describe_doubts() if isinstance(reader, DoubtfulReader) else ()


def find_file_ranges(
    reader: Reader, key: tuple[str, str], tensor_range: TensorRange, files: dict[Source, int]
) -> Iterator[FileRange]:
    """Yield the ranges of files that hold a range of the stored tensor ``key``, its group and name.

    ``local`` counts from the start of the range. A file that is not in ``files`` gets the next number there.

    The view, verifications and the loader of weights read through it; a load numbers files by itself
    (:mod:`rankless.load.rank_reads`).
    """
    number, start, stop = tensor_range
    for extent in reader.find_extents(*key, start, stop):
        file = files.setdefault(extent.file, len(files))
        yield FileRange(number, extent.start, extent.stop, extent.start - start, file, extent.offset)


def check_read(reader: Reader, is_wanted: Callable[[UnreadTensorNote], bool]) -> None:
    """Raise ``FormatError``, or a subclass, naming the first wanted tensor or value that rankless cannot read.

    A load calls it on each rank in the vote "reading the metadata".
    """
    for note in reader.unread:
        if is_wanted(note):
            kind = "value" if note.is_value else "tensor"
            raise note.error(f"{reader.path}: {note.group} {kind} {note.name!r} {note.why}")


def check_current(reader: Reader) -> None:
    """Raise ``CheckpointReplacedError`` if another process has replaced or removed the checkpoint since it was opened.

    Called when all bytes were read that have no CRCs: only this detects that some are of another checkpoint.
    """
    if not reader.is_current():
        raise _replaced_error(reader)


@contextmanager
def detect_replacement(reader: Reader) -> Iterator[None]:
    """Raise ``CheckpointReplacedError`` for a read error if another process replaced or removed the checkpoint.

    Conversions, commands and loads of other formats read inside of it.
    """
    try:
        yield
    except (CorruptCheckpointError, StorageError) as error:
        if reader.is_current():
            raise
        raise _replaced_error(reader) from error


def _replaced_error(reader: Reader) -> CheckpointReplacedError:
    return CheckpointReplacedError(f"{reader.path} was replaced or removed while it was read; open it again")


@contextmanager
def missing_as_corrupt(path: Path) -> Iterator[None]:
    """Raise ``CorruptCheckpointError`` if a file that a manifest names is missing. Readers open files in it."""
    try:
        yield
    except StorageError as error:
        if error.errno not in {errno.ENOENT, errno.ENOTDIR}:
            raise
        raise CorruptCheckpointError(f"{path} is missing; the manifest names it") from error
