"""The interface of a format that conversions write: its files, the layout of tensors in them, and all other content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from holdfast.conversion.carried_values import CarriedValues
from holdfast.conversion.tensor_filter import Key, SelectedTensors
from holdfast.engine.io.requests import Fragments
from holdfast.formats.reader import Reader
from holdfast.ondisk.files import TensorInfo
from holdfast.storage.directories import DirectoryLock, check_space, create_locked


@dataclass(frozen=True)
class ConversionSource:
    """The tensors and values of a source to be written. ``limit``: the maximum bytes of tensors in one file."""

    reader: Reader
    selected: SelectedTensors
    carried: CarriedValues
    limit: int

    @property
    def tensor_infos(self) -> dict[Key, TensorInfo]:
        """All tensors, including the in-memory arrays of values."""
        return {**self.selected.infos, **self.carried.array_infos()}


class FileSpan(NamedTuple):
    """Bytes ``[start, stop)`` of a tensor, which are stored in the file of this number from byte ``offset`` on."""

    file: int
    offset: int
    start: int
    stop: int


@dataclass(frozen=True)
class FileLayout:
    """The files by number, and the spans of each tensor in them. Tensors are in the order of the files."""

    files: Sequence[Path]
    tensors: Mapping[Key, Sequence[FileSpan]]


class ConversionTarget(Protocol):
    """A format that all ranks write into a staging path."""

    def create_files(self) -> None:
        """Create the files at their final sizes. Only rank 0 calls it."""

    def locate_tensors(self) -> FileLayout:
        """Return the layout of the tensors. Every rank calls it after the files are created."""

    def write_metadata(self, fragments: Fragments) -> None:
        """Write all that is not tensor data. Only rank 0 calls it, when all tensors are written.

        ``fragments`` number the tensors in the order of :meth:`locate_tensors`.
        """

    def open_reader(self) -> Reader:
        """Open the finished output. Raises ``CorruptCheckpointError`` if it is not valid."""

    @property
    def output_path(self) -> Path:
        """The path that gets the final name."""

    def close(self) -> None:
        """Release locks. Only rank 0 calls it, after the output got its name or the conversion failed."""


class StagedFolder:
    """A base class of targets that write a folder, which they lock until they are closed."""

    def __init__(self, source: ConversionSource, staging: Path) -> None:
        self._source, self._staging = source, staging
        self._lock: DirectoryLock | None = None

    def _lock_folder(self) -> None:
        """Create and lock the folder. Raises ``StorageError`` if there is not enough space."""
        self._lock = create_locked(self._staging)
        check_space(self._staging, sum(info.nbytes for info in self._source.tensor_infos.values()))

    @property
    def output_path(self) -> Path:
        """See :class:`ConversionTarget`."""
        return self._staging

    def close(self) -> None:
        """See :class:`ConversionTarget`."""
        if self._lock is not None:
            self._lock.close()
