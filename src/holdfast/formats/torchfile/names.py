"""The names in torch's pickles, and what is made of them.

Source: ``torch/_utils.py``, ``torch/_tensor.py`` and ``torch/serialization.py`` of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.errors import BudgetError
from holdfast.formats.arrange.stored import Inline, Unreadable
from holdfast.formats.pickles.arrays import NUMPY, plain
from holdfast.formats.pickles.machine import Maker, Record
from holdfast.formats.pickles.plain import PLAIN, record
from holdfast.formats.torchfile.dtypes import DTYPES, OTHERS, STORAGES
from holdfast.formats.torchfile.objects import Device, Dtype, Layout, Size, Storage, StorageType, Tensor
from holdfast.layout.budget import Budget
from holdfast.layout.files import TensorInfo

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


def _view(budget: Budget, storage: Any, dtype: str, place: tuple[Any, Any, Any]) -> Tensor | Unreadable:
    if not isinstance(storage, Storage):
        raise TypeError("it is of no storage")
    (offset,), shape, strides = _sizes(place[:1]), _sizes(place[1]), _sizes(place[2])
    budget.spend(_TENSOR + _DIMENSION * len(shape))
    if dtype not in DTYPES:
        return Unreadable(f"has dtype {dtype}, which holdfast does not read")
    return Tensor.view(storage, dtype, offset, shape, strides)


def _tensor_v2(budget: Budget, storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> Any:
    """``rest``: whether a gradient is wanted, hooks, and bits to be applied lazily; version 1 has none of these."""
    return _unless_lazy(_view(budget, storage, getattr(storage, "dtype", ""), (offset, shape, strides)), rest[2:])


def _tensor_v3(budget: Budget, storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> Any:
    """The same, with a dtype after the hooks."""
    _, _, dtype, *bits = rest
    if not isinstance(dtype, Dtype):
        raise TypeError("its dtype is none")
    return _unless_lazy(_view(budget, storage, dtype.name, (offset, shape, strides)), bits)


def _unless_lazy(made: Tensor | Unreadable, rest: Sequence[Any]) -> Tensor | Unreadable:
    bits = rest[0] if rest else None
    if isinstance(bits, dict) and (bits.get("conj") or bits.get("neg")):
        return Unreadable("is yet to be conjugated or negated: call resolve_conj() or resolve_neg() before it is saved")
    return made


def _from_array(budget: Budget, array: Any, dtype: Any, *__: Any) -> Inline | Unreadable:
    if not isinstance(array, Record) or not isinstance(dtype, Dtype) or dtype.name not in DTYPES:
        raise TypeError("it is of no array")
    try:
        name, shape, data = plain(array)
        budget.spend_memory(len(data))
    except BudgetError:
        raise
    except (TypeError, ValueError) as error:
        return Unreadable(f"is of an array that cannot be read: {error}")
    if name != dtype.name:
        return Unreadable(f"was saved by way of a NumPy array of another dtype, {name}")
    return Inline(TensorInfo(DTYPES[dtype.name], shape), data)


def _from_cpu(_: Budget, data: Any, dtype: Any, *__: Any) -> Any:
    same = isinstance(data, Tensor) and isinstance(dtype, Dtype) and data.info.dtype == DTYPES.get(dtype.name)
    return data if same else Unreadable("was moved to the CPU in another dtype")


def _typed(budget: Budget, maker: Any, _: Any, args: Any, *__: Any) -> Any:
    """A tensor with attributes of its own, which are left out."""
    if not isinstance(maker, Maker) or maker not in _REBUILD.values() or not isinstance(args, tuple):
        raise TypeError("it is of no tensor")
    return maker.make(budget, *args)


def _device(_: Budget, kind: Any, number: Any = None) -> Device:
    if not isinstance(kind, str) or not isinstance(number, int | None):
        raise TypeError("a device has a kind and a number")
    return Device(kind if number is None else f"{kind}:{number}")


def _layout(_: Budget, text: Any) -> Layout:
    if not isinstance(text, str):
        raise TypeError("a layout has a name")
    return Layout(text)


def _size(budget: Budget, given: Any = ()) -> Size:
    if not isinstance(given, tuple | list):
        raise TypeError("it has integers")
    budget.spend(len(given))
    return Size(_sizes(tuple(given)))


def _unreadable(why: str) -> Callable[..., Unreadable]:
    return lambda *_: Unreadable(why)


def _first(_: Budget, data: Any, *__: Any) -> Any:
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

_REBUILD = {f"torch._utils.{name}": Maker(name, make) for name, make in _MAKERS.items()}

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
    **{f"torch.{name}": Dtype(name) for name in (*DTYPES, *OTHERS)},
    **{f"torch.{name}Storage": StorageType(dtype) for name, dtype in STORAGES.items()},
    **{f"torch.distributed.{name}": Maker(name, record(name)) for name in _DISTRIBUTED},
    **{f"torch.{name}": Layout(name) for name in _QUANTIZED},
    "torch.UntypedStorage": StorageType("uint8"),
    "torch.storage.UntypedStorage": StorageType("uint8"),
    "torch.Size": Maker("torch.Size", _size),
    "torch.Tensor": Maker("torch.Tensor", _unreadable("is of another version of torch")),
    "torch.device": Maker("torch.device", _device),
    "torch.nn.parameter.Buffer": Maker("torch.nn.Buffer", _first),
    "torch.nn.parameter.Parameter": Maker("torch.nn.Parameter", _first),
    "torch.serialization._get_layout": Maker("torch.layout", _layout),
    "torch._tensor._rebuild_from_type_v2": Maker("torch.Tensor", _typed),
}
