"""The conversion targets that are one ``torch.save`` file.

torch itself writes it with tensors that have no data. The offsets of these are read back, and the bytes are filled in.

A conversion makes a target on every rank, and rank 0 creates the file; writers of other systems, and saves of one
component on rank 0, use :class:`PlannedTorchFile`. Bytes must be those that ``torch.save`` writes.
"""

from __future__ import annotations

import io
import pickle
from argparse import Namespace
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.serialization import skip_data

from rankless.conversion.fake_tensors import FakeTensors, Shape
from rankless.conversion.target import ConversionSource, FileLayout, FileSpan
from rankless.conversion.torch_skeleton import SKELETON_PATH, TorchSkeleton
from rankless.engine.io.requests import KnownFragments
from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.formats.reader import Reader
from rankless.formats.torch_file import TorchFileReader, read_tree
from rankless.formats.torchfile import allowed_globals, archive
from rankless.formats.torchfile.torch_placeholders import TorchTensor
from rankless.formats.torchfile.zip_reader import FileWindow
from rankless.ondisk.read_budget import ReadBudget
from rankless.storage.direct_io import BufferedWriter
from rankless.storage.posix import make_directory, new_file


class TorchFileLayout(NamedTuple):
    """A file: its size, the byte offset of each tensor without data by the tensor's ``id``, and all other bytes."""

    size: int
    offsets: Mapping[int, int]
    known: list[tuple[int, bytes]]


class PlannedTorchFile:
    """A ``torch.save`` file to be written. Its tree has tensors without data.

    ``pickle_module`` provides the pickler, as in ``torch.save``. ``allowed`` are the globals that its pickle may name.
    """

    def __init__(
        self, tree: Any, pickle_module: Any = pickle, allowed: Mapping[str, object] = allowed_globals.NAMES
    ) -> None:
        self._tree, self._pickle_module, self._allowed = tree, pickle_module, allowed

    def create_file(self, path: Path) -> None:
        """Create the file at its final size."""
        make_directory(path.parent)
        with new_file(path) as file:
            self._save_tree(file)  # not to the path: torch would store the path's name in it

    def lay_out(self) -> TorchFileLayout:
        """Return the layout of the file. No file is created."""
        skeleton = TorchSkeleton()
        self._save_tree(skeleton)
        window = FileWindow(SKELETON_PATH, 0, skeleton.size, skeleton)
        stored = archive.read_archive(window, ReadBudget(), self._allowed).root
        offsets, small = dict[int, int](), dict[int, bytes]()
        for planned, offset in _locate_tensors(self._tree, stored):
            if isinstance(planned, FakeTensor):
                offsets[id(planned)] = offset
            elif planned.nbytes:
                small[offset] = raw_bytes(planned)
        return TorchFileLayout(skeleton.size, offsets, skeleton.fill(small))

    def _save_tree(self, file: Any) -> None:
        with skip_data(materialize_fake_tensors=True):
            torch.save(self._tree, file, pickle_module=self._pickle_module)

    def read_offsets(self, path: Path) -> dict[int, int]:
        """Return the byte offset of each tensor without data in the created file, by the tensor's ``id``."""
        return {
            id(planned): offset for planned, offset in self._tensor_offsets(path) if isinstance(planned, FakeTensor)
        }

    def write_small_tensors(self, path: Path) -> None:
        """Write the tensors that have data: small ones among the values. Syncs the file."""
        with BufferedWriter(path) as writer:
            for planned, offset in self._tensor_offsets(path):
                if not isinstance(planned, FakeTensor) and planned.nbytes:
                    writer.write(offset, memoryview(raw_bytes(planned)))
            writer.sync()

    def _tensor_offsets(self, path: Path) -> Iterator[tuple[torch.Tensor, int]]:
        """Iterate over the tensors of the tree, each with its byte offset in the file."""
        return _locate_tensors(self._tree, read_tree(path, names=self._allowed).root)


class TorchTarget:
    """A ``torch.save`` file with a name in the pending directory. ``shape`` builds the tree in it."""

    def __init__(self, source: ConversionSource, pending: Path, shape: Shape, name: str = "file") -> None:
        self._source, self._path, self.output_name = source, pending / name, name
        self._fakes = FakeTensors(source.tensor_infos)
        self._file = PlannedTorchFile(self._fakes.build_tree(source, shape))

    def create_files(self) -> Collection[int]:
        """See :class:`rankless.conversion.target.ConversionTarget`."""
        self._file.create_file(self._path)
        self._file.write_small_tensors(self._path)
        return ()

    def locate_tensors(self) -> FileLayout:
        """See :class:`rankless.conversion.target.ConversionTarget`."""
        keys = {id(fake): key for key, fake in self._fakes.tensors_by_key.items()}
        offsets = {keys[fake_id]: offset for fake_id, offset in self._file.read_offsets(self._path).items()}
        infos = self._source.tensor_infos
        ordered = sorted(offsets, key=offsets.__getitem__)
        spans = {key: [FileSpan(0, offsets[key], 0, infos[key].nbytes)] for key in ordered}
        return FileLayout([self._path], spans, [0])

    def write_metadata(self, fragments: KnownFragments) -> None:
        """See :class:`rankless.conversion.target.ConversionTarget`."""
        del fragments  # files of torch.save have no room for CRCs

    def open_reader(self) -> Reader:
        """See :class:`rankless.conversion.target.ConversionTarget`."""
        return TorchFileReader(self._path, {})


def _locate_tensors(planned: Any, stored: Any) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the tensors of a tree, each with its byte offset in the file that ``stored`` was read from."""
    for tensor, found in state_dict_pairs(planned, stored):
        yield tensor, found.find_location().offset


def state_dict_pairs(planned: Any, stored: Any) -> Iterator[tuple[torch.Tensor, TorchTensor]]:
    """Pair the tensors of a tree that have bytes with the tensors of the same tree as it was read from a file."""
    if isinstance(planned, torch.Tensor):
        if isinstance(stored, TorchTensor) and stored.info.nbytes:
            yield planned, stored
    elif isinstance(planned, Namespace):
        yield from state_dict_pairs(vars(planned), vars(stored))
    elif isinstance(planned, Mapping):
        for key, value in planned.items():
            yield from state_dict_pairs(value, stored[key])
    elif isinstance(planned, list | tuple | deque):
        for planned_item, stored_item in zip(planned, stored, strict=True):
            yield from state_dict_pairs(planned_item, stored_item)


def as_saved_bytes(value: Any) -> bytes:
    """Return the bytes that ``torch.save`` writes for a small value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor in row-major order."""
    data = np.empty(tensor.nbytes, np.uint8)
    TensorBytes(tensor).copy_out(0, data)
    return data.tobytes()
