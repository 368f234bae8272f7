"""The names in torch's pickles, and what is made of them.

Source: ``torch/_utils.py``, ``torch/_tensor.py`` and ``torch/serialization.py`` of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.errors import ReadBudgetError
from holdfast.formats.pickles.arrays import NUMPY, as_plain_array
from holdfast.formats.pickles.builtin_types import PLAIN, plain_record
from holdfast.formats.pickles.unpickler import AllowedCallable, OpaqueObject
from holdfast.formats.stored_tensor import InlineTensor, UnreadableTensor
from holdfast.formats.torchfile.dtypes import DTYPES, OTHERS, STORAGES
from holdfast.formats.torchfile.objects import (
    TorchDevice,
    TorchDtype,
    TorchLayout,
    TorchSize,
    TorchStorage,
    TorchStorageType,
    TorchTensor,
)
from holdfast.ondisk.files import TensorInfo
from holdfast.ondisk.read_budget import ReadBudget

#: Dimensions and numbers that torch can have.
_DIMENSIONS, _LARGEST = 64, 2**63

#: What a tensor costs, and each of its dimensions.
_TENSOR, _DIMENSION = 32, 8


def _sizes(given: Any) -> tuple[int, ...]:
    if not isinstance(given, tuple) or len(given) > _DIMENSIONS:
        raise TypeError("its shape is none")
    if not all(type(size) is int and 0 <= size < _LARGEST for size in given):
        raise ValueError("its sizes, offset or strides are no numbers that torch can have")
    return tuple(given)


def _view(budget: ReadBudget, storage: Any, dtype: str, place: tuple[Any, Any, Any]) -> TorchTensor | UnreadableTensor:
    if not isinstance(storage, TorchStorage):
        raise TypeError("it is of no storage")
    (offset,), shape, strides = _sizes(place[:1]), _sizes(place[1]), _sizes(place[2])
    budget.spend(_TENSOR + _DIMENSION * len(shape))
    if dtype not in DTYPES:
        return UnreadableTensor(f"has dtype {dtype}, which holdfast does not read")
    return TorchTensor.view(storage, dtype, offset, shape, strides)


def _tensor_v2(budget: ReadBudget, storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> Any:
    """``rest``: whether a gradient is wanted, hooks, and bits to be applied lazily; version 1 has none of these."""
    return _unless_lazy(_view(budget, storage, getattr(storage, "dtype", ""), (offset, shape, strides)), rest[2:])


def _tensor_v3(budget: ReadBudget, storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> Any:
    """The same, with a dtype after the hooks."""
    _, _, dtype, *bits = rest
    if not isinstance(dtype, TorchDtype):
        raise TypeError("its dtype is none")
    return _unless_lazy(_view(budget, storage, dtype.name, (offset, shape, strides)), bits)


def _unless_lazy(made: TorchTensor | UnreadableTensor, rest: Sequence[Any]) -> TorchTensor | UnreadableTensor:
    bits = rest[0] if rest else None
    if isinstance(bits, dict) and (bits.get("conj") or bits.get("neg")):
        return UnreadableTensor(
            "is yet to be conjugated or negated: call resolve_conj() or resolve_neg() before it is saved"
        )
    return made


def _from_array(budget: ReadBudget, array: Any, dtype: Any, *__: Any) -> InlineTensor | UnreadableTensor:
    if not isinstance(array, OpaqueObject) or not isinstance(dtype, TorchDtype) or dtype.name not in DTYPES:
        raise TypeError("it is of no array")
    try:
        name, shape, data = as_plain_array(array)
        budget.spend_memory(len(data))
    except ReadBudgetError:
        raise
    except (TypeError, ValueError) as error:
        return UnreadableTensor(f"is of an array that cannot be read: {error}")
    if name != dtype.name:
        return UnreadableTensor(f"was saved by way of a NumPy array of another dtype, {name}")
    return InlineTensor(TensorInfo(DTYPES[dtype.name], shape), data)


def _from_cpu(_: ReadBudget, data: Any, dtype: Any, *__: Any) -> Any:
    same = isinstance(data, TorchTensor) and isinstance(dtype, TorchDtype) and data.info.dtype == DTYPES.get(dtype.name)
    return data if same else UnreadableTensor("was moved to the CPU in another dtype")


def _typed(budget: ReadBudget, maker: Any, _: Any, args: Any, *__: Any) -> Any:
    """A tensor with attributes of its own, which are left out."""
    if not isinstance(maker, AllowedCallable) or maker not in _REBUILD.values() or not isinstance(args, tuple):
        raise TypeError("it is of no tensor")
    return maker.make(budget, *args)


def _device(_: ReadBudget, kind: Any, number: Any = None) -> TorchDevice:
    if not isinstance(kind, str) or not isinstance(number, int | None):
        raise TypeError("a device has a kind and a number")
    return TorchDevice(kind if number is None else f"{kind}:{number}")


def _layout(_: ReadBudget, text: Any) -> TorchLayout:
    if not isinstance(text, str):
        raise TypeError("a layout has a name")
    return TorchLayout(text)


def _size(budget: ReadBudget, given: Any = ()) -> TorchSize:
    if not isinstance(given, tuple | list):
        raise TypeError("it has integers")
    budget.spend(len(given))
    return TorchSize(_sizes(tuple(given)))


def _unreadable(why: str) -> Callable[..., UnreadableTensor]:
    return lambda *_: UnreadableTensor(why)


def _first(_: ReadBudget, data: Any, *__: Any) -> Any:
    return data


_MAKERS: Mapping[str, Callable[..., Any]] = {
    "_rebuild_tensor": _tensor_v2,
    "_rebuild_tensor_v2": _tensor_v2,
    "_rebuild_tensor_v3": _tensor_v3,
    "_rebuild_parameter": _first,
    "_rebuild_parameter_with_state": _first,
    "_rebuild_device_tensor_from_numpy": _from_array,
    "_rebuild_xla_tensor": _from_array,
    "_rebuild_device_tensor_from_cpu_tensor": _from_cpu,
    "_rebuild_meta_tensor_no_storage": _unreadable("is on the meta device and has no data"),
    "_rebuild_nested_tensor": _unreadable("is a nested tensor"),
    "_rebuild_qtensor": _unreadable("is quantized"),
    "_rebuild_sparse_tensor": _unreadable("is sparse"),
    "_rebuild_wrapper_subclass": _unreadable(
        "is a DTensor, or of another class that wraps tensors, of which a file has one rank's part: save whole "
        "tensors, or use torch.distributed.checkpoint"
    ),
}

_REBUILD = {f"torch._utils.{name}": AllowedCallable(name, make) for name, make in _MAKERS.items()}

#: What the pickles of DTensors and of quantized tensors name besides.
_DISTRIBUTED = (
    *("_mesh_layout._FlatLayout", "_mesh_layout._MeshLayout", "device_mesh.DeviceMesh", "tensor.DTensor"),
    *("tensor._dtensor_spec.DTensorSpec", "tensor._dtensor_spec.ShardOrderEntry", "tensor._dtensor_spec.TensorMeta"),
    *(f"tensor.placement_types.{kind}" for kind in ("Partial", "Replicate", "Shard", "_StridedShard")),
)
_QUANTIZED = ("per_channel_affine", "per_channel_affine_float_qparams", "per_tensor_affine", "per_tensor_symmetric")

#: The allow-list of torch's files.
NAMES: Mapping[str, object] = {
    **PLAIN,
    **NUMPY,
    **_REBUILD,
    **{f"torch.{name}": TorchDtype(name) for name in (*DTYPES, *OTHERS)},
    **{f"torch.{name}Storage": TorchStorageType(dtype) for name, dtype in STORAGES.items()},
    **{f"torch.distributed.{name}": AllowedCallable(name, plain_record(name)) for name in _DISTRIBUTED},
    **{f"torch.{name}": TorchLayout(name) for name in _QUANTIZED},
    "torch.UntypedStorage": TorchStorageType("uint8"),
    "torch.storage.UntypedStorage": TorchStorageType("uint8"),
    "torch.Size": AllowedCallable("torch.Size", _size),
    "torch.Tensor": AllowedCallable("torch.Tensor", _unreadable("is of another version of torch")),
    "torch.device": AllowedCallable("torch.device", _device),
    "torch.nn.parameter.Buffer": AllowedCallable("torch.nn.Buffer", _first),
    "torch.nn.parameter.Parameter": AllowedCallable("torch.nn.Parameter", _first),
    "torch.serialization._get_layout": AllowedCallable("torch.layout", _layout),
    "torch._tensor._rebuild_from_type_v2": AllowedCallable("torch.Tensor", _typed),
}
