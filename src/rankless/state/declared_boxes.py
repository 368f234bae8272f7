"""Boxes of a tensor that a local tensor says it holds: torch's ``CheckpointableTensor``, and lists of chunks.

A ``CheckpointableTensor`` of torch 2.14 and newer is a plain tensor with four attributes: ``global_shape``, and of each
box ``global_offsets``, ``local_offsets`` and ``local_sizes``. Elements in no box are padding. The local tensor of a
DTensor may have ``__create_chunk_list__``, as Megatron-FSDP's have.

:mod:`rankless.state.tensor_views` asks it on each rank for each tensor of a save or load. A load unpacks in the vote
"putting values in place".
"""

from __future__ import annotations

import itertools
import math
from functools import cached_property
from typing import Any

import msgspec
import torch

from rankless.engine.plan.element_ranges import IndexBox
from rankless.errors import UnsupportedTensorError

_ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


class DeclaredBoxes(msgspec.Struct, frozen=True, dict=True):
    """The boxes of a tensor of ``shape`` that a local tensor of ``local_shape`` has, and the start of each in it."""

    shape: tuple[int, ...]
    boxes: tuple[IndexBox, ...]
    starts: tuple[tuple[int, ...], ...]
    local_shape: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """True if the local tensor is all of the tensor."""
        return self.local_shape == self.shape == (self.boxes[0].shape if self.boxes else None)

    def slices(self) -> list[tuple[slice, ...]]:
        """Return the place of each box in the local tensor."""
        return [
            tuple(slice(start, start + size) for start, size in zip(starts, box.shape, strict=True))
            for starts, box in zip(self.starts, self.boxes, strict=True)
        ]

    @cached_property
    def order(self) -> torch.Tensor | None:
        """The order of all elements of the boxes in the tensor; ``None`` if the boxes follow one another in it."""
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        ends = [
            tuple(
                sum(stride * at for stride, at in zip(strides, corner, strict=True))
                for corner in (
                    box.offset,
                    [start + size - 1 for start, size in zip(box.offset, box.shape, strict=True)],
                )
            )
            for box in self.boxes
        ]
        if all(last < first for (_, last), (first, _) in itertools.pairwise(ends)):
            return None
        positions = [
            sum(
                (torch.arange(start, start + size) * stride).reshape(
                    [-1 if dim == axis else 1 for axis in range(len(strides))]
                )
                for dim, (start, size, stride) in enumerate(zip(box.offset, box.shape, strides, strict=True))
            )
            for box in self.boxes
        ]
        return torch.cat([position.reshape(-1) for position in positions]).argsort()  # type: ignore[union-attr]


class PackedBoxes(msgspec.Struct, frozen=True):
    """The elements of several boxes of a tensor, copied into one buffer in the order that they have in the tensor."""

    tensor: torch.Tensor
    declared: DeclaredBoxes

    def pack(self) -> torch.Tensor:
        """Return a new buffer with the elements."""
        with torch.no_grad():
            elements = torch.cat([self.tensor[place].reshape(-1) for place in self.declared.slices()])
            order = self.declared.order
            return elements if order is None else elements[order.to(elements.device)]

    def unpack(self, buffer: torch.Tensor) -> None:
        """Copy the elements of a buffer back into the tensor; padding stays as it is."""
        elements, order = buffer, self.declared.order
        if order is not None:
            elements = torch.empty_like(buffer)
            elements[order.to(buffer.device)] = buffer
        done = 0
        with torch.no_grad():
            for place in self.declared.slices():
                target = self.tensor[place]
                target.copy_(elements[done : done + target.numel()].view(target.shape))
                done += target.numel()


def is_checkpointable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has the attributes of a ``CheckpointableTensor``."""
    return hasattr(tensor, "global_offsets") and all(hasattr(tensor, name) for name in _ATTRIBUTES)


def boxes_of_checkpointable(tensor: torch.Tensor, subject: str) -> DeclaredBoxes | None:
    """Return the boxes of a ``CheckpointableTensor``; ``None`` for any other plain tensor.

    Raises ``UnsupportedTensorError``, which names ``subject``, if they are not inside the tensors.
    """
    if not is_checkpointable(tensor):
        return None
    source: Any = tensor
    shape, *columns = (getattr(source, name) for name in _ATTRIBUTES)
    offsets, starts, sizes = ([tuple(map(int, row)) for row in column] for column in columns)
    if not len(offsets) == len(starts) == len(sizes):
        raise UnsupportedTensorError(
            f"{subject} has {len(offsets)} global_offsets, {len(starts)} local_offsets and {len(sizes)} local_sizes: "
            "it must have one of each for each part"
        )
    return _declare(
        tuple(map(int, shape)), tuple(tensor.shape), list(zip(offsets, starts, sizes, strict=True)), subject
    )


def boxes_of_chunk_list(local: torch.Tensor, shape: tuple[int, ...], subject: str) -> DeclaredBoxes | None:
    """Return the boxes of the local tensor of a DTensor of ``shape`` if it has a list of chunks, else ``None``.

    Several chunks must be stacked in the first dimension. Raises ``UnsupportedTensorError``, which names ``subject``.
    """
    make_list = getattr(local, "__create_chunk_list__", None)
    if make_list is None:
        return None
    rows, reached = [], 0
    for chunk in make_list():
        offset, size = tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes))
        rows.append((offset, (reached, *(0 for _ in size[1:])) if size else (), size))
        reached += size[0] if size else 0
    filled = sum(math.prod(size) for _, _, size in rows)
    if filled != local.numel():
        raise UnsupportedTensorError(
            f"{subject} has a list of chunks with {filled} elements, and {local.numel()} elements on this rank"
        )
    return _declare(shape, tuple(local.shape), rows, subject)


def _declare(
    shape: tuple[int, ...],
    local_shape: tuple[int, ...],
    rows: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]],
    subject: str,
) -> DeclaredBoxes:
    rows = [row for row in rows if math.prod(row[2])]
    for offset, start, size in rows:
        if not (_is_inside(offset, size, shape) and _is_inside(start, size, local_shape)):
            raise UnsupportedTensorError(
                f"{subject} says that it holds a part of shape {list(size)} at {list(offset)} of a tensor of shape "
                f"{list(shape)}, at {list(start)} of its own shape {list(local_shape)}: that is not inside of them"
            )
    rows.sort()
    boxes = tuple(IndexBox(offset, size) for offset, _, size in rows)
    return DeclaredBoxes(shape, boxes, tuple(start for _, start, _ in rows), local_shape)


def _is_inside(start: tuple[int, ...], size: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(start) == len(size) == len(shape) and all(
        first >= 0 and extent >= 0 and first + extent <= total
        for first, extent, total in zip(start, size, shape, strict=True)
    )
