"""A tensor whose elements, in row-major order, are in pieces of other tensors."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import CorruptCheckpointError
from holdfast.formats.deepspeed.partitions import PlacedParameter
from holdfast.formats.reader import FileExtent
from holdfast.formats.stored_tensor import StoredTensor
from holdfast.ondisk.dtypes import dtype_width
from holdfast.ondisk.files import TensorInfo


class TensorSlice(NamedTuple):
    """Bytes ``[start, stop)`` of a tensor."""

    stored: StoredTensor
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class ConcatenatedTensor(StoredTensor):
    """A tensor of slices of other tensors, one after another."""

    info: TensorInfo
    slices: Sequence[TensorSlice]

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(stop - start for _, start, stop in self.slices))

    def find_extents(self, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`holdfast.formats.stored_tensor.StoredTensor`."""
        extents: list[FileExtent] = []
        for number in range(bisect_right(self._ends, start), len(self.slices)):
            stored, first, last = self.slices[number]
            begin = self._ends[number] - (last - first)
            if begin >= stop:
                break
            low, high = max(start, begin), min(stop, self._ends[number])
            shift = begin - first
            extents += [
                FileExtent(extent.file, extent.offset, extent.start + shift, extent.stop + shift)
                for extent in stored.find_extents(low - shift, high - shift)
            ]
        return extents


def concatenate_pieces(
    parameter: PlacedParameter, tensors: Sequence[StoredTensor], paths: Sequence[Path]
) -> ConcatenatedTensor:
    """Return the whole tensor of a parameter, given the flat tensor of each rank, and its file.

    Raises ``CorruptCheckpointError`` naming a file whose tensor is too small or has another dtype.
    """
    dtype = tensors[0].info.dtype
    width = dtype_width(dtype)
    for piece in parameter.pieces:
        tensor = tensors[piece.rank]
        if tensor.info.dtype != dtype or piece.stop * width > tensor.info.nbytes:
            raise CorruptCheckpointError(
                f"{paths[piece.rank]}: the part of {parameter.name!r:.100} on this rank has another dtype or size than "
                f"its shape {list(parameter.shape)} needs: the files are from two saves"
            )
    slices = [TensorSlice(tensors[piece.rank], piece.start * width, piece.stop * width) for piece in parameter.pieces]
    return ConcatenatedTensor(TensorInfo(dtype, parameter.shape), slices)
