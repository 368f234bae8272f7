"""Optimizer states of ``fully_sharded_model_space``: each rank's part of a parameter is stored flat.

The stored tensor of a parameter of shape [X, Y] has the shape [X / x, Y / y, x * y], where [x, y] is the shape of the
part of a rank. megatron-core 0.7 to 0.15 wrote it.
"""

from __future__ import annotations

import math

from rankless.errors import CorruptCheckpointError
from rankless.formats.dcp.chunked_tensor import ChunkedTensor
from rankless.formats.tensor_slices import Chunks, offset_slices, reshape_flat_slices, unstack_slices
from rankless.ondisk.dtypes import dtype_width
from rankless.ondisk.files import TensorInfo
from rankless.ondisk.read_budget import ReadBudget


def restore_shape(name: str, stored: ChunkedTensor, shape: tuple[int, ...], budget: ReadBudget) -> ChunkedTensor:
    """Return the tensor in its own shape. Raises ``CorruptCheckpointError`` if its parts do not fit into that."""
    grid = stored.info.shape[:-1]
    part = tuple(size // max(1, count) for size, count in zip(shape, grid, strict=False))
    fits = len(grid) == len(shape) and all(size == n * count for size, n, count in zip(shape, part, grid, strict=True))
    if not fits or stored.info.shape[-1:] != (math.prod(part),):
        raise CorruptCheckpointError(
            f"{name!r} is stored with the shape {list(stored.info.shape)}, which does not divide its own shape "
            f"{list(shape)} into parts: the metadata is corrupt"
        )
    return ChunkedTensor(TensorInfo(stored.info.dtype, shape), _place_parts(stored.chunks, grid, part, stored, budget))


def _place_parts(
    chunks: Chunks, grid: tuple[int, ...], part: tuple[int, ...], stored: ChunkedTensor, budget: ReadBudget
) -> Chunks:
    """Return the flat chunks of all cells of the grid as boxes of the tensor."""
    cells: dict[tuple[int, ...], Chunks] = {(): chunks}
    for _ in grid:
        cells = {
            (*cell, index): inner
            for cell, outer in cells.items()
            for index, inner in unstack_slices(outer, budget).items()
        }
    width = dtype_width(stored.info.dtype)
    placed: list[Chunks] = []
    for cell, flat in cells.items():
        offset = tuple(index * size for index, size in zip(cell, part, strict=True))
        placed.append(offset_slices(reshape_flat_slices(flat, part, width), offset))
    return tuple(chunk for of_cell in placed for chunk in of_cell)
