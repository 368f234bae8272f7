"""The plain values of a checkpoint for people, in few lines, and for programs, as JSON.

Tensors and arrays inside them are described, not read, so that looking costs nothing, however large they are.
"""

from __future__ import annotations

import math
import reprlib
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.errors import DamagedError
from holdfast.layout.files import TensorInfo

#: The longest text of one value, in characters.
_ROOM = 56

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 4, _ROOM, _ROOM, _ROOM
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = _SHORT.maxfrozenset = _SHORT.maxdeque = 8


@dataclass(frozen=True, slots=True, repr=False)
class Described:
    """Stands for a tensor or an array."""

    kind: str
    info: TensorInfo

    def __repr__(self) -> str:
        return f"{self.kind} {self.info.dtype} {list(self.info.shape)}"


@dataclass(frozen=True, slots=True, repr=False)
class Named:
    """Stands for a dtype, a device or a size of torch."""

    text: str

    def __repr__(self) -> str:
        return self.text


class Describing:
    """Puts descriptions in the place of tensors. See :class:`holdfast.layout.values.ArrayCodec`."""

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
                raise DamagedError(f"a value refers to the tensor {payload!r}, which is not in the checkpoint")
            return Described(tag[1:], self._infos[payload])
        if tag == "$numpy":
            name, digits = payload
            return np.frombuffer(bytes.fromhex(digits), dtype=name)[0].item()
        if tag == "$size":
            return tuple(payload)
        return Named(str(payload)) if tag in {"$dtype", "$device"} else NotImplemented


def lines(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """A tree as ``(path, text)``: what fits on a line on one, what does not, a line for each part."""
    value = vars(value) if isinstance(value, Namespace) else value
    text = _SHORT.repr(value)
    nested = isinstance(value, list | tuple) and any(isinstance(item, dict | list | tuple | Namespace) for item in value)
    if isinstance(value, dict) and value and (not path or len(text) > _ROOM):
        for key, item in value.items():
            yield from lines(item, f"{path}.{key}" if path else str(key))
    elif nested and len(text) > _ROOM:
        for i, item in enumerate(value):
            yield from lines(item, f"{path}[{i}]")
    else:
        cut = text if len(text) <= _ROOM else text[: _ROOM - 3] + "..."
        yield path, f"{cut} ({len(value):,} items)" if hasattr(value, "__len__") and cut != repr(value) else cut


def plain(value: Any) -> Any:
    """The nearest JSON: lists for tuples and sets, text for what JSON lacks, a description for a tensor."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Described):
        return {"kind": value.kind, "dtype": value.info.dtype, "shape": list(value.info.shape)}
    if isinstance(value, Namespace):
        return plain(vars(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return str(value)
