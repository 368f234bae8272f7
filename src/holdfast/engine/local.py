"""Byte access to the part of a tensor that this rank holds, wherever and however it lies in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from holdfast.engine.runs import boxes

Bytes = npt.NDArray[np.uint8]


class Sink(Protocol):
    """Where bytes that are read go."""

    def view(self, start: int, stop: int) -> Bytes | None:
        """The memory of bytes ``[start, stop)``, or ``None`` where they must be handed to :meth:`write`."""

    def write(self, start: int, data: Bytes) -> None:
        """Take in the bytes from ``start`` on."""


class Nowhere:
    """A sink for bytes that are only to be hashed."""

    def view(self, start: int, stop: int) -> Bytes | None:
        """There is no memory."""
        del start, stop
        return None

    def write(self, start: int, data: Bytes) -> None:
        """Forget them."""


class LocalPart:
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
    def nbytes(self) -> int:
        """The size of the part in bytes."""
        return self._tensor.numel() * self.dtype.itemsize

    def view(self, start: int, stop: int) -> Bytes | None:
        """Bytes ``[start, stop)`` in place, or ``None`` where they cannot be reached so."""
        return None if self._flat is None else self._flat[start:stop]

    def read(self, start: int, stop: int) -> Bytes:
        """Bytes ``[start, stop)``, to be read only."""
        if self._flat is not None:
            return self._flat[start:stop]
        parts = [_bytes_of(part) for part in self._boxes(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, np.uint8)

    def write(self, start: int, data: Bytes) -> None:
        """Replace the bytes from ``start`` on. ``start`` and the length are whole elements."""
        if self._flat is not None:
            self._flat[start : start + len(data)] = data
            return
        done = 0
        for part in self._boxes(start, start + len(data)):
            values = torch.empty(part.shape, dtype=self.dtype)
            flat = _as_bytes(values)
            flat[:] = data[done : done + len(flat)]
            part.copy_(values)
            done += len(flat)

    def _boxes(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        width = self.dtype.itemsize
        for box in boxes(tuple(self._tensor.shape), start // width, stop // width):
            yield self._tensor[tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))]


def _flat_bytes(tensor: torch.Tensor) -> Bytes | None:
    reachable = tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return _as_bytes(tensor) if reachable else None


def _bytes_of(part: torch.Tensor) -> Bytes:
    return _as_bytes(part.resolve_conj().resolve_neg().cpu().contiguous())


def _as_bytes(contiguous: torch.Tensor) -> Bytes:
    # A dimension of fewer than two elements may have any stride, and view() would keep it.
    plain = contiguous.ndim > 0 and contiguous.stride(-1) == 1
    flat = contiguous if plain else contiguous.as_strided((contiguous.numel(),), (1,))
    return flat.view(torch.uint8).numpy().reshape(-1)
