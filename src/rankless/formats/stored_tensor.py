"""The tensors of a checkpoint, however their bytes are stored. Readers of other systems' formats build on these.

Readers of DCP, Megatron, NxD, DeepSpeed, ColossalAI and files of ``torch.save`` describe tensors so, on each rank that
opens them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rankless.engine.io.tensor_sources import InMemorySource
from rankless.errors import FormatError
from rankless.formats.reader import FileExtent
from rankless.ondisk.data_files import TensorInfo


class StoredTensor(ABC):
    """Base class of the tensors of a checkpoint."""

    info: TensorInfo

    @property
    def identity(self) -> Hashable:
        """A key that is equal for tied tensors: the same bytes with the same dtype, shape and strides."""
        return id(self)

    @property
    def crcs(self) -> Sequence[int] | None:
        """The CRC of each block; ``None`` if the format has none."""
        return None

    @property
    def dimension_order(self) -> list[int] | None:
        """The order of dimensions in memory, if it is not the order of a contiguous tensor."""
        return None

    @abstractmethod
    def find_extents(self, start: int, stop: int) -> Sequence[FileExtent]:
        """Return the file ranges of its bytes ``[start, stop)``, in order; the same ``file`` objects each time."""


@dataclass(frozen=True)
class InlineTensor(StoredTensor):
    """A tensor with its bytes in memory, because they were stored among the values."""

    info: TensorInfo
    data: bytes

    @cached_property
    def _source(self) -> InMemorySource:
        return InMemorySource(self.data)

    def find_extents(self, start: int, stop: int) -> Sequence[FileExtent]:
        """See :class:`StoredTensor`."""
        return [FileExtent(self._source, start, start, stop)]


@dataclass(frozen=True, slots=True)
class UnreadableTensor:
    """A placeholder for a tensor that cannot be read.

    ``why`` completes a sentence that begins with its name: ``is sparse``.
    """

    why: str


@dataclass(frozen=True, slots=True)
class UnreadTensor:
    """A placeholder for a value that rankless does not read.

    ``why`` completes a sentence that begins with its name. Reading it raises ``error``.
    """

    why: str
    error: type[FormatError] = field(default=FormatError, repr=False)


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor, readable or not."""
    return isinstance(value, StoredTensor | UnreadableTensor)
