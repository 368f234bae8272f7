"""A destination of the bytes of one stored tensor: the elements of its copies go into their targets, others nowhere.

:mod:`rankless.inference.joined_reads` reads into it, in the threads that read. Elements that no copy has must not be
written anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from rankless.inference.pending_copies import ElementCopy
from rankless.inference.strided_view import Box
from rankless.storage.aligned_memory import Bytes


class ScatteredBytes:
    """The :class:`~rankless.engine.io.byte_sinks.ByteSink` of a stored tensor. Positions are those in the tensor."""

    def __init__(self, copies: Sequence[ElementCopy]) -> None:
        self._copies = copies
        self._memory = [_view_memory(copy) for copy in copies]

    def view(self, start: int, stop: int) -> Bytes | None:
        """Return the memory of bytes ``[start, stop)``, if just one copy has them, and has all of them in order."""
        used = [number for number, copy in enumerate(self._copies) if _overlaps(copy, start, stop)]
        if len(used) != 1:
            return None
        copy, memory = self._copies[used[0]], self._memory[used[0]]
        if memory is None or start < copy.view.offset or stop > copy.view.stop:
            return None
        return memory[start - copy.view.offset : stop - copy.view.offset]

    def write(self, start: int, data: Bytes) -> None:
        """Put the elements among the bytes from ``start`` on into the targets that need them."""
        for copy in self._copies:
            if _overlaps(copy, start, start + len(data)):
                _scatter(copy, start, data)


def _overlaps(copy: ElementCopy, start: int, stop: int) -> bool:
    return copy.view.offset < stop and start < copy.view.stop


def _view_memory(copy: ElementCopy) -> Bytes | None:
    """Return the memory of a target that can be read into: contiguous elements of the same dtype, of this host."""
    target = copy.target
    is_plain = target.is_cpu and target.is_contiguous() and not target.is_conj() and not target.is_neg()
    if not is_plain or target.dtype != copy.dtype or not copy.view.is_contiguous or target.nbytes != copy.view.nbytes:
        return None
    memory: Bytes = target.as_strided((target.numel(),), (1,)).view(torch.uint8).numpy()
    return memory


def _scatter(copy: ElementCopy, start: int, data: Bytes) -> None:
    """Copy the elements that are among ``data``, the bytes of the stored tensor from ``start`` on."""
    view = copy.view
    # Views of one stored tensor may have elements of other sizes: the bytes need not begin or end with a whole one.
    before = (view.offset - start) % view.itemsize
    start, size = start + before, (len(data) - before) // view.itemsize * view.itemsize
    if size <= 0:
        return
    data = data[before : before + size]
    elements = torch.from_numpy(data).view(copy.dtype)
    strides = [dimension.stride // view.itemsize for dimension in view.dimensions]
    for box in view.boxes(start, start + len(data)):
        shape = [indices.stop - indices.start for indices in box.indices]
        copy_box(copy, box, elements.as_strided(shape, strides, (box.offset - start) // view.itemsize))


def copy_box(copy: ElementCopy, box: Box, elements: torch.Tensor) -> None:
    """Copy the elements of a box into the target of a copy."""
    target = copy.target
    repeated = target.ndim - elements.ndim
    # A tensor that was made in inference mode may be changed only there, and each thread has a mode of its own.
    with torch.inference_mode() if target.is_inference() else nullcontext(), torch.no_grad():
        part = target[tuple(slice(*indices) for indices in box.indices)]
        part.copy_(elements.reshape(*elements.shape, *[1] * repeated) if repeated else elements)
