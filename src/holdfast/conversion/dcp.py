"""Into a folder of ``torch.distributed.checkpoint``.

torch itself writes it, with tensors that have no data; where these lie in the files is read back, and filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from holdfast.conversion.choice import Key
from holdfast.conversion.fakes import Fakes, Groups
from holdfast.conversion.records import Flat, write_records
from holdfast.conversion.target import DraftFolder, Material, Places, Spot
from holdfast.conversion.torchfile import pairs, raw
from holdfast.engine.transfer import Fragments
from holdfast.errors import DamagedError
from holdfast.formats.dcp import folder
from holdfast.formats.dcp.chunked import Chunked
from holdfast.formats.dcp.reader import DcpReader
from holdfast.formats.dcp.tiling import run_of
from holdfast.formats.reader import Reader
from holdfast.layout.dtypes import width
from holdfast.storage.bulk import CachedWriter
from holdfast.storage.local import sync_tree

#: A file, a byte of it, and the range of a tensor's bytes that lies there.
_Spot = tuple[Path, int, int, int]

#: Makes the tree of a folder from tensors and values.
Shape = Callable[[Groups, Mapping[str, Any]], dict[str, Any]]


class DcpTarget(DraftFolder):
    """A folder; ``shape`` says what the tree in it is like."""

    def __init__(self, material: Material, draft: Path, shape: Shape) -> None:
        super().__init__(material, draft)
        self._fakes = Fakes(material.infos)
        self._flat = Flat.of(self._fakes.tree(material, shape))

    def prepare(self) -> None:
        """See :class:`holdfast.conversion.target.Target`."""
        self._open()
        write_records(self._draft, self._flat, self._material.limit)

    def places(self) -> Places:
        """See :class:`holdfast.conversion.target.Target`."""
        saved = folder.read(self._draft)
        numbers = {file: number for number, file in enumerate(saved.files)}
        known = {id(fake): key for key, fake in self._fakes.made.items()}
        found: dict[Key, list[Spot]] = {}
        for mine, located in self._located(saved.entries, _is_fake):
            spots = [Spot(numbers[file], *rest) for file, *rest in located]
            there = found.setdefault(known[id(mine)], [])
            there += [spot for spot in spots if spot not in there]  # one inside of a value lies in that once more
        ordered = sorted(found, key=lambda key: found[key][0])
        return Places(saved.files, {key: found[key] for key in ordered})

    def finish(self, fragments: Fragments) -> None:
        """Write what is in memory: small tensors among the values."""
        del fragments  # these folders have no room for CRCs
        for mine, spots in self._located(folder.read(self._draft).entries, lambda mine: not _is_fake(mine)):
            self._fill(mine, spots)
        sync_tree(self._draft)

    def _fill(self, tensor: torch.Tensor, spots: Sequence[_Spot]) -> None:
        data = memoryview(raw(tensor))
        for file, offset, start, stop in spots:
            with CachedWriter(file) as writer:
                writer.write(offset, data[start:stop])

    def reader(self) -> Reader:
        """See :class:`holdfast.conversion.target.Target`."""
        return DcpReader(self._draft, {})

    def _located(
        self, entries: Mapping[str, Any], wanted: Callable[[torch.Tensor], bool]
    ) -> Iterator[tuple[torch.Tensor, list[_Spot]]]:
        """The tensors of the tree that have bytes and are wanted, each with where these go."""
        for name, mine in self._flat.values.items():
            theirs = entries[name]
            if not isinstance(mine, torch.Tensor):
                for one, found in pairs(mine, theirs):
                    if wanted(one):
                        place = found.place()
                        yield one, [(place.file, place.offset, 0, one.nbytes)]
            elif isinstance(theirs, Chunked) and mine.nbytes and wanted(mine):
                yield mine, list(_spots(theirs))


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def _spots(tensor: Chunked) -> Iterator[_Spot]:
    size = width(tensor.info.dtype)
    for part in tensor.parts:
        run = run_of(part.box, tensor.info.shape)
        if run is None:
            raise DamagedError(f"{part.near[0]}: a chunk that was made of whole rows has others")
        yield part.place.file, part.place.offset, run.start * size, run.stop * size
