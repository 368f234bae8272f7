"""Tensors, arrays, dtypes and devices inside trees of plain values."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from holdfast.errors import CorruptCheckpointError, UnsupportedTensorError
from holdfast.ondisk.files import TensorInfo
from holdfast.state.tensors import DTYPES, NAMES, check_present, view_of

#: NumPy dtypes that come back as they were. Names, never objects: a file can name nothing else.
_SCALARS = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)

_TORCH_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}


#: How the names of tensors end that were ``nn.Parameter``, by ``requires_grad``: version 1 has no tag for them.
_PARAMETERS = {True: "@parameter", False: "@frozen-parameter"}

#: Tensors of at most so many bytes stay inside the values where those of several ranks are put together.
INLINE_BYTES = 64 * 2**10


class ArrayEncoder:
    """Takes tensors and arrays out of a tree as it is encoded. :attr:`tensors` are those to be stored, by key.

    Small tensors stay in the tree under keys that begin with one of ``inline``.
    """

    def __init__(self, inline: tuple[str, ...] = ()) -> None:
        self._inline = inline
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, value: object, key: str) -> Any:  # noqa: PLR0911 - one line for each kind
        """See :class:`holdfast.ondisk.values.ArrayCodec`."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, key)
        if type(value) is np.ndarray:
            return {"$array": self._store(_from_numpy(value), key)}
        if isinstance(value, np.generic):
            return _encode_scalar(value)
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        if type(value) is torch.Size:
            return {"$size": list(value)}
        return NotImplemented

    def decode(self, tag: str, payload: Any) -> Any:
        """Nothing is decoded on the way out."""
        del tag, payload
        return NotImplemented

    def _tensor(self, tensor: torch.Tensor, key: str) -> Any:
        if isinstance(tensor, DTensor):
            raise UnsupportedTensorError("a DTensor; what has sharded tensors is passed as model= or optimizer=")
        if type(tensor) not in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}:
            raise UnsupportedTensorError(
                f"a tensor of the class {type(tensor).__qualname__}, which would come back as a plain one"
            )
        check_present(view_of(tensor, "a tensor"), "a tensor")
        if key.startswith(self._inline):
            return (
                {"$inline": _inlined(tensor)}
                if tensor.nbytes <= INLINE_BYTES
                else {"$tensor": self._store(tensor, key)}
            )
        is_parameter = type(tensor) is torch.nn.Parameter
        return {"$tensor": self._store(tensor, key, _PARAMETERS[tensor.requires_grad] if is_parameter else "")}

    def _store(self, tensor: torch.Tensor, key: str, ending: str = "") -> str:
        name, n = key + ending, 1
        while name in self.tensors or (not ending and name.endswith(tuple(_PARAMETERS.values()))):
            n += 1
            name = f"{key}#{n}{ending}"
        self.tensors[name] = tensor.detach()
        return name


class ArrayDecoder:
    """Gives tensors and arrays back to a tree as it is decoded: allocated at once, in :attr:`tensors`, filled later."""

    def __init__(self, infos: Mapping[str, TensorInfo]) -> None:
        self.infos = infos
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, value: object, key: str) -> Any:
        """Nothing is encoded on the way in."""
        del value, key
        return NotImplemented

    def decode(self, tag: str, payload: Any) -> Any:
        """See :class:`holdfast.ondisk.values.ArrayCodec`."""
        decoder = _DECODERS.get(tag)
        if decoder is not None:
            return decoder(payload)
        if tag == "$tensor":
            return _as_it_was(self._allocate(payload), payload)
        if tag == "$array":
            return self._allocate(payload).numpy()
        return NotImplemented

    def _info(self, key: object) -> TensorInfo:
        info = self.infos.get(key) if isinstance(key, str) else None
        if info is None:
            raise CorruptCheckpointError(f"a value refers to the tensor {key!r}, which is not in the checkpoint")
        return info

    def _allocate(self, key: object) -> torch.Tensor:
        info = self._info(key)
        if key not in self.tensors:
            self.tensors[str(key)] = torch.empty(info.shape, dtype=DTYPES[info.dtype], device="cpu")
        return self.tensors[str(key)]


def _as_it_was(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A stored tensor, as the parameter that it was if its name says so."""
    for requires_grad, ending in _PARAMETERS.items():
        if name.endswith(ending):
            return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor


class ArrayComparer(ArrayDecoder):
    """Gives what is known of the bytes of tensors and arrays in their place: trees compare equal without being read.

    ``crcs`` tells those of a stored tensor's blocks.
    """

    def __init__(self, infos: Mapping[str, TensorInfo], crcs: Callable[[str], Sequence[int] | None]) -> None:
        super().__init__(infos)
        self._crcs = crcs

    def decode(self, tag: str, payload: Any) -> Any:
        """See :class:`holdfast.ondisk.values.ArrayCodec`."""
        if tag not in {"$tensor", "$array"}:
            return super().decode(tag, payload)
        info, crcs = self._info(payload), self._crcs(payload)
        return tag, info.dtype, info.shape, None if crcs is None else tuple(map(int, crcs))


def _inlined(tensor: torch.Tensor) -> list[Any]:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return [NAMES[tensor.dtype], list(tensor.shape), base64.b64encode(flat.numpy().tobytes()).decode()]


def _decode_inline(payload: Any) -> torch.Tensor:
    name, shape, text = payload
    raw = bytearray(base64.b64decode(text, validate=True))
    return torch.frombuffer(raw, dtype=DTYPES[name]).reshape(shape) if raw else torch.empty(shape, dtype=DTYPES[name])


def _from_numpy(array: np.ndarray[Any, Any]) -> torch.Tensor:
    if array.dtype.name not in _SCALARS or array.dtype.name == "complex128" or not array.dtype.isnative:
        raise UnsupportedTensorError(f"a NumPy array of dtype {array.dtype}")
    return torch.from_numpy(np.array(array, order="C"))


def _encode_scalar(value: np.generic) -> Any:
    if value.dtype.name not in _SCALARS:
        return NotImplemented
    return {"$numpy": [value.dtype.name, value.tobytes().hex()]}


def _decode_scalar(payload: Any) -> np.generic:
    name, digits = payload
    if name not in _SCALARS:
        raise CorruptCheckpointError(f"{name!r} is no NumPy dtype that holdfast writes")
    (scalar,) = np.frombuffer(bytes.fromhex(digits), dtype=name)
    return scalar  # type: ignore[no-any-return]


def _decode_dtype(payload: Any) -> torch.dtype:
    return _TORCH_DTYPES[payload]


def _decode_device(payload: Any) -> torch.device:
    if not isinstance(payload, str):
        raise CorruptCheckpointError(f"{payload!r} is no device")
    try:
        return torch.device(payload)
    except RuntimeError as error:
        raise CorruptCheckpointError(f"{payload!r} is no device") from error


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$numpy": _decode_scalar,
    "$dtype": _decode_dtype,
    "$device": _decode_device,
    "$size": torch.Size,
    "$inline": _decode_inline,
}
