"""Placeholders for torch's objects in unpickled trees: dtypes, devices, storages, and tensors by their locations.

:mod:`rankless.formats.torchfile.allowed_globals` makes them while a pickle is read; they reach loads as the tensors of
a reader. Reading them needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from rankless.engine.io.tensor_sources import (
    ChunkedSource,
    SourceChunk,
    StridedLocation,
    is_row_major,
    order_dimensions,
    row_major_strides,
)
from rankless.engine.plan.element_ranges import IndexBox
from rankless.formats.reader import FileExtent
from rankless.formats.stored_tensor import StoredTensor
from rankless.formats.torchfile.torch_dtypes import dtype_width
from rankless.formats.torchfile.zip_reader import FileWindow
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import BY_TORCH_NAME, TORCH_NAMES

#: The limit of a tensor's size in bytes.
_LARGEST = 2**63


class TorchSize(tuple[int, ...]):
    """A ``torch.Size``."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class TorchDtype:
    """A ``torch.dtype``, by its name without ``torch.``."""

    name: str


@dataclass(frozen=True, slots=True)
class TorchDevice:
    """A ``torch.device``, by its text."""

    text: str


@dataclass(frozen=True, slots=True)
class TorchLayout:
    """A ``torch.layout``, by its text."""

    text: str


@dataclass(frozen=True, slots=True)
class TorchStorageType:
    """A storage class, by the name of its dtype; ``uint8`` for untyped storages."""

    dtype: str


@dataclass(frozen=True)
class TorchStorage:
    """A storage of ``nbytes`` bytes in a file. ``find`` returns its offset in ``window``; it is called when needed."""

    dtype: str
    nbytes: int
    window: FileWindow
    find: Callable[[], int]

    @property
    def width(self) -> int:
        """The width of an element, in bytes."""
        return dtype_width(self.dtype)

    @cached_property
    def start(self) -> int:
        """The offset of the storage in the file. Raises ``CorruptCheckpointError`` if its entry is invalid."""
        return self.window.start + self.find()


@dataclass(frozen=True)
class TorchTensor(StoredTensor):
    """A view of a storage. ``offset`` and ``strides`` count elements."""

    info: TensorInfo
    storage: TorchStorage
    offset: int
    strides: tuple[int, ...]

    @classmethod
    def make_view(
        cls, storage: TorchStorage, dtype: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> TorchTensor:
        """Make a view of a storage. Raises ``ValueError`` if it would reach beyond the storage."""
        info = TensorInfo(BY_TORCH_NAME[dtype], shape)
        # For strides, torch treats an empty dimension like one of size 1; all strides must fit into 63 bits.
        if math.prod(size or 1 for size in shape) * dtype_width(dtype) >= _LARGEST:
            raise ValueError(f"a tensor has the shape {list(shape)}, which is too large for torch")
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        reach = (offset + last + 1) * dtype_width(dtype) if math.prod(shape) else 0
        if reach > storage.nbytes:
            raise ValueError(f"a tensor ends at byte {reach} of its storage, which has only {storage.nbytes}")
        return cls(info, storage, offset, strides)

    @property
    def width(self) -> int:
        """The width of an element, in bytes."""
        return dtype_width(TORCH_NAMES[self.info.dtype])

    @property
    def identity(self) -> Hashable:
        """See :class:`rankless.formats.stored_tensor.StoredTensor`.

        It has only numbers that are bounded by the storage's size, because a hostile file could choose others so that
        many keys have the same hash.
        """
        if not self.info.nbytes:
            return id(self)
        strides = tuple(stride if size > 1 else 0 for size, stride in zip(self.info.shape, self.strides, strict=True))
        return id(self.storage), self.offset, self.info.dtype, self.info.shape, strides

    @property
    def dimension_order(self) -> list[int] | None:
        """See :class:`rankless.formats.stored_tensor.StoredTensor`. Expanded tensors have none."""
        shape = self.info.shape
        if 0 in shape or any(size > 1 and stride == 0 for size, stride in zip(shape, self.strides, strict=True)):
            return None
        order = order_dimensions(shape, self.strides)
        return None if order == order_dimensions(shape, row_major_strides(shape, 1)) else order

    def find_location(self) -> StridedLocation:
        """Return the location of its elements in the file."""
        strides = tuple(stride * self.width for stride in self.strides)
        return StridedLocation(self.storage.window.path, self.storage.start + self.offset * self.width, strides)

    @cached_property
    def _strided_source(self) -> ChunkedSource:
        whole = IndexBox((0,) * len(self.info.shape), self.info.shape)
        return ChunkedSource(
            self.info.shape, self.width, (SourceChunk(whole, self.find_location, self.find_location()[:2]),)
        )

    def find_extents(self, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`rankless.formats.stored_tensor.StoredTensor`."""
        if start == stop:
            return []
        file, offset, strides = self.find_location()
        if is_row_major(self.info.shape, strides, self.width):
            return [FileExtent(file, offset + start, start, stop)]
        return [FileExtent(self._strided_source, start, start, stop)]
