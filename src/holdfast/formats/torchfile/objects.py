"""What stands for torch's objects in what is read of a pickle."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from holdfast.engine.io.sources import ChunkedSource, SourceChunk, StridedLocation, is_row_major
from holdfast.engine.plan.ranges import IndexBox
from holdfast.formats.reader import FileExtent
from holdfast.formats.stored_tensor import StoredTensor
from holdfast.formats.torchfile.dtypes import DTYPES, dtype_width
from holdfast.formats.torchfile.zip_reader import FileWindow
from holdfast.ondisk.dtypes import WIDTHS
from holdfast.ondisk.files import TensorInfo

#: Tensors have fewer bytes.
_LARGEST = 2**63


class TorchSize(tuple[int, ...]):
    """A ``torch.Size``."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class TorchDtype:
    """A ``torch.dtype``, by its name without the ``torch.``."""

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
    """A class of storages, by the name of their dtype; ``uint8`` where they have none."""

    dtype: str


@dataclass(frozen=True)
class TorchStorage:
    """A storage of ``nbytes``; ``find`` tells where in a window it lies when that is asked for first."""

    dtype: str
    nbytes: int
    window: FileWindow
    find: Callable[[], int]

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return dtype_width(self.dtype)

    @cached_property
    def start(self) -> int:
        """Its first byte in the file. Raises ``CorruptCheckpointError`` where that cannot be."""
        return self.window.start + self.find()


@dataclass(frozen=True)
class TorchTensor(StoredTensor):
    """A view of a storage. ``offset`` and ``strides`` count elements."""

    info: TensorInfo
    storage: TorchStorage
    offset: int
    strides: tuple[int, ...]

    @classmethod
    def view(
        cls, storage: TorchStorage, dtype: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> TorchTensor:
        """A view of a storage. Raises ``ValueError`` where it would reach beyond it."""
        info = TensorInfo(DTYPES[dtype], shape)
        # torch counts strides over an empty dimension as over one of size 1, and they must be numbers it can hold.
        if math.prod(size or 1 for size in shape) * WIDTHS[info.dtype] >= _LARGEST:
            raise ValueError(f"no tensor can have the shape {list(shape)}")
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        reach = (offset + last + 1) * WIDTHS[info.dtype] if math.prod(shape) else 0
        if reach > storage.nbytes:
            raise ValueError(f"it reaches byte {reach} of a storage of {storage.nbytes}")
        return cls(info, storage, offset, strides)

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return WIDTHS[self.info.dtype]

    @property
    def identity(self) -> Hashable:
        """See :class:`holdfast.formats.stored_tensor.StoredTensor`.

        Only numbers that a storage bounds are in it: of all others, many could be found whose hash is the same.
        """
        if not self.info.nbytes:
            return id(self)
        strides = tuple(one if size > 1 else 0 for size, one in zip(self.info.shape, self.strides, strict=True))
        return id(self.storage), self.offset, self.info.dtype, self.info.shape, strides

    def place(self) -> StridedLocation:
        """Where its elements lie."""
        strides = tuple(stride * self.width for stride in self.strides)
        return StridedLocation(self.storage.window.path, self.storage.start + self.offset * self.width, strides)

    @cached_property
    def _woven(self) -> ChunkedSource:
        whole = IndexBox((0,) * len(self.info.shape), self.info.shape)
        return ChunkedSource(self.info.shape, self.width, (SourceChunk(whole, self.place, self.place()[:2]),))

    def extents(self, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`holdfast.formats.stored_tensor.StoredTensor`."""
        if start == stop:
            return []
        file, offset, strides = self.place()
        if is_row_major(self.info.shape, strides, self.width):
            return [FileExtent(file, offset + start, start, stop)]
        return [FileExtent(self._woven, start, start, stop)]
