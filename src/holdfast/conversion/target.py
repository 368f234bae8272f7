"""What a format that is written must tell and do: its files, where tensors go in them, and all that is no tensor."""

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
    """What is written: tensors and values of a source. ``limit``: the most bytes of tensors in one file."""

    reader: Reader
    chosen: SelectedTensors
    carried: CarriedValues
    limit: int

    @property
    def infos(self) -> dict[Key, TensorInfo]:
        """All tensors, those of values in memory included."""
        return {**self.chosen.infos, **self.carried.infos()}


class FileSpan(NamedTuple):
    """Bytes ``[start, stop)`` of a tensor go into a file, by its number, from byte ``offset`` on."""

    file: int
    offset: int
    start: int
    stop: int


@dataclass(frozen=True)
class FileLayout:
    """Files by number, and where each tensor goes. All in the order of files."""

    files: Sequence[Path]
    tensors: Mapping[Key, Sequence[FileSpan]]


class ConversionTarget(Protocol):
    """A format, about to be written into a hidden path by all ranks."""

    def prepare(self) -> None:
        """Rank 0: make the files, at their final sizes."""

    def places(self) -> FileLayout:
        """Every rank, when they are there: where the bytes of tensors go."""

    def finish(self, fragments: Fragments) -> None:
        """Rank 0, when these are written: all that is no tensor. Tensors are numbered in the order of the places."""

    def reader(self) -> Reader:
        """What reads it, finished. Raises ``CorruptCheckpointError`` where it is not as it should be."""

    @property
    def made(self) -> Path:
        """What is to get the final name."""

    def close(self) -> None:
        """Rank 0, when it has that name, or has failed: let go of it."""


class StagedFolder:
    """What targets that fill a folder have in common: it is theirs, by a lock, until they let go of it."""

    def __init__(self, material: ConversionSource, draft: Path) -> None:
        self._material, self._draft = material, draft
        self._lock: DirectoryLock | None = None

    def _open(self) -> None:
        """Rank 0. Raises ``StorageError`` where the tensors would not fit."""
        self._lock = create_locked(self._draft)
        check_space(self._draft, sum(info.nbytes for info in self._material.infos.values()))

    @property
    def made(self) -> Path:
        """See :class:`ConversionTarget`."""
        return self._draft

    def close(self) -> None:
        """See :class:`ConversionTarget`."""
        if self._lock is not None:
            self._lock.close()
