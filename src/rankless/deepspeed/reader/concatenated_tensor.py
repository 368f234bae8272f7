"""A tensor with elements, in row-major order, in pieces of the flat tensors of ranks.

The joining of optimizers and models makes them, on each rank; loads read their pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rankless.deepspeed.reader.zero_partitions import PlacedParameter
from rankless.errors import CorruptCheckpointError
from rankless.formats.reader import FileExtent
from rankless.formats.stored_tensor import StoredTensor
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import dtype_width


@dataclass(frozen=True, eq=False)
class ConcatenatedTensor(StoredTensor):
    """The tensor of a parameter, or of a state of it. ``ranks`` are the flat tensors, which all parameters share.

    Pieces are computed when they are read, because there may be very many.
    """

    info: TensorInfo
    placed: PlacedParameter
    ranks: Sequence[StoredTensor]

    def find_extents(self, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`rankless.formats.stored_tensor.StoredTensor`."""
        width = dtype_width(self.info.dtype)
        extents: list[FileExtent] = []
        for rank, first, last, position in self.placed.find_pieces(start // width, -(-stop // width)):
            shift = (position - first) * width
            low, high = max(start, first * width + shift), min(stop, last * width + shift)
            extents += [
                FileExtent(extent.file, extent.offset, extent.start + shift, extent.stop + shift)
                for extent in self.ranks[rank].find_extents(low - shift, high - shift)
            ]
        return extents


def concatenate_ranks(placed: PlacedParameter, ranks: Sequence[StoredTensor]) -> ConcatenatedTensor:
    """Return the whole tensor of a parameter, given flat tensors that :func:`check_ranks` has checked."""
    return ConcatenatedTensor(TensorInfo(ranks[0].info.dtype, placed.shape), placed, ranks)


def check_ranks(ranks: Sequence[StoredTensor], paths: Sequence[Path], needed: Sequence[int], subject: str) -> None:
    """Check that the flat tensors have one dtype, and the number of elements that is ``needed`` of each.

    Raises ``CorruptCheckpointError`` naming the first file with a tensor that does not fit.
    """
    for tensor, path, elements in zip(ranks, paths, needed, strict=True):
        width = dtype_width(tensor.info.dtype)
        if tensor.info.dtype != ranks[0].info.dtype or tensor.info.nbytes < elements * width:
            raise CorruptCheckpointError(
                f"{path}: {subject}: {tensor.info.nbytes // width} elements of {tensor.info.dtype}, but {elements} of "
                f"{ranks[0].info.dtype} are needed: the files are from two saves"
            )
