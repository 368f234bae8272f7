"""The hub's protocol: what every format tells of its tensors and values.

A reader parses metadata and moves no tensor data. It answers for any run of a tensor which ranges of which
files hold it, so that whatever a checkpoint's shape, any rank reads just what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from holdfast.engine.io.sources import Source
from holdfast.errors import CheckpointReplacedError, CorruptCheckpointError, FormatError, StorageError
from holdfast.ondisk.files import TensorInfo
from holdfast.ondisk.values import ArrayCodec


class FileExtent(NamedTuple):
    """Bytes ``[start, stop)`` of a tensor lie in ``file``, or what reads like one, from byte ``offset`` on."""

    file: Source
    offset: int
    start: int
    stop: int


class UnreadTensorNote(NamedTuple):
    """What is there and holdfast does not read: a tensor of a group, or with ``is_value`` something among its values.

    ``why`` completes the name: ``is quantized``. Who asks for it gets an error of the type ``error``.
    """

    group: str
    name: str
    why: str
    is_value: bool = False
    error: type[FormatError] = FormatError


@dataclass(frozen=True, slots=True)
class CheckpointValues:
    """The plain values of a checkpoint. A part that was not saved is not in ``shared``.

    ``shared`` has the keys ``optimizer``, ``scheduler``, ``user_content`` and ``model``; ``own`` is what belongs to
    one rank, with the keys ``rng``, ``dataloader`` and ``content``, or ``None`` where that rank did not save.
    ``world_size`` ranks did; ``ranks`` is what each of them had of its own, not decoded yet.
    """

    shared: Mapping[str, Any]
    own: Mapping[str, Any] | None = None
    world_size: int = 0
    ranks: Sequence[Any] = ()


class Reader(Protocol):
    """A checkpoint of some format, open for reading."""

    @property
    def path(self) -> Path:
        """The folder or file."""

    @property
    def format(self) -> str:
        """The format's name, for people."""

    @property
    def fingerprint(self) -> str:
        """Equal on two ranks exactly if they see the same checkpoint."""

    @property
    def groups(self) -> Mapping[str, Mapping[str, TensorInfo]]:
        """The tensors, by group (``"model"``, ``"optimizer"``, …) and name."""

    @property
    def tied(self) -> Mapping[str, Mapping[str, str]]:
        """``{group: {tied name: stored name}}``."""

    @property
    def files(self) -> Sequence[Path]:
        """The files that make it up, but for those that every folder of its format may have besides."""

    @property
    def unread(self) -> Sequence[UnreadTensorNote]:
        """What is there and holdfast does not read."""

    def extents(self, group: str, name: str, start: int, stop: int) -> Sequence[FileExtent]:
        """Where bytes ``[start, stop)`` of a tensor lie, in their order; the same objects each time."""

    def crcs(self, group: str, name: str) -> Sequence[int] | None:
        """The CRC of each block of a tensor; ``None`` in formats without."""

    def values(self, rank: int, shared: ArrayCodec, own: ArrayCodec) -> CheckpointValues:
        """The values, with those of one rank. Tensors in them are in the groups ``state`` and ``ranks``."""

    def check_files(self) -> None:
        """Verify every file that holds no tensor data. Raises ``CorruptCheckpointError`` naming the file."""

    def is_current(self) -> bool:
        """Whether the path still holds the checkpoint that was opened, as far as the format tells one from another."""


def check_read(reader: Reader, wanted: Callable[[UnreadTensorNote], bool]) -> None:
    """Raise ``FormatError``, or one of its kinds, naming the first thing that is wanted and not read."""
    for one in reader.unread:
        if wanted(one):
            kind = "value" if one.is_value else "tensor"
            raise one.error(f"{reader.path}: {one.group} {kind} {one.name!r} {one.why}")


@contextmanager
def detect_replacement(reader: Reader) -> Iterator[None]:
    """What goes wrong where another process has replaced or removed the checkpoint is that, and no damage."""
    try:
        yield
    except (CorruptCheckpointError, StorageError) as error:
        if reader.is_current():
            raise
        raise CheckpointReplacedError(
            f"{reader.path} was replaced or removed while it was read; open it again"
        ) from error
