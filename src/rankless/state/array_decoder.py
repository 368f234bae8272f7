"""Decoding of tensors, arrays, dtypes and devices in trees of plain values.

torch is imported when a tree has the first of them, so that plain values are read without it.

A load decodes with it on each rank, in the vote "reading the metadata"; the view, conversions and the files of
schedulers decode in one process. The tags (``$numpy``, ``$dtype``, …) are in files: do not change them.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rankless.engine.io.byte_sinks import ByteSink
from rankless.errors import CorruptCheckpointError, FormatError
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import NUMPY_NAMES
from rankless.ondisk.values import ORDER_SUFFIX, PARAMETER_SUFFIXES
from rankless.torch_import import import_torch

if TYPE_CHECKING:
    import torch

#: The NumPy dtypes that are stored. They are given by name, so that a file cannot refer to any other object.
NUMPY_DTYPES = frozenset({*NUMPY_NAMES.values(), "complex128"})


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
            self.tensors[str(key)] = allocate_tensor(info, _order_in_name(str(key), len(info.shape)))
        return self.tensors[str(key)]


def are_same_decoded(first: Any, second: Any, unread: frozenset[int] | None = None) -> bool:
    """Return whether two decoded trees are the same.

    ``unread`` are the addresses of the tensors that have no values yet, all of them if it is ``None``: only one that is
    stored once is the same.
    """
    if type(first) is not type(second):
        return False
    if hasattr(first, "shape"):
        return first is second or _are_same_arrays(first, second, unread)
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(are_same_decoded(first[key], second[key], unread) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(
            are_same_decoded(a, b, unread) for a, b in zip(first, second, strict=True)
        )
    return repr(first) == repr(second) if isinstance(first, float) else bool(first == second)


def _are_same_arrays(first: Any, second: Any, unread: frozenset[int] | None) -> bool:
    """Return whether two decoded tensors, arrays or scalars of NumPy, of one class, are known to be the same."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    if isinstance(first, np.generic):
        return bool(first.tobytes() == second.tobytes())
    one, other = map(_torch().as_tensor, (first, second))
    if one.stride() != other.stride() or one.requires_grad != other.requires_grad:
        return False
    addresses = {one.data_ptr(), other.data_ptr()}
    if len(addresses) == 1 or unread is None or not unread.isdisjoint(addresses):
        return len(addresses) == 1
    return bool(
        _torch().equal(*(tensor.detach().contiguous().reshape(-1).view(_torch().uint8) for tensor in (one, other)))
    )


def encode_scalar(value: np.generic) -> Any:
    """Encode a scalar of NumPy. Return ``NotImplemented`` if its dtype cannot be stored."""
    if value.dtype.name not in NUMPY_DTYPES:
        return NotImplemented
    return {"$numpy": [value.dtype.name, value.tobytes().hex()]}


def allocate_tensor(info: TensorInfo, order: Sequence[int] | None = None) -> torch.Tensor:
    """Return a tensor in the memory of the host that has any values, with its dimensions in ``order`` if given."""
    order = tuple(range(len(info.shape))) if order is None else order
    dtype = _dtypes()[info.dtype]
    try:
        tensor: torch.Tensor = _torch().empty_permuted(info.shape, order, dtype=dtype, device="cpu")
    except RuntimeError as error:  # torch has no other type for it
        raise MemoryError(f"no memory for a tensor of {info.dtype} {list(info.shape)}: {error}") from error
    return tensor


def _order_in_name(name: str, ndim: int) -> list[int] | None:
    """Return the order of dimensions in the suffix of a tensor's name, if it has one of this number of them.

    For example, ``user_content.w@order-1-0`` gives ``[1, 0]`` for a tensor of two dimensions.
    """
    order = re.search(rf"{ORDER_SUFFIX}((?:-\d{{1,9}})+)$", name)
    dimensions = [int(digits) for digits in order[1].split("-")[1:]] if order else None
    return dimensions if dimensions is not None and sorted(dimensions) == list(range(ndim)) else None


def tensor_sink(tensor: torch.Tensor) -> ByteSink:
    """Return the sink that reads a tensor's bytes into it."""
    from rankless.engine.io.tensor_bytes import TensorBytes  # noqa: PLC0415 - imports torch

    return TensorBytes(tensor)


def _torch() -> Any:
    return import_torch("a checkpoint's tensor as a torch.Tensor")


def _dtypes() -> Mapping[str, torch.dtype]:
    """Return the dtype of torch for each name in files. A name that this torch lacks raises ``FormatError``."""
    _torch()
    from rankless.state.tensor_views import DTYPES  # noqa: PLC0415 - imports torch

    return DTYPES


def _restore_parameter(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a stored tensor, as an ``nn.Parameter`` if the suffix of its name says so."""
    for requires_grad, suffix in PARAMETER_SUFFIXES.items():
        if name.endswith(suffix):
            parameter: torch.Tensor = _torch().nn.Parameter(tensor, requires_grad=requires_grad)
            return parameter
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


def _decode_inline(payload: Any) -> torch.Tensor:
    name, shape, text, *orders = payload
    raw = bytearray(base64.b64decode(text, validate=True))
    if not raw:
        if math.prod(shape):
            raise CorruptCheckpointError(f"a tensor of the shape {shape} has no bytes")
        return allocate_tensor(TensorInfo(name, shape))
    tensor: torch.Tensor = _torch().frombuffer(raw, dtype=_dtypes()[name]).reshape(shape)
    return allocate_tensor(TensorInfo(name, tuple(shape)), orders[0]).copy_(tensor) if orders else tensor


def _decode_scalar(payload: Any) -> np.generic:
    name, hex_digits = payload
    if name not in NUMPY_DTYPES:
        raise FormatError(f"the dtype {name!r} of NumPy is unknown; was it written by a newer version? update rankless")
    (scalar,) = np.frombuffer(bytes.fromhex(hex_digits), dtype=name)
    return scalar  # type: ignore[no-any-return]


def _decode_dtype(payload: Any) -> torch.dtype:
    if not isinstance(payload, str):
        raise CorruptCheckpointError(f"{payload!r} is not a dtype")
    dtype = _named_dtypes().get(payload)
    if dtype is None:
        raise FormatError(f"this version of torch has no dtype {payload!r}: update torch")
    return dtype


@cache
def _named_dtypes() -> dict[str, torch.dtype]:
    """Return the dtypes of torch by name."""
    dtype_class = _torch().dtype
    return {
        str(value).removeprefix("torch."): value for value in vars(_torch()).values() if isinstance(value, dtype_class)
    }


def _decode_size(payload: Any) -> Any:
    return _torch().Size(payload)


def _decode_device(payload: Any) -> torch.device:
    if not isinstance(payload, str):
        raise CorruptCheckpointError(f"{payload!r} is not a device")
    try:
        device: torch.device = _torch().device(payload)
    except RuntimeError as error:
        raise FormatError(f"this version of torch has no device {payload!r}: {error}") from error
    return device


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$numpy": _decode_scalar,
    "$dtype": _decode_dtype,
    "$device": _decode_device,
    "$size": _decode_size,
    "$inline": _decode_inline,
}
