"""The layout of a tensor with shards of other sizes than the rule of its placements gives them. Pure functions.

A rank reports the boxes of the tensor that it holds, or only the sizes of its shard. If it reports sizes, the shards
lie side by side in the order of their mesh, so each begins where the one before it ends. For example, shards of 5, 0
and 3 rows begin at rows 0, 5 and 5. All boxes together must tile the tensor.

:mod:`rankless.engine.plan.global_spec` calls it on every rank, inside the vote on the plan; so its errors become
common.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from rankless.engine.plan.element_ranges import IndexBox
from rankless.engine.plan.layout_types import (
    BoxSharded,
    MeshShape,
    PlacementLayout,
    Sharded,
    axes_by_dim,
    unravel_index,
)
from rankless.engine.plan.shard_byte_ranges import shard_shape
from rankless.engine.plan.tensor_specs import HeldPieces
from rankless.errors import UnsupportedTensorError


class ReportedPart(NamedTuple):
    """The report of a rank about a tensor: its layout, ``None`` for a plain tensor, and its pieces if there are any."""

    layout: PlacementLayout | None
    pieces: HeldPieces | None


def lay_out_pieces(subject: str, shape: tuple[int, ...], parts: Mapping[int, ReportedPart]) -> PlacementLayout | None:
    """Return the layout of a tensor, given each rank's report. ``None`` if every rank holds all of it.

    Raises ``UnsupportedTensorError``, which names ``subject``, if sizes do not add up to the shape, or if boxes do not
    tile the tensor.
    """
    held: dict[int, tuple[IndexBox, ...]] = {}
    for layout in dict.fromkeys(part.layout for part in parts.values()):
        of_layout = {rank: part for rank, part in parts.items() if part.layout == layout}
        places = {} if layout is None else _place_shards(subject, shape, layout, parts)
        for rank, part in of_layout.items():
            boxes = part.pieces.boxes if part.pieces is not None else None
            if boxes is None and layout is None:
                boxes = (IndexBox((0,) * len(shape), shape),)
            elif boxes is None:
                boxes = (places[rank],) if rank in places else ()
            held[rank] = tuple(sorted(box for box in boxes if math.prod(box.shape)))
    shards = sorted({boxes for boxes in held.values() if boxes})
    _check_tiling(subject, shape, shards)
    if len(shards) == 1 and all(held.values()):
        return None
    numbers = {boxes: number for number, boxes in enumerate(shards)}
    holders = sorted(rank for rank, boxes in held.items() if boxes)
    placement = BoxSharded(tuple(shards), tuple(numbers[held[rank]] for rank in holders))
    return PlacementLayout(MeshShape((len(holders),), tuple(holders)), (placement,))


def _place_shards(
    subject: str, shape: tuple[int, ...], layout: PlacementLayout, parts: Mapping[int, ReportedPart]
) -> dict[int, IndexBox]:
    """Return the box of each rank of a mesh from the sizes of all its shards."""
    mesh = layout.mesh
    of_layout = [part.pieces for part in parts.values() if part.layout == layout]
    if all(pieces is not None and pieces.boxes is not None for pieces in of_layout):
        return {}
    missing = sorted({*mesh.ranks} - parts.keys())
    if missing:
        raise UnsupportedTensorError(
            f"{subject} has shards of other sizes than its placements give them, and rank {missing[0]} of its mesh did "
            "not pass the tensor: the places of the others are unknown; all ranks of a tensor's mesh must pass it"
        )
    sizes = np.array([_size_of(shape, layout, index, parts[rank]) for index, rank in enumerate(mesh.ranks)], np.int64)
    sizes = sizes.reshape(*mesh.shape, len(shape))
    axes_of_dim = axes_by_dim(layout)
    _check_order(subject, layout, axes_of_dim)
    offsets = np.zeros_like(sizes)
    for dim, total in enumerate(shape):
        axes = axes_of_dim.get(dim, [])
        others = [axis for axis in range(len(mesh.shape)) if axis not in axes]
        along = sizes[..., dim].transpose([*others, *axes])
        lines = along.reshape(math.prod(mesh.shape[axis] for axis in others), -1)
        ends = np.cumsum(lines, axis=1)
        wrong = np.flatnonzero(ends[:, -1] != total)
        if len(wrong):
            raise UnsupportedTensorError(
                f"{subject} has shape {list(shape)}, but its shards have the sizes {lines[wrong[0]].tolist()} in "
                f"dimension {dim}: these add up to {ends[wrong[0], -1]}, not {total}; pass the shape that all shards "
                "have together to DTensor.from_local"
            )
        before = (ends - lines).reshape(along.shape)
        offsets[..., dim] = before.transpose(np.argsort([*others, *axes]))
    rows = zip(
        mesh.ranks, offsets.reshape(-1, len(shape)).tolist(), sizes.reshape(-1, len(shape)).tolist(), strict=True
    )
    return {rank: IndexBox(tuple(offset), tuple(size)) for rank, offset, size in rows}


def _size_of(shape: tuple[int, ...], layout: PlacementLayout, index: int, part: ReportedPart) -> tuple[int, ...]:
    if part.pieces is not None and part.pieces.sizes:
        return part.pieces.sizes
    return shard_shape(shape, layout.placements, layout.mesh.shape, unravel_index(index, layout.mesh.shape))


def _check_order(subject: str, layout: PlacementLayout, axes_of_dim: Mapping[int, Sequence[int]]) -> None:
    """Raise ``UnsupportedTensorError`` if a shard would not be one box, but have strides."""
    sizes = layout.mesh.shape
    for axes in axes_of_dim.values():
        for number, axis in enumerate(axes):
            placement = layout.placements[axis]
            split = math.prod(sizes[other] for other in axes[:number] if other > axis)
            if isinstance(placement, Sharded) and placement.split != split:
                raise UnsupportedTensorError(
                    f"{subject} has shards of other sizes than its placements {layout.placements} give them: with "
                    "these strides their places are unknown; shard it evenly"
                )


def _check_tiling(subject: str, shape: tuple[int, ...], shards: Sequence[tuple[IndexBox, ...]]) -> None:
    """Raise ``UnsupportedTensorError`` unless the boxes of all shards contain each element once."""
    problem = _explain_tiling(shape, tuple(box for boxes in shards for box in boxes))
    if problem:
        raise UnsupportedTensorError(
            f"{subject} of shape {list(shape)} cannot be put together from what the ranks hold: {problem}; ranks must "
            "hold equal parts of it, or parts that do not overlap, and all of it together"
        )


@lru_cache(maxsize=4096)
def _explain_tiling(shape: tuple[int, ...], boxes: tuple[IndexBox, ...]) -> str:
    """Return a text about the fault of boxes that should tile a tensor; an empty string if there is none."""
    for first, other in _iter_overlaps(boxes):
        return f"the parts {_describe(first)} and {_describe(other)} overlap"
    lacking = math.prod(shape) - sum(math.prod(box.shape) for box in boxes)
    return f"{lacking} of its elements are on no rank" if lacking else ""


def _iter_overlaps(boxes: Sequence[IndexBox]) -> Iterator[tuple[IndexBox, IndexBox]]:
    ordered = sorted(boxes)
    starts = np.array([box.offset for box in ordered], np.int64).reshape(len(ordered), -1)
    stops = starts + np.array([box.shape for box in ordered], np.int64).reshape(len(ordered), -1)
    for number in range(1, len(ordered)):
        inside = (starts[:number] < stops[number]) & (starts[number] < stops[:number])
        for other in np.flatnonzero(inside.all(axis=1))[:1]:
            yield ordered[other], ordered[number]


def _describe(box: IndexBox) -> str:
    return f"[{', '.join(f'{start}:{start + size}' for start, size in zip(box.offset, box.shape, strict=True))}]"
