"""What stands for torch's objects in what is read of a pickle."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from holdfast.engine.runs import Box
from holdfast.engine.woven import Part, Place, Woven, is_row_major
from holdfast.formats.arrange.stored import Stored
from holdfast.formats.reader import Extent
from holdfast.formats.torchfile.dtypes import DTYPES, width
from holdfast.formats.torchfile.zips import Window
from holdfast.layout.dtypes import WIDTHS
from holdfast.layout.files import TensorInfo

#: Tensors have fewer bytes.
_LARGEST = 2**63


class Size(tuple[int, ...]):
    """A ``torch.Size``."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Dtype:
    """A ``torch.dtype``, by its name without the ``torch.``."""

    name: str


@dataclass(frozen=True, slots=True)
class Device:
    """A ``torch.device``, by its text."""

    text: str


@dataclass(frozen=True, slots=True)
class Layout:
    """A ``torch.layout``, by its text."""

    text: str


@dataclass(frozen=True, slots=True)
class StorageType:
    """A class of storages, by the name of their dtype; ``uint8`` where they have none."""

    dtype: str


@dataclass(frozen=True)
class Storage:
    """A storage of ``nbytes``; ``find`` tells where in a window it lies when that is asked for first."""

    dtype: str
    nbytes: int
    window: Window
    find: Callable[[], int]

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return width(self.dtype)

    @cached_property
    def start(self) -> int:
        """Its first byte in the file. Raises ``DamagedError`` where that cannot be."""
        return self.window.start + self.find()


@dataclass(frozen=True)
class Tensor(Stored):
    """A view of a storage. ``offset`` and ``strides`` count elements."""

    info: TensorInfo
    storage: Storage
    offset: int
    strides: tuple[int, ...]

    @classmethod
    def view(
        cls, storage: Storage, dtype: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Tensor:
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
        """See :class:`holdfast.formats.arrange.stored.Stored`.

        Only numbers that a storage bounds are in it: of all others, many could be found whose hash is the same.
        """
        if not self.info.nbytes:
            return id(self)
        strides = tuple(one if size > 1 else 0 for size, one in zip(self.info.shape, self.strides, strict=True))
        return id(self.storage), self.offset, self.info.dtype, self.info.shape, strides

    def place(self) -> Place:
        """Where its elements lie."""
        strides = tuple(stride * self.width for stride in self.strides)
        return Place(self.storage.window.path, self.storage.start + self.offset * self.width, strides)

    @cached_property
    def _woven(self) -> Woven:
        whole = Box((0,) * len(self.info.shape), self.info.shape)
        return Woven(self.info.shape, self.width, (Part(whole, self.place, self.place()[:2]),))

    def extents(self, start: int, stop: int) -> Sequence[Extent]:
        """See :class:`holdfast.formats.arrange.stored.Stored`."""
        if start == stop:
            return []
        file, offset, strides = self.place()
        if is_row_major(self.info.shape, strides, self.width):
            return [Extent(file, offset + start, start, stop)]
        return [Extent(self._woven, start, start, stop)]
