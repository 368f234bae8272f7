"""Joining the tensors that tensor-parallel ranks have of a parameter, by Megatron's fixed rules.

:mod:`rankless.megatron.reader.legacy_torch` calls it on each rank that opens an iteration. The rules must be the same
as Megatron's: a wrong one would mix up rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rankless.engine.io.tensor_sources import SourceChunk
from rankless.engine.plan.element_ranges import IndexBox
from rankless.errors import CorruptCheckpointError
from rankless.formats.chunked_tensor_slices import (
    Chunks,
    JoinedTensor,
    cut_slice,
    offset_along,
    offset_slices,
    slice_along,
    whole_box,
)
from rankless.formats.stored_tensor import StoredTensor
from rankless.formats.torchfile.torch_placeholders import TorchTensor
from rankless.megatron.reader.rank_parts import GATED, RankPart
from rankless.ondisk.data_files import TensorInfo

#: The parameters that ranks divide by columns of the matrix, which are its first dimension, and by rows.
_FIRST = re.compile(
    r"(?:.*\.)?(?:word_embeddings\.weight|output_layer\.weight|(?:linear_qkv|linear_fc1)\.(?:weight|bias))"
)
_SECOND = re.compile(r"(?:.*\.)?(?:linear_proj|linear_fc2)\.weight")


@dataclass(frozen=True)
class RankTensors:
    """The tensors of one name of all ranks of a stage; ``None`` for a rank that has none."""

    name: str
    tensors: Sequence[TorchTensor | None]
    source: str


@dataclass(frozen=True)
class JoinedRanks:
    """A whole tensor, the part of it that each rank has, and copies of it if ranks have equal ones."""

    tensor: JoinedTensor
    parts: Sequence[RankPart]
    copies: Sequence[StoredTensor] = ()


def join_ranks(ranks: RankTensors, *, is_gated: bool) -> JoinedRanks:
    """Return the whole tensor. Raises ``CorruptCheckpointError`` if ranks have different shapes or dtypes.

    With ``is_gated`` each rank's ``linear_fc1`` has rows of the gate, and then as many of the projection.
    """
    tensors = [tensor for tensor in ranks.tensors if tensor is not None]
    if len(tensors) < len(ranks.tensors) or any(tensor.info != tensors[0].info for tensor in tensors):
        raise CorruptCheckpointError(
            f"{ranks.source}: tensor-parallel ranks have {ranks.name!r} with different shapes, or some have none"
        )
    info, count = tensors[0].info, len(tensors)
    dim = 0 if _FIRST.fullmatch(ranks.name) else 1 if _SECOND.fullmatch(ranks.name) else None
    if dim is None or (count == 1 and not is_gated):
        part = RankPart(ranks.name, (whole_box(info.shape),), 1, 0)
        joined = JoinedTensor(info, (chunk_of(tensors[0]),) if info.nbytes else ())
        return JoinedRanks(joined, [part] * count, tensors if count > 1 else ())
    pieces = 2 if is_gated and ranks.name.endswith(GATED) else 1
    if info.shape[dim] % pieces:
        raise CorruptCheckpointError(f"{ranks.source}: {ranks.name!r} has an odd number of rows, and args have swiglu")
    shape = slice_along(info.shape, dim, 0, count * info.shape[dim]).shape
    chunks: list[Chunks] = []
    parts = []
    for rank, tensor in enumerate(tensors):
        boxes = _boxes_of(info.shape, dim, pieces, rank, count)
        for number, box in enumerate(boxes):
            size = info.shape[dim] // pieces
            inside = cut_slice((chunk_of(tensor),), slice_along(info.shape, dim, number * size, (number + 1) * size))
            chunks.append(offset_slices(inside, offset_along(shape, dim, box.offset[dim])))
        parts.append(RankPart(ranks.name, boxes, count, rank))
    joined = JoinedTensor(TensorInfo(info.dtype, shape), tuple(chunk for row in chunks for chunk in row))
    return JoinedRanks(joined, parts)


def _boxes_of(shape: tuple[int, ...], dim: int, pieces: int, rank: int, count: int) -> tuple[IndexBox, ...]:
    """Return the boxes of the whole tensor that a rank has: one, or one of the gate and one of the projection."""
    size = shape[dim] // pieces
    starts = ((number * count + rank) * size for number in range(pieces))
    return tuple(slice_along(shape, dim, start, start + size) for start in starts)


def chunk_of(tensor: TorchTensor) -> SourceChunk:
    """Return a tensor of a file as one chunk."""
    window = tensor.storage.window
    return SourceChunk(whole_box(tensor.info.shape), tensor.find_location, (window.path, window.start))
