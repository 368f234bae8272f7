"""Writing files of ``torch.save`` that are planned to the byte: a buffer at a time, by several threads; read back."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from awscrt.checksums import combine_crc32

from holdfast.compat.nxd.format.rank_file_writer import PlannedFile
from holdfast.compat.nxd.format.zero import ShardRows
from holdfast.engine.io.requests import run_in_threads
from holdfast.engine.io.source_reader import SourceReader
from holdfast.engine.io.sources import Source
from holdfast.engine.plan.file_ranges import CHUNK
from holdfast.errors import CorruptCheckpointError, FormatError
from holdfast.formats.reader import FileExtent
from holdfast.formats.stored_tensor import StoredTensor
from holdfast.ondisk.blocks import crc64
from holdfast.ondisk.files import TensorInfo
from holdfast.state.tensors import DTYPES
from holdfast.storage.direct_io import BufferedReader, BufferedWriter
from holdfast.storage.memory import BufferPool, Bytes
from holdfast.storage.posix import allocate_space, make_parents


class _Range(NamedTuple):
    """Bytes from ``start`` on of a tensor of a file, by their numbers, and where they go in it."""

    file: int
    tensor: int
    start: int
    size: int
    offset: int


class _Written(NamedTuple):
    """What was written there: CRC-32 for the file, CRC-64 for us."""

    range: _Range
    crc32: int
    crc64: int


def write_torch_files(folder: Path, files: Sequence[PlannedFile]) -> None:
    """Write files that are not there yet, read them back, and make them durable.

    Through the page cache, so that reading back costs little: it proves that every byte is where it should be, and not
    that the disk keeps it. Raises ``CorruptCheckpointError`` where one is read as something else.
    """
    for file in files:
        make_parents(folder, file.name)
        allocate_space(folder / file.name, file.frame.size)
    ranges = [one for number, file in enumerate(files) for one in _ranges(number, file)]
    sources = _Sources(tensor for file in files for tensor in file.tensors)
    buffers = BufferPool(CHUNK)
    with SourceReader(sources.files) as opened:
        written = run_in_threads(lambda one: _write(one, folder, files[one.file], sources, opened, buffers), ranges)
    run_in_threads(lambda pair: _finish(folder / pair[0].name, *pair, buffers), list(_by_file(files, written)))


def _ranges(number: int, file: PlannedFile) -> Iterator[_Range]:
    """Cut where offsets in the file are multiples of a buffer's size."""
    for tensor, (stored, begin) in enumerate(zip(file.tensors, file.frame.starts, strict=True)):
        at, end = begin, begin + stored.info.nbytes
        while at < end:
            stop = min(end, (at // CHUNK + 1) * CHUNK)
            yield _Range(number, tensor, at - begin, stop - at, at)
            at = stop


@dataclass(frozen=True, eq=False)
class CastProvider(StoredTensor):
    """A tensor in another dtype than ``whole`` has it in."""

    info: TensorInfo
    whole: StoredTensor

    def extents(self, start: int, stop: int) -> Sequence[FileExtent]:
        """What is cast lies in no file."""
        raise FormatError(f"bytes {start} to {stop} of a tensor that is cast are in no file")


def cast_provider(stored: StoredTensor, dtype: str) -> StoredTensor:
    """A tensor in some dtype."""
    return stored if stored.info.dtype == dtype else CastProvider(TensorInfo(dtype, stored.info.shape), stored)


class _Sources:
    """Numbers what is read from."""

    def __init__(self, tensors: Iterable[StoredTensor]) -> None:
        self.files: list[Source] = []
        self._numbers: dict[Source, int] = {}
        for stored in {id(one): one for one in map(_in_files, tensors)}.values():
            for extent in stored.extents(0, stored.info.nbytes):
                if extent.file not in self._numbers:
                    self._numbers[extent.file] = len(self.files)
                    self.files.append(extent.file)

    def fill(self, stored: StoredTensor, start: int, into: Bytes, opened: SourceReader) -> None:
        """Bytes of a tensor, from ``start`` on; zeros where it has no more."""
        if isinstance(stored, CastProvider):
            self._cast(stored, start, into, opened)
            return
        if isinstance(stored, ShardRows):
            number = max(0, min(len(into), stored.nbytes - start))
            self.fill(stored.whole, stored.start + start, into[:number], opened)
            into[number:] = 0
            return
        for source, offset, low, high in stored.extents(start, start + len(into)):
            opened.read(self._numbers[source], offset, into[low - start : high - start].data)

    def _cast(self, stored: CastProvider, start: int, into: Bytes, opened: SourceReader) -> None:
        here, there = (DTYPES[one.info.dtype] for one in (stored, stored.whole))
        raw = np.empty(len(into) // here.itemsize * there.itemsize, np.uint8)
        self.fill(stored.whole, start // here.itemsize * there.itemsize, raw, opened)
        torch.from_numpy(into).view(here).copy_(torch.from_numpy(raw).view(there))


def _in_files(stored: StoredTensor) -> StoredTensor:
    """What a tensor is made of that lies in files."""
    while isinstance(stored, CastProvider | ShardRows):
        stored = stored.whole
    return stored


def _write(  # noqa: PLR0917 - what a thread needs
    one: _Range, folder: Path, file: PlannedFile, sources: _Sources, opened: SourceReader, buffers: BufferPool
) -> _Written:
    data = buffers.get()[: one.size]
    sources.fill(file.tensors[one.tensor], one.start, data, opened)
    with BufferedWriter(folder / file.name) as writer:
        writer.write(one.offset, data.data)
    return _Written(one, zlib.crc32(data.data), crc64(data))


def _by_file(files: Sequence[PlannedFile], written: Iterable[_Written]) -> Iterator[tuple[PlannedFile, list[_Written]]]:
    """What was written of each file."""
    found: list[list[_Written]] = [[] for _ in files]
    for one in written:
        found[one.range.file].append(one)
    return zip(files, found, strict=True)


def _finish(path: Path, file: PlannedFile, written: Sequence[_Written], buffers: BufferPool) -> None:
    crcs = dict.fromkeys(range(len(file.tensors)), 0)
    for (_, tensor, _, size, _), crc, _ in written:
        crcs[tensor] = combine_crc32(crcs[tensor], crc, size)
    with BufferedWriter(path) as writer:
        for offset, data in file.frame.around(crcs):
            writer.write(offset, memoryview(data))
        for one in written:
            _check(one, path, buffers)
        writer.sync()


def _check(one: _Written, path: Path, buffers: BufferPool) -> None:
    data = buffers.get()[: one.range.size]
    with BufferedReader(path) as reader:
        reader.read(one.range.offset, data.data)
    if crc64(data) != one.crc64:
        raise CorruptCheckpointError(
            f"{path} was read back as something else than what was written, from byte {one.range.offset} on"
        )
