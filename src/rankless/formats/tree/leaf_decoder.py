"""Decoding the leaves of an unpickled tree that are not plain values: tensors, dtypes, devices, NumPy arrays.

:mod:`rankless.formats.tree.tree_contents` decodes with it, on each rank of a load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rankless.errors import FormatError, ReadBudgetError
from rankless.formats.pickles import numpy_arrays
from rankless.formats.pickles.builtin_types import BYTES_IO, read_bytes_io
from rankless.formats.pickles.unpickler import OpaqueObject
from rankless.formats.stored_tensor import StoredTensor, UnreadableTensor, UnreadTensor
from rankless.formats.torchfile.torch_placeholders import TorchDevice, TorchDtype, TorchLayout, TorchSize
from rankless.formats.tree.tree_traversal import Path, show_path
from rankless.ondisk.read_budget import ReadBudget
from rankless.ondisk.values import ArrayCodec

_TORCH: Mapping[type, Callable[[ArrayCodec, Any], Any]] = {
    TorchSize: lambda codec, value: codec.decode("$size", list(value)),
    TorchDtype: lambda codec, value: codec.decode("$dtype", value.name),
    TorchDevice: lambda codec, value: codec.decode("$device", value.text),
    TorchLayout: lambda _, value: value.text,
    UnreadableTensor: lambda _, value: UnreadTensor(value.why),
    UnreadTensor: lambda _, value: value,
}


@dataclass(frozen=True)
class LeafDecoder:
    """A decoder of leaves.

    ``codec`` decodes tensors, by their names in ``tensor_names``, and torch's other objects. Making NumPy arrays is
    charged to ``budget``.
    """

    codec: ArrayCodec
    tensor_names: Mapping[object, str]
    budget: ReadBudget

    def __call__(self, path: Path, value: Any) -> Any:
        """Return the decoded value, see :data:`rankless.formats.tree.tree_traversal.Leaf`.

        Raises ``FormatError``, naming the path, if the value cannot be decoded.
        """
        if isinstance(value, StoredTensor):
            return self.codec.decode("$tensor", self.tensor_names[value.identity])
        if type(value) in _TORCH:
            return _TORCH[type(value)](self.codec, value)
        if isinstance(value, OpaqueObject):
            return self._decode_object(path, value)
        raise FormatError(f"{show_path(path)} holds {type(value).__name__}, which is not a plain value")

    def _decode_object(self, path: Path, record: OpaqueObject) -> Any:
        try:
            if record.name == BYTES_IO:
                return read_bytes_io(record)
            if numpy_arrays.is_array(record):
                self.budget.spend_memory(numpy_arrays.array_nbytes(record))
                return numpy_arrays.make_array(record)
        except ReadBudgetError:
            raise
        except (TypeError, ValueError) as error:
            raise FormatError(f"{show_path(path)} is {error}") from error
        raise FormatError(f"{show_path(path)} holds {record.name}, which is not a plain value")
