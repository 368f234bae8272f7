"""Encoding of tensors, arrays, dtypes and devices in trees of plain values."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from rankless.errors import CorruptCheckpointError, UnsupportedTensorError
from rankless.ondisk.files import TensorInfo
from rankless.state.tensors import DTYPES, NAMES, check_present, view_of

#: The NumPy dtypes that are stored. They are given by name, so that a file cannot refer to any other object.
_NUMPY_DTYPES = (
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


#: Suffixes of the names of tensors that were ``nn.Parameter``, by ``requires_grad``: format version 1 has no tag for
#: them.
_PARAMETER_SUFFIXES = {True: "@parameter", False: "@frozen-parameter"}

#: Tensors of at most this many bytes are stored inline in values that are merged from several ranks.
INLINE_BYTES = 64 * 2**10


class ArrayEncoder:
    """An encoder that replaces tensors and arrays in a tree by references. :attr:`tensors` are to be stored, by key.

    Small tensors under keys that begin with one of ``inline`` are encoded in the tree itself.
    """

    def __init__(self, inline: tuple[str, ...] = ()) -> None:
        self._inline = inline
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, value: object, key: str) -> Any:  # noqa: PLR0911 - one return for each type
        """See :class:`rankless.ondisk.values.ArrayCodec`."""
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(value, key)
        if type(value) is np.ndarray:
            return {"$array": self._store_tensor(_from_numpy(value), key)}
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
        """Return ``NotImplemented``: this codec only encodes."""
        del tag, payload
        return NotImplemented

    def _encode_tensor(self, tensor: torch.Tensor, key: str) -> Any:
        if isinstance(tensor, DTensor):
            raise UnsupportedTensorError("a DTensor; pass objects that have sharded tensors as model= or optimizer=")
        if type(tensor) not in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}:
            raise UnsupportedTensorError(
                f"a tensor of the class {type(tensor).__qualname__}, which would be loaded as a plain tensor"
            )
        check_present(view_of(tensor, "a tensor"), "a tensor")
        if key.startswith(self._inline):
            return (
                {"$inline": _encode_inline(tensor)}
                if tensor.nbytes <= INLINE_BYTES
                else {"$tensor": self._store_tensor(tensor, key)}
            )
        is_parameter = type(tensor) is torch.nn.Parameter
        return {
            "$tensor": self._store_tensor(
                tensor, key, _PARAMETER_SUFFIXES[tensor.requires_grad] if is_parameter else ""
            )
        }

    def _store_tensor(self, tensor: torch.Tensor, key: str, suffix: str = "") -> str:
        name, n = key + suffix, 1
        while name in self.tensors or (not suffix and name.endswith(tuple(_PARAMETER_SUFFIXES.values()))):
            n += 1
            name = f"{key}#{n}{suffix}"
        self.tensors[name] = tensor.detach()
        return name


class ArrayDecoder:
    """A decoder that allocates the tensors and arrays of a tree. They are in :attr:`tensors`, and are filled later."""

    def __init__(self, infos: Mapping[str, TensorInfo]) -> None:
        self.infos = infos
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, value: object, key: str) -> Any:
        """Return ``NotImplemented``: this codec only decodes."""
        del value, key
        return NotImplemented

    def decode(self, tag: str, payload: Any) -> Any:
        """See :class:`rankless.ondisk.values.ArrayCodec`."""
        decoder = _DECODERS.get(tag)
        if decoder is not None:
            return decoder(payload)
        if tag == "$tensor":
            return _restore_parameter(self._allocate_tensor(payload), payload)
        if tag == "$array":
            return self._allocate_tensor(payload).numpy()
        return NotImplemented

    def _find_info(self, key: object) -> TensorInfo:
        info = self.infos.get(key) if isinstance(key, str) else None
        if info is None:
            raise CorruptCheckpointError(f"a value refers to the tensor {key!r}, which is not in the checkpoint")
        return info

    def _allocate_tensor(self, key: object) -> torch.Tensor:
        info = self._find_info(key)
        if key not in self.tensors:
            self.tensors[str(key)] = torch.empty(info.shape, dtype=DTYPES[info.dtype], device="cpu")
        return self.tensors[str(key)]


def _restore_parameter(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a stored tensor, as an ``nn.Parameter`` if the suffix of its name says so."""
    for requires_grad, suffix in _PARAMETER_SUFFIXES.items():
        if name.endswith(suffix):
            return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor


class ArrayComparer(ArrayDecoder):
    """A decoder that replaces tensors and arrays by their dtype, shape and CRCs.

    Trees decoded like this can be compared without reading tensors.
    ``crcs`` returns the CRCs of a stored tensor's blocks, or ``None`` if they are unknown.
    """

    def __init__(self, infos: Mapping[str, TensorInfo], crcs: Callable[[str], Sequence[int] | None]) -> None:
        super().__init__(infos)
        self._crcs = crcs

    def decode(self, tag: str, payload: Any) -> Any:
        """See :class:`rankless.ondisk.values.ArrayCodec`."""
        if tag not in {"$tensor", "$array"}:
            return super().decode(tag, payload)
        info, crcs = self._find_info(payload), self._crcs(payload)
        return tag, info.dtype, info.shape, None if crcs is None else tuple(map(int, crcs))


def _encode_inline(tensor: torch.Tensor) -> list[Any]:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return [NAMES[tensor.dtype], list(tensor.shape), base64.b64encode(flat.numpy().tobytes()).decode()]


def _decode_inline(payload: Any) -> torch.Tensor:
    name, shape, text = payload
    raw = bytearray(base64.b64decode(text, validate=True))
    return torch.frombuffer(raw, dtype=DTYPES[name]).reshape(shape) if raw else torch.empty(shape, dtype=DTYPES[name])


def _from_numpy(array: np.ndarray[Any, Any]) -> torch.Tensor:
    if array.dtype.name not in _NUMPY_DTYPES or array.dtype.name == "complex128" or not array.dtype.isnative:
        raise UnsupportedTensorError(f"a NumPy array of dtype {array.dtype}")
    return torch.from_numpy(np.array(array, order="C"))


def _encode_scalar(value: np.generic) -> Any:
    if value.dtype.name not in _NUMPY_DTYPES:
        return NotImplemented
    return {"$numpy": [value.dtype.name, value.tobytes().hex()]}


def _decode_scalar(payload: Any) -> np.generic:
    name, hex_digits = payload
    if name not in _NUMPY_DTYPES:
        raise CorruptCheckpointError(f"{name!r} is not a NumPy dtype that rankless writes")
    (scalar,) = np.frombuffer(bytes.fromhex(hex_digits), dtype=name)
    return scalar  # type: ignore[no-any-return]


def _decode_dtype(payload: Any) -> torch.dtype:
    return _TORCH_DTYPES[payload]


def _decode_device(payload: Any) -> torch.device:
    if not isinstance(payload, str):
        raise CorruptCheckpointError(f"{payload!r} is not a device")
    try:
        return torch.device(payload)
    except RuntimeError as error:
        raise CorruptCheckpointError(f"{payload!r} is not a device") from error


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$numpy": _decode_scalar,
    "$dtype": _decode_dtype,
    "$device": _decode_device,
    "$size": torch.Size,
    "$inline": _decode_inline,
}
