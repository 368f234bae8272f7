"""A checkpoint seen otherwise than it lies: tensors under other names, or put together of several stored ones."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.formats.reader import CheckpointValues, FileExtent, Reader, UnreadTensorNote
from holdfast.ondisk.files import TensorInfo
from holdfast.ondisk.values import ArrayCodec


class TensorRange(NamedTuple):
    """Bytes ``[start, stop)`` of the stored tensor ``name``."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class TensorMapping:
    """A tensor that is ranges of stored tensors of its group, one after another."""

    info: TensorInfo
    of: Sequence[TensorRange]

    @cached_property
    def names(self) -> list[str]:
        """The stored tensors, each once."""
        return list(dict.fromkeys(one.name for one in self.of))

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(one.stop - one.start for one in self.of))

    def ranges(self, start: int, stop: int) -> Iterator[tuple[int, TensorRange]]:
        """The ranges that bytes ``[start, stop)`` of it are, each with the byte of it that it begins at."""
        for i in range(bisect_right(self._ends, start), len(self.of)):
            name, first, last = self.of[i]
            begin = self._ends[i] - (last - first)
            if begin >= stop:
                return
            low, high = max(start, begin), min(stop, self._ends[i])
            yield low, TensorRange(name, first + low - begin, first + high - begin)


#: Tensors by group and name.
Table = Mapping[str, Mapping[str, TensorMapping]]


class RemappedReader:
    """A reader of what another one reads; see :class:`holdfast.formats.reader.Reader`.

    ``told`` makes of the values that all ranks share what they are under the new names. ``inner`` is the other reader.
    """

    def __init__(
        self,
        reader: Reader,
        table: Table,
        tied: Mapping[str, Mapping[str, str]],
        told: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    ) -> None:
        self.inner, self.table, self._told = reader, table, told
        self.tied = tied
        self.groups: Mapping[str, Mapping[str, TensorInfo]] = {
            group: {name: made.info for name, made in names.items()} for group, names in table.items()
        }

    @property
    def path(self) -> Path:
        """The folder or file."""
        return self.inner.path

    @property
    def format(self) -> str:
        """That of the checkpoint."""
        return self.inner.format

    @property
    def fingerprint(self) -> str:
        """That of the checkpoint: it is seen alike on all ranks."""
        return self.inner.fingerprint

    @property
    def unread(self) -> Sequence[UnreadTensorNote]:
        """That of the checkpoint."""
        return self.inner.unread

    @property
    def files(self) -> Sequence[Path]:
        """Those of the checkpoint."""
        return self.inner.files

    def extents(self, group: str, name: str, start: int, stop: int) -> Sequence[FileExtent]:
        """Where bytes ``[start, stop)`` of a tensor lie, in their order."""
        return list(self._extents(group, name, start, stop))

    def _extents(self, group: str, name: str, start: int, stop: int) -> Iterator[FileExtent]:
        for at, (stored, first, last) in self.table[group][name].ranges(start, stop):
            for one in self.inner.extents(group, stored, first, last):
                yield FileExtent(one.file, one.offset, one.start - first + at, one.stop - first + at)

    def crcs(self, group: str, name: str) -> Sequence[int] | None:
        """The CRCs where the tensor is one stored tensor; blocks of one that is put together have none."""
        first, *others = self.table[group][name].of
        is_whole = not others and first == full_range(first.name, self.inner.groups[group][first.name])
        return self.inner.crcs(group, first.name) if is_whole else None

    def values(self, rank: int, shared: ArrayCodec, own: ArrayCodec) -> CheckpointValues:
        """The values under the new names."""
        found = self.inner.values(rank, shared, own)
        return CheckpointValues(self._told(found.shared), found.own, found.world_size, found.ranks)

    def check_files(self) -> None:
        """As the checkpoint does."""
        self.inner.check_files()

    def is_current(self) -> bool:
        """As the checkpoint is."""
        return self.inner.is_current()


def underlying_reader(reader: Reader) -> Reader:
    """The reader of the stored tensors, which is the same on all ranks, however each sees them."""
    return reader.inner if isinstance(reader, RemappedReader) else reader


def mapping_of(reader: Reader, group: str, name: str) -> TensorMapping:
    """The stored tensors that a tensor is."""
    if isinstance(reader, RemappedReader):
        return reader.table[group][name]
    info = reader.groups[group][name]
    return TensorMapping(info, (full_range(name, info),))


def identity_mapping(names: Mapping[str, TensorInfo]) -> dict[str, TensorMapping]:
    """Each tensor as one stored tensor of its name."""
    return {name: TensorMapping(info, (full_range(name, info),)) for name, info in names.items()}


def full_range(name: str, info: TensorInfo) -> TensorRange:
    """All bytes of a stored tensor."""
    return TensorRange(name, 0, info.nbytes)
