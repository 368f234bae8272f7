"""A reader that presents the stored tensors under other names, or several stored tensors as one.

Loads wrap their reader so on each rank if the model has other names (:mod:`rankless.load.fused_experts`), and so do
loads of components. Plans use the numbers of tensors in the :func:`underlying_reader`, because ranks may remap
differently. Checksums belong to stored tensors, so bytes are verified under the stored names.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rankless.formats.reader import CheckpointValues, FileExtent, Reader, UnreadTensorNote
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.values import ArrayCodec


class NamedRange(NamedTuple):
    """Bytes ``[start, stop)`` of the stored tensor ``name``."""

    name: str
    start: int
    stop: int


class TensorMapping(msgspec.Struct, frozen=True, dict=True):
    """A tensor that consists of ranges of stored tensors of its group, one after another.

    For example, the fused parameter of all experts of a layer consists of a stored tensor of each expert.
    """

    info: TensorInfo
    ranges: Sequence[NamedRange]

    @property
    def names(self) -> Sequence[str]:
        """The stored tensors, each once."""
        ranges = self.ranges
        return (ranges[0].name,) if len(ranges) == 1 else tuple(dict.fromkeys(part.name for part in ranges))

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(part.stop - part.start for part in self.ranges))

    def find_ranges(self, start: int, stop: int) -> Iterator[tuple[int, NamedRange]]:
        """Yield the stored ranges of bytes ``[start, stop)`` of the tensor, each with its first byte in the tensor."""
        for i in range(bisect_right(self._ends, start), len(self.ranges)):
            name, first, last = self.ranges[i]
            begin = self._ends[i] - (last - first)
            if begin >= stop:
                return
            low, high = max(start, begin), min(stop, self._ends[i])
            yield low, NamedRange(name, first + low - begin, first + high - begin)


#: Tensors by group and name.
Table = Mapping[str, Mapping[str, TensorMapping]]


class RemappedReader:
    """A reader that renames and joins the tensors of another reader, ``inner``.

    ``transform_values`` returns the shared values with the new names. See :class:`rankless.formats.reader.Reader`.
    """

    def __init__(
        self,
        reader: Reader,
        table: Table,
        tied: Mapping[str, Mapping[str, str]],
        transform_values: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    ) -> None:
        self.inner, self.table, self._transform_values = reader, table, transform_values
        self.tied = tied
        self.groups: Mapping[str, Mapping[str, TensorInfo]] = {
            group: {name: mapping.info for name, mapping in mappings.items()} for group, mappings in table.items()
        }

    @property
    def path(self) -> Path:
        """The checkpoint's folder or file."""
        return self.inner.path

    @property
    def format(self) -> str:
        """The format of ``inner``."""
        return self.inner.format

    @property
    def fingerprint(self) -> str:
        """The fingerprint of ``inner``: all ranks remap it in the same way."""
        return self.inner.fingerprint

    @property
    def unread(self) -> Sequence[UnreadTensorNote]:
        """The tensors and values that rankless cannot read."""
        return self.inner.unread

    @property
    def files(self) -> Sequence[Path]:
        """The files of ``inner``."""
        return self.inner.files

    def find_extents(self, group: str, name: str, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`rankless.formats.reader.Reader`."""
        return list(self._iterate_extents(group, name, start, stop))

    def _iterate_extents(self, group: str, name: str, start: int, stop: int) -> Iterator[FileExtent]:
        for at, (stored_name, first, last) in self.table[group][name].find_ranges(start, stop):
            for extent in self.inner.find_extents(group, stored_name, first, last):
                yield FileExtent(extent.file, extent.offset, extent.start - first + at, extent.stop - first + at)

    def block_crcs(self, group: str, name: str) -> Sequence[int] | None:
        """Return the CRCs if the tensor is one whole stored tensor, else ``None``."""
        first, *others = self.table[group][name].ranges
        is_whole = not others and first == full_range(first.name, self.inner.groups[group][first.name])
        return self.inner.block_crcs(group, first.name) if is_whole else None

    def read_values(self, rank: int, shared_codec: ArrayCodec, rank_codec: ArrayCodec) -> CheckpointValues:
        """Return the values, with the shared ones under the new names."""
        values = self.inner.read_values(rank, shared_codec, rank_codec)
        shared = self._transform_values(values.shared)
        return CheckpointValues(shared, values.rank_values, values.world_size, values.ranks)

    def check_files(self) -> None:
        """See :class:`rankless.formats.reader.Reader`."""
        self.inner.check_files()

    def is_current(self) -> bool:
        """See :class:`rankless.formats.reader.Reader`."""
        return self.inner.is_current()


def underlying_reader(reader: Reader) -> Reader:
    """Return the reader of the stored tensors, which is the same on all ranks even if each remaps them differently."""
    return reader.inner if isinstance(reader, RemappedReader) else reader


def find_mappings(reader: Reader, keys: Iterable[tuple[str, str]]) -> dict[tuple[str, str], TensorMapping]:
    """Return the ranges of stored tensors that each tensor consists of, without those that the reader does not have."""
    if isinstance(reader, RemappedReader):
        mappings = {key: reader.table.get(key[0], {}).get(key[1]) for key in keys}
        return {key: mapping for key, mapping in mappings.items() if mapping is not None}
    groups = reader.groups
    infos = ((key, groups.get(key[0], {}).get(key[1])) for key in keys)
    return {key: TensorMapping(info, (NamedRange(key[1], 0, info.nbytes),)) for key, info in infos if info is not None}


def identity_mapping(names: Mapping[str, TensorInfo]) -> dict[str, TensorMapping]:
    """Return the mapping of each tensor to the stored tensor of the same name."""
    return {name: TensorMapping(info, (full_range(name, info),)) for name, info in names.items()}


def full_range(name: str, info: TensorInfo) -> NamedRange:
    """Return the range of all bytes of a stored tensor."""
    return NamedRange(name, 0, info.nbytes)
