"""The conversion target ``dcp``: a folder of ``torch.distributed.checkpoint``.

torch itself writes it with tensors that have no data. The offsets of these are read back, and the bytes are filled in.

A conversion makes one on every rank; see :class:`rankless.conversion.target.ConversionTarget` for the ranks of its
methods. :mod:`rankless.lightning.writer` and :mod:`rankless.megatron.writer.megatron_target` build on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from rankless.conversion.fake_tensors import FakeTensors, Groups
from rankless.conversion.target import ConversionSource, FileLayout, FileSpan
from rankless.conversion.tensor_filter import Key
from rankless.conversion.torch_target import raw_bytes, state_dict_pairs
from rankless.dcp.reader import dcp_directory
from rankless.dcp.reader.dcp_reader import DcpReader
from rankless.dcp.writer.dcp_files import FlatState, write_records
from rankless.engine.io.requests import KnownFragments
from rankless.errors import CorruptCheckpointError
from rankless.formats.chunked_tensor import ChunkedTensor
from rankless.formats.reader import Reader
from rankless.formats.tiling import contiguous_range
from rankless.ondisk.dtypes import dtype_width
from rankless.storage.direct_io import BufferedWriter
from rankless.storage.posix import sync_tree

#: A file, a byte offset in it, and the range of a tensor's bytes that is stored there.
_Span = tuple[Path, int, int, int]

#: Builds the tree of a folder from tensors and values.
Shape = Callable[[Groups, Mapping[str, Any]], dict[str, Any]]


class DcpTarget:
    """A folder of ``torch.distributed.checkpoint``. ``shape`` builds the tree in it."""

    output_name = ""

    def __init__(self, source: ConversionSource, pending: Path, shape: Shape) -> None:
        self._pending = pending
        fakes = FakeTensors(source.tensor_infos)
        flat = FlatState.from_tree(fakes.build_tree(source, shape))
        self._files = DcpFiles(pending, flat, fakes, source.limit)

    def create_files(self) -> Collection[int]:
        """See :class:`rankless.conversion.target.ConversionTarget`."""
        self._files.create()
        self._files.write_small_tensors()
        return ()

    def locate_tensors(self) -> FileLayout:
        """See :class:`rankless.conversion.target.ConversionTarget`."""
        return self._files.locate_tensors()

    def write_metadata(self, fragments: KnownFragments) -> None:
        """See :class:`rankless.conversion.target.ConversionTarget`."""
        del fragments  # these folders have no room for CRCs
        sync_tree(self._pending)

    def open_reader(self) -> Reader:
        """See :class:`rankless.conversion.target.ConversionTarget`."""
        return DcpReader(self._pending, {})


class DcpFiles:
    """The files of such a folder: ``flat`` are their contents, with tensors of ``fakes`` that have no data."""

    def __init__(self, path: Path, flat: FlatState, fakes: FakeTensors, limit: int) -> None:
        self._folder, self._flat, self._fakes, self._limit = path, flat, fakes, limit

    def create(self) -> None:
        """Create the files at their final sizes, and the metadata."""
        write_records(self._folder, self._flat, self._limit)

    def locate_tensors(self) -> FileLayout:
        """Return the files, and the layout of the tensors without data in them."""
        saved = dcp_directory.read_tree(self._folder)
        numbers = {file: number for number, file in enumerate(saved.files)}
        keys = {id(fake): key for key, fake in self._fakes.tensors_by_key.items()}
        layout: dict[Key, list[FileSpan]] = {}
        for planned, located in self._iterate_spans(saved.entries, _is_fake):
            spans = [FileSpan(numbers[file], *offsets) for file, *offsets in located]
            present = layout.setdefault(keys[id(planned)], [])
            present += [span for span in spans if span not in present]  # a tensor may be in a value as well
        ordered = sorted(layout, key=lambda key: layout[key][0])
        return FileLayout(saved.files, {key: layout[key] for key in ordered}, [0] * len(saved.files))

    def write_small_tensors(self) -> None:
        """Write the tensors that have data: small ones among the values."""
        for planned, spans in self._iterate_spans(
            dcp_directory.read_tree(self._folder).entries, lambda planned: not _is_fake(planned)
        ):
            self._write_tensor(planned, spans)

    def _write_tensor(self, tensor: torch.Tensor, spans: Sequence[_Span]) -> None:
        data = memoryview(raw_bytes(tensor))
        for file, offset, start, stop in spans:
            with BufferedWriter(file) as writer:
                writer.write(offset, data[start:stop])

    def _iterate_spans(
        self, entries: Mapping[str, Any], is_wanted: Callable[[torch.Tensor], bool]
    ) -> Iterator[tuple[torch.Tensor, list[_Span]]]:
        """Iterate over the wanted tensors of the tree that have bytes, each with its spans."""
        for name, planned in self._flat.values.items():
            entry = entries[name]
            if not isinstance(planned, torch.Tensor):
                for tensor, stored in state_dict_pairs(planned, entry):
                    if is_wanted(tensor):
                        place = stored.find_location()
                        yield tensor, [(place.file, place.offset, 0, tensor.nbytes)]
            elif isinstance(entry, ChunkedTensor) and planned.nbytes and is_wanted(planned):
                yield planned, list(_chunk_spans(entry))


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def _chunk_spans(tensor: ChunkedTensor) -> Iterator[_Span]:
    size = dtype_width(tensor.info.dtype)
    for chunk in tensor.chunks:
        byte_range = contiguous_range(chunk.box, tensor.info.shape)
        if byte_range is None:
            raise CorruptCheckpointError(
                f"{chunk.order_hint[0]}: a chunk that was written as one range is not contiguous"
            )
        yield chunk.location.file, chunk.location.offset, byte_range.start * size, byte_range.stop * size
