"""Descriptions in the place of the tensors inside values: to look at values costs nothing, however large these are."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.errors import CorruptCheckpointError
from holdfast.ondisk.files import TensorInfo

#: NumPy's numbers in the letters of ``struct``; NumPy itself takes a fifth of a second to import.
_INTEGERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_LETTERS = dict(zip(_INTEGERS, "?bhiqBHIQ", strict=True))
_LETTERS |= {"float16": "e", "float32": "f", "float64": "d", "complex64": "ff", "complex128": "dd"}


@dataclass(frozen=True, slots=True, repr=False)
class TensorPlaceholder:
    """Stands for a tensor or an array: called ``key`` in its group, or with its bytes in ``inline``, in base64."""

    kind: str
    info: TensorInfo
    key: str = ""
    inline: str = ""

    def __repr__(self) -> str:
        return f"{self.kind} {self.info.dtype} {list(self.info.shape)}"


@dataclass(frozen=True, slots=True, repr=False)
class NamedPlaceholder:
    """Stands for a dtype, a device or a size of torch."""

    text: str

    def __repr__(self) -> str:
        return self.text


class PlaceholderCodec:
    """Puts descriptions in the place of tensors. See :class:`holdfast.ondisk.values.ArrayCodec`."""

    def __init__(self, infos: Mapping[str, TensorInfo]) -> None:
        self._infos = infos

    def encode(self, value: object, key: str) -> Any:
        """Nothing is encoded here."""
        del value, key
        return NotImplemented

    def decode(self, tag: str, payload: Any) -> Any:
        """What stands for a tagged value."""
        if tag in {"$tensor", "$array"}:
            if payload not in self._infos:
                raise CorruptCheckpointError(
                    f"a value refers to the tensor {payload!r}, which is not in the checkpoint"
                )
            return TensorPlaceholder(tag[1:], self._infos[payload], key=payload)
        if tag == "$inline":
            dtype, shape, data = payload
            return TensorPlaceholder("tensor", TensorInfo(dtype, tuple(shape)), inline=data)
        if tag == "$numpy":
            return _number(*payload)
        if tag == "$size":
            return tuple(payload)
        return NamedPlaceholder(str(payload)) if tag in {"$dtype", "$device"} else NotImplemented


def _number(name: str, digits: str) -> Any:
    parts = struct.unpack(f"<{_LETTERS[name]}", bytes.fromhex(digits))
    return complex(*parts) if name.startswith("complex") else parts[0]
