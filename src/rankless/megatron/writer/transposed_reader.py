"""A reader that gives some matrices of a checkpoint the other way round.

:mod:`rankless.megatron.writer.megatron_source` wraps the source in it, on each rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path

from rankless.conversion.tensor_filter import Key
from rankless.engine.integrity.block_verification import ChecksumVerifier
from rankless.engine.io.tensor_sources import (
    ChunkedSource,
    SourceChunk,
    StridedLocation,
    is_row_major,
    row_major_strides,
)
from rankless.engine.plan.element_ranges import boxes_of_range
from rankless.errors import FormatError
from rankless.formats.chunked_tensor import ChunkedTensor
from rankless.formats.chunked_tensor_slices import permute_slices
from rankless.formats.reader import CheckpointValues, FileExtent, Reader, UnreadTensorNote
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import dtype_width
from rankless.ondisk.values import ArrayCodec


class TransposedReader:
    """The checkpoint of ``inner``, but tensors of ``keys`` have rows and columns exchanged.

    The checkpoint's checksums are for other blocks, so :meth:`verify_transposed` checks them.
    """

    def __init__(self, inner: Reader, keys: Collection[Key]) -> None:
        self._inner, self._keys = inner, keys

    @property
    def path(self) -> Path:
        """See :class:`rankless.formats.reader.Reader`."""
        return self._inner.path

    @property
    def format(self) -> str:
        """See :class:`rankless.formats.reader.Reader`."""
        return self._inner.format

    @property
    def fingerprint(self) -> str:
        """See :class:`rankless.formats.reader.Reader`."""
        return self._inner.fingerprint

    @cached_property
    def groups(self) -> Mapping[str, Mapping[str, TensorInfo]]:
        """See :class:`rankless.formats.reader.Reader`."""
        return {
            group: {
                name: TensorInfo(info.dtype, info.shape[::-1]) if (group, name) in self._keys else info
                for name, info in infos.items()
            }
            for group, infos in self._inner.groups.items()
        }

    @property
    def tied(self) -> Mapping[str, Mapping[str, str]]:
        """See :class:`rankless.formats.reader.Reader`."""
        return self._inner.tied

    @property
    def files(self) -> Sequence[Path]:
        """See :class:`rankless.formats.reader.Reader`."""
        return self._inner.files

    @property
    def unread(self) -> Sequence[UnreadTensorNote]:
        """See :class:`rankless.formats.reader.Reader`."""
        return self._inner.unread

    def find_extents(self, group: str, name: str, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`rankless.formats.reader.Reader`."""
        if (group, name) not in self._keys:
            return self._inner.find_extents(group, name, start, stop)
        return self._transposed[group, name].find_extents(start, stop)

    @cached_property
    def _transposed(self) -> Mapping[Key, ChunkedTensor]:
        return {key: self._transpose(key) for key in self._keys}

    def _transpose(self, key: Key) -> ChunkedTensor:
        info = self._inner.groups[key[0]][key[1]]
        extents = self._inner.find_extents(*key, 0, info.nbytes)
        chunks = tuple(chunk for extent in extents for chunk in _chunks_of(extent, info, key[1]))
        return ChunkedTensor(TensorInfo(info.dtype, info.shape[::-1]), permute_slices(chunks, (1, 0)))

    def block_crcs(self, group: str, name: str) -> Sequence[int] | None:
        """See :class:`rankless.formats.reader.Reader`."""
        return None if (group, name) in self._keys else self._inner.block_crcs(group, name)

    def verify_transposed(self) -> None:
        """Compare the transposed tensors with their checksums. Raises ``CorruptCheckpointError``.

        The target calls it on rank 0, when it writes the metadata.
        """
        keys = sorted(self._keys)
        verifier = ChecksumVerifier(self._inner, keys)
        for number, key in enumerate(keys):
            for block in range(len(self._inner.block_crcs(*key) or ())):
                verifier.verify_block(number, block)

    def read_values(self, rank: int, shared_codec: ArrayCodec, rank_codec: ArrayCodec) -> CheckpointValues:
        """See :class:`rankless.formats.reader.Reader`."""
        return self._inner.read_values(rank, shared_codec, rank_codec)

    def check_files(self) -> None:
        """See :class:`rankless.formats.reader.Reader`."""
        self._inner.check_files()

    def is_current(self) -> bool:
        """See :class:`rankless.formats.reader.Reader`."""
        return self._inner.is_current()


def _chunks_of(extent: FileExtent, info: TensorInfo, name: str) -> Iterator[SourceChunk]:
    """Yield the boxes of a tensor that a range of its bytes consists of."""
    width = dtype_width(info.dtype)
    source, strides = extent.file, row_major_strides(info.shape, width)
    if isinstance(source, ChunkedSource) and source.shape == info.shape:
        yield from source.chunks
        return
    file, offset = _find_file(source, extent.offset, name)
    for box in boxes_of_range(info.shape, extent.start // width, extent.stop // width):
        first = sum(index * stride for index, stride in zip(box.offset, strides, strict=True)) - extent.start
        location = StridedLocation(file, offset + first, strides)
        yield SourceChunk(box, partial(_return_location, location), (file, location.offset))


def _find_file(source: object, offset: int, name: str) -> tuple[Path, int]:
    if isinstance(source, ChunkedSource) and len(source.chunks) == 1:
        location = source.chunks[0].location
        if is_row_major(source.shape, location.strides, source.width):
            return location.file, location.offset + offset
    if isinstance(source, Path):
        return source, offset
    raise FormatError(f"{name!r} is stored in pieces that cannot be transposed: convert the checkpoint to native first")


def _return_location(location: StridedLocation) -> StridedLocation:
    return location
