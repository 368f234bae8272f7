"""Placeholders for the tensors inside values, so that values can be shown without reading tensors.

Commands, comparisons and views decode values with it, in one process. It must not import torch or NumPy: a user is
waiting.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankless.errors import CorruptCheckpointError
from rankless.ondisk.data_files import TensorInfo

#: The ``struct`` codes of NumPy's number types. NumPy itself takes 0.2 s to import.
_INTEGERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_LETTERS = dict(zip(_INTEGERS, "?bhiqBHIQ", strict=True))
_LETTERS |= {"float16": "e", "float32": "f", "float64": "d", "complex64": "ff", "complex128": "dd"}


@dataclass(frozen=True, slots=True, repr=False)
class TensorPlaceholder:
    """A placeholder of a tensor or array: named ``key`` in its group, or with its bytes ``inline`` in base64."""

    kind: str
    info: TensorInfo
    key: str = ""
    inline: str = ""

    def __repr__(self) -> str:
        return f"{self.kind} {self.info.dtype} {list(self.info.shape)}"


@dataclass(frozen=True, slots=True, repr=False)
class NamedPlaceholder:
    """A placeholder of a dtype or device of torch."""

    text: str

    def __repr__(self) -> str:
        return self.text


class PlaceholderCodec:
    """A codec that decodes tensors to placeholders. See :class:`rankless.ondisk.values.ArrayCodec`."""

    def __init__(self, infos: Mapping[str, TensorInfo]) -> None:
        self._infos = infos

    def encode(self, value: object, key: str) -> Any:
        """Return ``NotImplemented``: this codec only decodes."""
        del value, key
        return NotImplemented

    def decode(self, tag: str, payload: Any) -> Any:
        """Return the placeholder of a tagged value. Raises ``CorruptCheckpointError`` if a tensor is missing."""
        if tag in {"$tensor", "$array"}:
            if payload not in self._infos:
                raise CorruptCheckpointError(
                    f"a value refers to the tensor {payload!r}, which is not in the checkpoint"
                )
            return TensorPlaceholder(tag[1:], self._infos[payload], key=payload)
        if tag == "$inline":
            dtype, shape, data = payload[:3]
            return TensorPlaceholder("tensor", TensorInfo(dtype, tuple(shape)), inline=data)
        if tag == "$numpy":
            return _unpack_number(*payload)
        if tag == "$size":
            return tuple(payload)
        return NamedPlaceholder(str(payload)) if tag in {"$dtype", "$device"} else NotImplemented


def _unpack_number(name: str, digits: str) -> Any:
    parts = struct.unpack(f"<{_LETTERS[name]}", bytes.fromhex(digits))
    return complex(*parts) if name.startswith("complex") else parts[0]
