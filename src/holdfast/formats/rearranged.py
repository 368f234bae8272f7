"""A checkpoint seen otherwise than it lies: tensors under other names, or put together of several stored ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.formats.reader import Extent, Reader, Values
from holdfast.layout.files import TensorInfo
from holdfast.layout.values import ArrayCodec


class Made(NamedTuple):
    """A tensor that is stored tensors of its group one after another, by their names there."""

    info: TensorInfo
    of: Sequence[str]


#: Tensors by group and name.
Table = Mapping[str, Mapping[str, Made]]


class Rearranged:
    """A reader of what another one reads; see :class:`holdfast.formats.reader.Reader`.

    ``told`` makes of the values that all ranks share what they are under the new names.
    """

    def __init__(
        self,
        reader: Reader,
        table: Table,
        tied: Mapping[str, Mapping[str, str]],
        told: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    ) -> None:
        self._reader, self._table, self._told = reader, table, told
        self.tied = tied
        self.groups: Mapping[str, Mapping[str, TensorInfo]] = {
            group: {name: made.info for name, made in names.items()} for group, names in table.items()
        }

    @property
    def path(self) -> Path:
        """The folder or file."""
        return self._reader.path

    @property
    def format(self) -> str:
        """That of the checkpoint."""
        return self._reader.format

    @property
    def fingerprint(self) -> str:
        """That of the checkpoint: it is seen alike on all ranks."""
        return self._reader.fingerprint

    @property
    def files(self) -> Sequence[Path]:
        """Those of the checkpoint."""
        return self._reader.files

    def extents(self, group: str, name: str, start: int, stop: int) -> Sequence[Extent]:
        """Where bytes ``[start, stop)`` of a tensor lie, in their order."""
        return list(self._extents(group, name, start, stop))

    def _extents(self, group: str, name: str, start: int, stop: int) -> Iterator[Extent]:
        reached = 0
        for stored in self._table[group][name].of:
            nbytes = self._reader.groups[group][stored].nbytes
            low, high = max(start, reached), min(stop, reached + nbytes)
            if low < high:
                for one in self._reader.extents(group, stored, low - reached, high - reached):
                    yield Extent(one.file, one.offset, one.start + reached, one.stop + reached)
            reached += nbytes

    def crcs(self, group: str, name: str) -> Sequence[int] | None:
        """The CRCs where the tensor is one stored tensor; blocks of one that is put together have none."""
        made = self._table[group][name]
        return self._reader.crcs(group, made.of[0]) if len(made.of) == 1 else None

    def values(self, rank: int, shared: ArrayCodec, own: ArrayCodec) -> Values:
        """The values under the new names."""
        found = self._reader.values(rank, shared, own)
        return Values(self._told(found.shared), found.own, found.world_size, found.ranks)

    def check_files(self) -> None:
        """As the checkpoint does."""
        self._reader.check_files()

    def is_current(self) -> bool:
        """As the checkpoint is."""
        return self._reader.is_current()


def as_it_lies(names: Mapping[str, TensorInfo]) -> dict[str, Made]:
    """Each tensor as one stored tensor of its name."""
    return {name: Made(info, (name,)) for name, info in names.items()}
