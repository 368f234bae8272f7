"""Byte access to the part of a tensor that this rank holds, wherever and however it lies in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch

from holdfast.engine.plan.ranges import boxes_of_range
from holdfast.ondisk.blocks import crc64
from holdfast.storage.memory import Bytes

#: Up to so many bytes, letting other threads run meanwhile, as NumPy does, takes longer than the copy.
_SMALL = 64 * 2**10


class ByteSink(Protocol):
    """Where bytes that are read go."""

    def view(self, start: int, stop: int) -> Bytes | None:
        """The memory of bytes ``[start, stop)``, or ``None`` where they must be handed to :meth:`write`."""

    def write(self, start: int, data: Bytes) -> None:
        """Take in the bytes from ``start`` on."""


class NullSink:
    """A sink for bytes that are only to be hashed."""

    def view(self, start: int, stop: int) -> Bytes | None:
        """There is no memory."""
        del start, stop
        return None

    def write(self, start: int, data: Bytes) -> None:
        """Forget them."""


class TensorBytes:
    """A rank's part of a tensor as a range of bytes: its elements in row-major order.

    ``dtype`` is the dtype of those bytes; where the tensor has another one, elements are cast on their way in.
    Only a contiguous CPU tensor is reached without a copy; of any other, a copy of the bytes at hand is made.
    """

    __slots__ = ("_cast", "_flat", "_tensor")

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        self._tensor = tensor.detach() if tensor.requires_grad else tensor
        self._cast = None if dtype is None or dtype == tensor.dtype else dtype
        self._flat = None if self._cast is not None else _flat_bytes(self._tensor)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the bytes."""
        return self._cast or self._tensor.dtype

    @property
    def device(self) -> torch.device:
        """Where the part lies."""
        return self._tensor.device

    @property
    def memory(self) -> int:
        """Equal for parts in one memory, 0 for a part of nothing."""
        return self._tensor.untyped_storage().data_ptr()

    @property
    def nbytes(self) -> int:
        """The size of the part in bytes."""
        return self._tensor.numel() * self.dtype.itemsize

    def view(self, start: int, stop: int) -> Bytes | None:
        """Bytes ``[start, stop)`` in place, or ``None`` where they cannot be reached so."""
        return None if self._flat is None else self._flat[start:stop]

    def remote(self, start: int, stop: int) -> torch.Tensor | None:
        """Bytes ``[start, stop)`` in the memory of an accelerator, or ``None`` if they do not lie there as one run."""
        if self._tensor.is_cpu or self._cast is not None or not _is_plain(self._tensor):
            return None
        return _flat(self._tensor).view(torch.uint8).reshape(-1)[start:stop]

    def copy_out(self, start: int, into: Bytes) -> None:
        """Fill ``into`` with the bytes from ``start`` on. ``start`` and the length are whole elements."""
        if self._flat is not None:
            _copy(into, self._flat[start : start + len(into)])
            return
        for part, values in self._boxes(start, into):
            values.copy_(part)

    def crc(self, start: int, stop: int, before: int = 0) -> int:
        """The CRC of bytes ``[start, stop)``, a chunk of them, after others that have the CRC ``before``."""
        data = self.view(start, stop)
        if data is None:
            data = np.empty(stop - start, np.uint8)
            self.copy_out(start, data)
        return crc64(data, before)

    def write(self, start: int, data: Bytes) -> None:
        """Replace the bytes from ``start`` on. ``start`` and the length are whole elements."""
        if self._flat is not None:
            _copy(self._flat[start : start + len(data)], data)
            return
        for part, values in self._boxes(start, data):
            part.copy_(values)

    def _boxes(self, start: int, data: Bytes) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The boxes of the tensor that bytes from ``start`` on make up, each with its share of ``data``."""
        width = self.dtype.itemsize
        done = 0
        for box in boxes_of_range(tuple(self._tensor.shape), start // width, (start + len(data)) // width):
            part = self._tensor[tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))]
            size = part.numel() * width
            yield part, torch.from_numpy(data[done : done + size]).view(self.dtype).view(part.shape)
            done += size


def _copy(into: Bytes, data: Bytes) -> None:
    if len(data) > _SMALL:
        np.copyto(into, data)
    else:
        into.data[:] = data.data


def _flat_bytes(tensor: torch.Tensor) -> Bytes | None:
    if not tensor.is_cpu or not _is_plain(tensor):
        return None
    return _flat(tensor).view(torch.uint8).numpy().reshape(-1)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor whose bytes can be viewed."""
    # A dimension of fewer than two elements may have any stride, and view() would keep it.
    is_plain = tensor.ndim > 0 and tensor.stride(-1) == 1
    return tensor if is_plain else tensor.as_strided((tensor.numel(),), (1,))
