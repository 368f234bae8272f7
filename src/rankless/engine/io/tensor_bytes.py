"""Byte access to this rank's shard of a tensor, on any device and with any strides.

Bytes of accelerators are copied on streams of rankless, see :mod:`rankless.engine.io.device_streams`. These must follow
the kernels that the caller of the save or load has enqueued, before anything is copied here.

A save wraps the tensors that it has captured, and a load its targets, on each rank. ``view``, ``copy_out`` and
``write`` are called from the threads of writes and reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import numpy as np
import torch

from rankless.engine.io.device_streams import copy_stream_of
from rankless.engine.plan.element_ranges import boxes_of_range
from rankless.engine.plan.file_ranges import CHUNK
from rankless.ondisk.block_crcs import crc64
from rankless.storage.aligned_memory import Bytes, memory_at

#: The bytes to copy at a time: a slice is hashed while it is still in the processor's nearest cache. A copy from an
#: accelerator has a delay, and goes past the cache.
_CACHED_SLICE, _DEVICE_SLICE = 256 * 2**10, CHUNK

#: Up to this size in bytes, a view of the tensor, and releasing the GIL, as NumPy does, take longer than the copy.
_SMALL = 64 * 2**10


class TensorVersion(NamedTuple):
    """The address of a tensor's bytes, and torch's count of changes in place; -1 if torch does not count them."""

    address: int
    changes: int


class TensorBytes:
    """A rank's shard of a tensor as a range of bytes: its elements in row-major order.

    ``dtype`` is the dtype of those bytes. If the tensor has a different one, elements are cast when they are written.
    Only a contiguous CPU tensor is accessed in place; of any other, the requested bytes are copied.
    """

    __slots__ = ("_cast", "_flat", "_in_place", "_tensor")

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        self._tensor = tensor.detach()  # if other memory is assigned to the tensor's data, this has what it had before
        self._cast = None if dtype is None or dtype == tensor.dtype else dtype
        self._in_place = self._cast is None and tensor.is_cpu and _is_plain(tensor)
        self._flat: Bytes | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the bytes."""
        return self._cast or self._tensor.dtype

    @property
    def device(self) -> torch.device:
        """The device of the shard."""
        return self._tensor.device

    @property
    def slice_bytes(self) -> int:
        """The number of bytes to copy at a time."""
        return _CACHED_SLICE if self._tensor.is_cpu else _DEVICE_SLICE

    @property
    def storage_address(self) -> int:
        """The address of the storage: equal for shards that share memory, 0 for an empty shard."""
        return self._tensor.untyped_storage().data_ptr()

    @property
    def storage_span(self) -> tuple[int, int]:
        """The addresses of the first byte of the storage, and of the byte after its last one."""
        storage = self._tensor.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()

    @property
    def version(self) -> TensorVersion:
        """The address of the shard, and the number of its tracked changes in place.

        Writes to ``.data``, and writes of raw kernels, are not counted.
        """
        is_counted = not self._tensor.is_inference()
        return TensorVersion(self._tensor.data_ptr(), self._tensor._version if is_counted else -1)  # noqa: SLF001

    @property
    def nbytes(self) -> int:
        """The size of the shard in bytes."""
        return self._tensor.numel() * self.dtype.itemsize

    def view(self, start: int, stop: int) -> Bytes | None:
        """Return bytes ``[start, stop)`` in place, or ``None`` if they cannot be accessed in place."""
        if not self._in_place:
            return None
        if self._flat is None:
            self._flat = _as_flat(self._tensor).view(torch.uint8).numpy().reshape(-1)
        return self._flat[start:stop]

    def view_on_device(self, start: int, stop: int) -> torch.Tensor | None:
        """Return bytes ``[start, stop)`` in the memory of an accelerator; ``None`` if they are not contiguous there."""
        if self._tensor.is_cpu or self._cast is not None or not _is_plain(self._tensor):
            return None
        return _as_flat(self._tensor).view(torch.uint8).reshape(-1)[start:stop]

    def copy_out(self, start: int, into: Bytes) -> None:
        """Fill ``into`` with the bytes from ``start`` on. ``start`` and the length are whole elements."""
        if self._in_place and len(into) <= _SMALL:
            into.data[:] = self._memory()[start : start + len(into)]
            return
        memory = self.view(start, start + len(into))
        if memory is not None:
            np.copyto(into, memory)
            return
        with _copying(self._tensor) as has_stream:
            self.gather(start, torch.from_numpy(into), non_blocking=has_stream)

    def gather(self, start: int, into: torch.Tensor, *, non_blocking: bool = True) -> None:
        """Enqueue copies of the bytes from ``start`` on ``into`` a flat tensor of bytes, on the current stream."""
        for box_view, values in self._iter_boxes(start, into):
            values.copy_(box_view, non_blocking=non_blocking)

    def compute_crc(self, start: int, stop: int, before: int = 0) -> int:
        """Return the CRC of bytes ``[start, stop)``, at most a chunk, after bytes with the CRC ``before``."""
        if self._in_place and 0 < stop - start <= _SMALL:
            return crc64(self._memory()[start:stop], before)
        data = self.view(start, stop)
        if data is None:
            data = np.empty(stop - start, np.uint8)
            self.copy_out(start, data)
        return crc64(data, before)

    def write(self, start: int, data: Bytes) -> None:
        """Replace the bytes from ``start`` on. ``start`` and the length are whole elements."""
        if self._in_place and len(data) <= _SMALL:
            self._memory()[start : start + len(data)] = data.data
            return
        memory = self.view(start, start + len(data))
        if memory is not None:
            np.copyto(memory, data)
            return
        with _copying(self._tensor) as has_stream:
            self.scatter(start, data, non_blocking=has_stream)

    def _memory(self) -> memoryview:
        """Return all bytes of a shard that is accessed in place; valid only as long as the shard."""
        return memory_at(self._tensor.data_ptr(), self._tensor.nbytes)

    def scatter(self, start: int, data: Bytes, *, non_blocking: bool = True) -> None:
        """Enqueue copies of ``data`` to the bytes from ``start`` on, on the current stream."""
        # A tensor that was made in inference mode may be changed only there, and each thread has a mode of its own.
        with torch.inference_mode() if self._tensor.is_inference() else nullcontext():
            for box_view, values in self._iter_boxes(start, torch.from_numpy(data)):
                box_view.copy_(values, non_blocking=non_blocking)

    def _iter_boxes(self, start: int, data: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the boxes of the tensor that contain the bytes from ``start`` on, each with its part of ``data``."""
        width = self.dtype.itemsize
        done = 0
        for box in boxes_of_range(tuple(self._tensor.shape), start // width, (start + len(data)) // width):
            box_view = self._tensor[
                tuple(slice(first, first + size) for first, size in zip(box.offset, box.shape, strict=True))
            ]
            size = box_view.numel() * width
            yield box_view, data[done : done + size].view(self.dtype).view(box_view.shape)
            done += size


@contextmanager
def _copying(tensor: torch.Tensor) -> Iterator[bool]:
    """Enqueue copies of a tensor inside the ``with`` block, and wait for them at its end.

    Yields whether there is a stream to wait for. Without one, as on MPS, each copy must block.
    """
    stream = None if tensor.is_cpu else copy_stream_of(tensor.device)
    if stream is None:
        yield False
        return
    with stream.enqueue():
        yield True
        event = stream.record_event()
    stream.wait_for(event)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _as_flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a contiguous tensor that torch can view as bytes."""
    # A dimension of fewer than two elements may have any stride, and view() would keep it.
    is_plain = tensor.ndim > 0 and tensor.stride(-1) == 1
    return tensor if is_plain else tensor.as_strided((tensor.numel(),), (1,))
