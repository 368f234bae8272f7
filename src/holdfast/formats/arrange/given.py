"""What values become that a pickle had and that are neither plain nor containers: tensors, dtypes, arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.errors import BudgetError, FormatError
from holdfast.formats.arrange.stored import Stored, Unread, Unreadable
from holdfast.formats.arrange.trees import Path, show
from holdfast.formats.pickles import arrays
from holdfast.formats.pickles.machine import Record
from holdfast.formats.pickles.plain import BYTES_IO, bytes_in
from holdfast.formats.torchfile.objects import Device, Dtype, Layout, Size
from holdfast.layout.budget import Budget
from holdfast.layout.values import ArrayCodec

_TORCH: Mapping[type, Callable[[ArrayCodec, Any], Any]] = {
    Size: lambda codec, value: codec.decode("$size", list(value)),
    Dtype: lambda codec, value: codec.decode("$dtype", value.name),
    Device: lambda codec, value: codec.decode("$device", value.text),
    Layout: lambda _, value: value.text,
    Unreadable: lambda _, value: Unread(value.why),
    Unread: lambda _, value: value,
}


@dataclass(frozen=True)
class Given:
    """Makes them: tensors by their names in ``inside``, other objects by ``codec``, and arrays paid from ``budget``."""

    codec: ArrayCodec
    inside: Mapping[object, str]
    budget: Budget

    def __call__(self, path: Path, value: Any) -> Any:
        """See :data:`holdfast.formats.arrange.trees.Leaf`. Raises ``FormatError`` naming what nobody can make."""
        if isinstance(value, Stored):
            return self.codec.decode("$tensor", self.inside[value.identity])
        if type(value) in _TORCH:
            return _TORCH[type(value)](self.codec, value)
        if isinstance(value, Record):
            return self._object(path, value)
        raise FormatError(f"{show(path)} holds {type(value).__name__}, which is no plain value")

    def _object(self, path: Path, record: Record) -> Any:
        try:
            if record.name == BYTES_IO:
                return bytes_in(record)
            if arrays.is_array(record):
                self.budget.spend_memory(arrays.nbytes(record))
                return arrays.make(record)
        except BudgetError:
            raise
        except (TypeError, ValueError) as error:
            raise FormatError(f"{show(path)} is {error}") from error
        raise FormatError(f"{show(path)} holds {record.name}, which is no plain value")
