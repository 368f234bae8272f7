"""Writes planned files of ``torch.save``. Their size and layout are known to the byte.

Several threads write one buffer at a time; everything is read back.

:class:`~rankless.nxd.writer.nxd_files.NxdWriter` and :mod:`rankless.nxd.offline_zero_conversion` write with it, in one
process. The bytes must be where ``torch.save`` would write them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from awscrt.checksums import combine_crc32

from rankless.engine.io.source_reader import SourceReader
from rankless.engine.io.tensor_sources import Source
from rankless.engine.plan.file_ranges import CHUNK
from rankless.errors import CorruptCheckpointError, FormatError
from rankless.formats.reader import FileExtent
from rankless.formats.stored_tensor import StoredTensor
from rankless.nxd.reader.zero_states import ShardRows
from rankless.nxd.writer.rank_file_plan import PlannedFile
from rankless.ondisk.block_crcs import crc64
from rankless.ondisk.data_files import TensorInfo
from rankless.process.worker_threads import run_in_threads
from rankless.state.tensor_views import DTYPES
from rankless.storage.aligned_memory import BufferPool, Bytes
from rankless.storage.direct_io import BufferedReader, BufferedWriter
from rankless.storage.posix import allocate_space, make_parents


class _TensorRange(NamedTuple):
    """A range of a tensor: ``size`` bytes from byte ``start`` on, written at byte ``offset`` of the file.

    ``file`` and ``tensor`` are numbers.
    """

    file: int
    tensor: int
    start: int
    size: int
    offset: int


class _Written(NamedTuple):
    """The checksums of a written range: CRC-32 for the file format, CRC-64 for the verification."""

    range: _TensorRange
    crc32: int
    crc64: int


def write_torch_files(folder: Path, files: Sequence[PlannedFile]) -> None:
    """Write files that do not exist yet, read them back, and make them durable.

    They are written through the page cache, so reading back is cheap: it proves that every byte is in its place, not
    that the disk stores it. Raises ``CorruptCheckpointError`` if a range reads back differently.
    """
    for file in files:
        make_parents(folder, file.name)
        allocate_space(folder / file.name, file.frame.size)
    ranges = [file_range for number, file in enumerate(files) for file_range in _split_ranges(number, file)]
    sources = _Sources(tensor for file in files for tensor in file.tensors)
    buffers = BufferPool(CHUNK)
    with SourceReader(sources.files) as reader:
        written = run_in_threads(
            lambda file_range: _write_range(file_range, folder, files[file_range.file], sources, reader, buffers),
            ranges,
        )
    run_in_threads(lambda item: _finish_file(folder / item[0].name, *item, buffers), list(_by_file(files, written)))


def _split_ranges(number: int, file: PlannedFile) -> Iterator[_TensorRange]:
    """Yield the ranges of a file's tensors, cut at multiples of the buffer size in the file."""
    for tensor, (stored, begin) in enumerate(zip(file.tensors, file.frame.storage_offsets, strict=True)):
        position, end = begin, begin + stored.info.nbytes
        while position < end:
            stop = min(end, (position // CHUNK + 1) * CHUNK)
            yield _TensorRange(number, tensor, position - begin, stop - position, position)
            position = stop


@dataclass(frozen=True, eq=False)
class CastTensor(StoredTensor):
    """A tensor that is cast from the dtype of ``whole``."""

    info: TensorInfo
    whole: StoredTensor

    def find_extents(self, start: int, stop: int) -> Sequence[FileExtent]:
        """Raise ``FormatError``: the bytes of a cast tensor are stored in no file."""
        raise FormatError(f"bytes {start} to {stop} of a cast tensor are stored in no file")


def cast_tensor(stored: StoredTensor, dtype: str) -> StoredTensor:
    """Return the tensor in a dtype, unchanged if it already has it."""
    return stored if stored.info.dtype == dtype else CastTensor(TensorInfo(dtype, stored.info.shape), stored)


class _Sources:
    """The files to read, numbered, and the methods that read tensors from them."""

    def __init__(self, tensors: Iterable[StoredTensor]) -> None:
        self.files: list[Source] = []
        self._numbers: dict[Source, int] = {}
        for stored in {id(tensor): tensor for tensor in map(_stored_tensor, tensors)}.values():
            for extent in stored.find_extents(0, stored.info.nbytes):
                if extent.file not in self._numbers:
                    self._numbers[extent.file] = len(self.files)
                    self.files.append(extent.file)

    def fill_buffer(self, stored: StoredTensor, start: int, into: Bytes, reader: SourceReader) -> None:
        """Read bytes of a tensor from ``start`` on into a buffer; fill with zeros after its end."""
        if isinstance(stored, CastTensor):
            self._fill_cast(stored, start, into, reader)
            return
        if isinstance(stored, ShardRows):
            n_bytes = max(0, min(len(into), stored.nbytes - start))
            self.fill_buffer(stored.whole, stored.start + start, into[:n_bytes], reader)
            into[n_bytes:] = 0
            return
        for source, offset, low, high in stored.find_extents(start, start + len(into)):
            reader.read(self._numbers[source], offset, into[low - start : high - start].data)

    def _fill_cast(self, stored: CastTensor, start: int, into: Bytes, reader: SourceReader) -> None:
        """Read bytes of a cast tensor from ``start`` on into a buffer."""
        target_dtype, source_dtype = (DTYPES[tensor.info.dtype] for tensor in (stored, stored.whole))
        raw = np.empty(len(into) // target_dtype.itemsize * source_dtype.itemsize, np.uint8)
        self.fill_buffer(stored.whole, start // target_dtype.itemsize * source_dtype.itemsize, raw, reader)
        torch.from_numpy(into).view(target_dtype).copy_(torch.from_numpy(raw).view(source_dtype))


def _stored_tensor(stored: StoredTensor) -> StoredTensor:
    """Return the tensor that is stored in files, and that this tensor is derived from."""
    while isinstance(stored, CastTensor | ShardRows):
        stored = stored.whole
    return stored


def _write_range(  # noqa: PLR0917 - the arguments of a thread
    file_range: _TensorRange,
    folder: Path,
    file: PlannedFile,
    sources: _Sources,
    reader: SourceReader,
    buffers: BufferPool,
) -> _Written:
    """Write a range, and return its checksums."""
    data = buffers.get()[: file_range.size]
    sources.fill_buffer(file.tensors[file_range.tensor], file_range.start, data, reader)
    with BufferedWriter(folder / file.name) as writer:
        writer.write(file_range.offset, data.data)
    return _Written(file_range, zlib.crc32(data.data), crc64(data))


def _by_file(files: Sequence[PlannedFile], written: Iterable[_Written]) -> Iterator[tuple[PlannedFile, list[_Written]]]:
    """Group the written ranges by file."""
    by_file: list[list[_Written]] = [[] for _ in files]
    for record in written:
        by_file[record.range.file].append(record)
    return zip(files, by_file, strict=True)


def _finish_file(path: Path, file: PlannedFile, written: Sequence[_Written], buffers: BufferPool) -> None:
    """Write all but the tensors, verify the ranges, and sync the file."""
    crcs = dict.fromkeys(range(len(file.tensors)), 0)
    for (_, tensor, _, size, _), crc, _ in written:
        crcs[tensor] = combine_crc32(crcs[tensor], crc, size)
    with BufferedWriter(path) as writer:
        for offset, data in file.frame.non_tensor_bytes(crcs):
            writer.write(offset, memoryview(data))
        for record in written:
            _verify_range(record, path, buffers)
        writer.sync()


def _verify_range(record: _Written, path: Path, buffers: BufferPool) -> None:
    """Raise ``CorruptCheckpointError`` if a range reads back differently than it was written."""
    data = buffers.get()[: record.range.size]
    with BufferedReader(path) as reader:
        reader.read(record.range.offset, data.data)
    if crc64(data) != record.crc64:
        raise CorruptCheckpointError(
            f"{path} read back differently than it was written, from byte {record.range.offset} on"
        )
