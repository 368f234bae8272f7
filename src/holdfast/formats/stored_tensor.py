"""A tensor of a checkpoint, wherever its bytes lie: what the readers of other systems' formats have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from holdfast.engine.io.sources import InMemorySource
from holdfast.errors import FormatError
from holdfast.formats.reader import FileExtent
from holdfast.ondisk.files import TensorInfo


class StoredTensor(ABC):
    """A tensor of a checkpoint."""

    info: TensorInfo

    @property
    def identity(self) -> Hashable:
        """Equal for two that are the same bytes seen the same way: tied weights."""
        return id(self)

    @property
    def crcs(self) -> Sequence[int] | None:
        """The CRC of each block; ``None`` in formats without."""
        return None

    @abstractmethod
    def extents(self, start: int, stop: int) -> Sequence[FileExtent]:
        """Where its bytes ``[start, stop)`` lie, in their order; the same objects each time."""


@dataclass(frozen=True)
class InlineTensor(StoredTensor):
    """A tensor whose bytes were read with the values."""

    info: TensorInfo
    data: bytes

    @cached_property
    def _source(self) -> InMemorySource:
        return InMemorySource(self.data)

    def extents(self, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`StoredTensor`."""
        return [FileExtent(self._source, start, start, stop)]


@dataclass(frozen=True, slots=True)
class UnreadableTensor:
    """Stands where a tensor is that cannot be read; ``why`` completes its name: ``is sparse``."""

    why: str


@dataclass(frozen=True, slots=True)
class UnreadTensor:
    """Stands in values where one is that holdfast does not read; ``why`` completes its name.

    Who asks for it gets an error of the type ``error``.
    """

    why: str
    error: type[FormatError] = field(default=FormatError, repr=False)


def is_tensor(value: object) -> bool:
    """Whether a value is a tensor, be it one that can be read or not."""
    return isinstance(value, StoredTensor | UnreadableTensor)
