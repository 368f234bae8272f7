"""What a format that is written must tell and do: its files, where tensors go in them, and all that is no tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from holdfast.conversion.carried import Carried
from holdfast.conversion.choice import Chosen, Key
from holdfast.engine.transfer import Fragments
from holdfast.formats.reader import Reader
from holdfast.layout.files import TensorInfo
from holdfast.storage.folders import Lock, check_space, claim


@dataclass(frozen=True)
class Material:
    """What is written: tensors and values of a source. ``limit``: the most bytes of tensors in one file."""

    reader: Reader
    chosen: Chosen
    carried: Carried
    limit: int

    @property
    def infos(self) -> dict[Key, TensorInfo]:
        """All tensors, those of values in memory included."""
        return {**self.chosen.infos, **self.carried.infos()}


class Spot(NamedTuple):
    """Bytes ``[start, stop)`` of a tensor go into a file, by its number, from byte ``offset`` on."""

    file: int
    offset: int
    start: int
    stop: int


@dataclass(frozen=True)
class Places:
    """Files by number, and where each tensor goes. All in the order of files."""

    files: Sequence[Path]
    tensors: Mapping[Key, Sequence[Spot]]


class Target(Protocol):
    """A format, about to be written into a hidden path by all ranks."""

    def prepare(self) -> None:
        """Rank 0: make the files, at their final sizes."""

    def places(self) -> Places:
        """Every rank, when they are there: where the bytes of tensors go."""

    def finish(self, fragments: Fragments) -> None:
        """Rank 0, when these are written: all that is no tensor. Tensors are numbered in the order of the places."""

    def reader(self) -> Reader:
        """What reads it, finished. Raises ``DamagedError`` where it is not as it should be."""

    @property
    def made(self) -> Path:
        """What is to get the final name."""

    def close(self) -> None:
        """Rank 0, when it has that name, or has failed: let go of it."""


class DraftFolder:
    """What targets that fill a folder have in common: it is theirs, by a lock, until they let go of it."""

    def __init__(self, material: Material, draft: Path) -> None:
        self._material, self._draft = material, draft
        self._lock: Lock | None = None

    def _open(self) -> None:
        """Rank 0. Raises ``StorageError`` where the tensors would not fit."""
        self._lock = claim(self._draft)
        check_space(self._draft, sum(info.nbytes for info in self._material.infos.values()))

    @property
    def made(self) -> Path:
        """See :class:`Target`."""
        return self._draft

    def close(self) -> None:
        """See :class:`Target`."""
        if self._lock is not None:
            self._lock.close()
