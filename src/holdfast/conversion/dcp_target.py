"""Into a folder of ``torch.distributed.checkpoint``.

torch itself writes it, with tensors that have no data; where these lie in the files is read back, and filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from holdfast.conversion.dcp_writer import FlatState, write_records
from holdfast.conversion.fake_tensors import FakeTensors, Groups
from holdfast.conversion.target import ConversionSource, FileLayout, FileSpan, StagedFolder
from holdfast.conversion.tensor_filter import Key
from holdfast.conversion.torch_target import raw_bytes, state_dict_pairs
from holdfast.engine.io.requests import Fragments
from holdfast.errors import CorruptCheckpointError
from holdfast.formats.dcp import folder
from holdfast.formats.dcp.chunked_tensor import ChunkedTensor
from holdfast.formats.dcp.dcp_reader import DcpReader
from holdfast.formats.dcp.tiling import contiguous_range
from holdfast.formats.reader import Reader
from holdfast.ondisk.dtypes import dtype_width
from holdfast.storage.direct_io import BufferedWriter
from holdfast.storage.posix import sync_tree

#: A file, a byte of it, and the range of a tensor's bytes that lies there.
_Spot = tuple[Path, int, int, int]

#: Makes the tree of a folder from tensors and values.
Shape = Callable[[Groups, Mapping[str, Any]], dict[str, Any]]


class DcpTarget(StagedFolder):
    """A folder; ``shape`` says what the tree in it is like."""

    def __init__(self, material: ConversionSource, draft: Path, shape: Shape) -> None:
        super().__init__(material, draft)
        self._fakes = FakeTensors(material.infos)
        self._flat = FlatState.of(self._fakes.tree(material, shape))

    def prepare(self) -> None:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        self._open()
        write_records(self._draft, self._flat, self._material.limit)

    def places(self) -> FileLayout:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        saved = folder.read_tree(self._draft)
        numbers = {file: number for number, file in enumerate(saved.files)}
        known = {id(fake): key for key, fake in self._fakes.made.items()}
        found: dict[Key, list[FileSpan]] = {}
        for mine, located in self._located(saved.entries, _is_fake):
            spots = [FileSpan(numbers[file], *rest) for file, *rest in located]
            there = found.setdefault(known[id(mine)], [])
            there += [spot for spot in spots if spot not in there]  # one inside of a value lies in that once more
        ordered = sorted(found, key=lambda key: found[key][0])
        return FileLayout(saved.files, {key: found[key] for key in ordered})

    def finish(self, fragments: Fragments) -> None:
        """Write what is in memory: small tensors among the values."""
        del fragments  # these folders have no room for CRCs
        for mine, spots in self._located(folder.read_tree(self._draft).entries, lambda mine: not _is_fake(mine)):
            self._fill(mine, spots)
        sync_tree(self._draft)

    def _fill(self, tensor: torch.Tensor, spots: Sequence[_Spot]) -> None:
        data = memoryview(raw_bytes(tensor))
        for file, offset, start, stop in spots:
            with BufferedWriter(file) as writer:
                writer.write(offset, data[start:stop])

    def reader(self) -> Reader:
        """See :class:`holdfast.conversion.target.ConversionTarget`."""
        return DcpReader(self._draft, {})

    def _located(
        self, entries: Mapping[str, Any], wanted: Callable[[torch.Tensor], bool]
    ) -> Iterator[tuple[torch.Tensor, list[_Spot]]]:
        """The tensors of the tree that have bytes and are wanted, each with where these go."""
        for name, mine in self._flat.values.items():
            theirs = entries[name]
            if not isinstance(mine, torch.Tensor):
                for one, found in state_dict_pairs(mine, theirs):
                    if wanted(one):
                        place = found.place()
                        yield one, [(place.file, place.offset, 0, one.nbytes)]
            elif isinstance(theirs, ChunkedTensor) and mine.nbytes and wanted(mine):
                yield mine, list(_spots(theirs))


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def _spots(tensor: ChunkedTensor) -> Iterator[_Spot]:
    size = dtype_width(tensor.info.dtype)
    for part in tensor.parts:
        run = contiguous_range(part.box, tensor.info.shape)
        if run is None:
            raise CorruptCheckpointError(f"{part.near[0]}: a chunk that was made of whole rows has others")
        yield part.place.file, part.place.offset, run.start * size, run.stop * size
