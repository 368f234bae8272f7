"""The allow-list of globals in torch's pickles: how tensors, storages, dtypes and the like are rebuilt.

Source: ``torch/_utils.py``, ``torch/_tensor.py`` and ``torch/serialization.py`` of torch 2.13.

Readers of files of torch, DCP and other systems unpickle with it. A new entry must neither run code nor allocate
without a budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankless.errors import ReadBudgetError
from rankless.formats.pickles.builtin_types import PLAIN, plain_record
from rankless.formats.pickles.numpy_arrays import NUMPY, as_plain_array
from rankless.formats.pickles.unpickler import AllowedCallable, OpaqueObject
from rankless.formats.stored_tensor import InlineTensor, UnreadableTensor
from rankless.formats.torchfile.torch_dtypes import OTHERS, STORAGES
from rankless.formats.torchfile.torch_placeholders import (
    TorchDevice,
    TorchDtype,
    TorchLayout,
    TorchSize,
    TorchStorage,
    TorchStorageType,
    TorchTensor,
)
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import BY_TORCH_NAME
from rankless.ondisk.read_budget import ReadBudget

#: The most dimensions that torch supports, and the limit of its sizes, offsets and strides.
_DIMENSIONS, _LARGEST = 64, 2**63

#: Units of work for a tensor, and for each of its dimensions.
_TENSOR, _DIMENSION = 32, 8


def check_sizes(given: Any) -> tuple[int, ...]:
    """Return sizes, offsets or strides. Raises ``TypeError`` or ``ValueError`` if they are none."""
    if not isinstance(given, tuple) or len(given) > _DIMENSIONS:
        raise TypeError(f"a tensor's shape and strides must be tuples of at most {_DIMENSIONS} integers")
    if not all(type(size) is int and 0 <= size < _LARGEST for size in given):
        raise ValueError("a tensor's sizes, offset and strides must be integers from 0 to 2**63 - 1")
    return tuple(given)


def _make_view(
    budget: ReadBudget, storage: Any, dtype: str, geometry: tuple[Any, Any, Any]
) -> TorchTensor | UnreadableTensor:
    """Return a tensor. ``geometry`` is its storage offset, shape and strides, in elements."""
    if not isinstance(storage, TorchStorage):
        raise TypeError("a tensor must refer to a storage")
    (offset,), shape, strides = check_sizes(geometry[:1]), check_sizes(geometry[1]), check_sizes(geometry[2])
    budget.spend(_TENSOR + _DIMENSION * len(shape))
    if dtype not in BY_TORCH_NAME:
        return UnreadableTensor(f"has dtype {dtype}, which rankless does not read")
    return TorchTensor.make_view(storage, dtype, offset, shape, strides)


def _rebuild_tensor_v2(budget: ReadBudget, storage: Any, offset: Any, shape: Any, strides: Any, *options: Any) -> Any:
    """Return a tensor. ``options``: requires_grad, hooks and lazy bits; version 1 has none of these."""
    tensor = _make_view(budget, storage, getattr(storage, "dtype", ""), (offset, shape, strides))
    return _refuse_lazy_bits(tensor, options[2:])


def _rebuild_tensor_v3(budget: ReadBudget, storage: Any, offset: Any, shape: Any, strides: Any, *options: Any) -> Any:
    """Return a tensor, like version 2, but with a dtype after the hooks in ``options``."""
    _, _, dtype, *bits = options
    if not isinstance(dtype, TorchDtype):
        raise TypeError("a tensor's dtype must be a torch.dtype")
    return _refuse_lazy_bits(_make_view(budget, storage, dtype.name, (offset, shape, strides)), bits)


def _refuse_lazy_bits(tensor: TorchTensor | UnreadableTensor, options: Sequence[Any]) -> TorchTensor | UnreadableTensor:
    """Return the tensor, or a placeholder if its conjugation or negation is pending."""
    bits = options[0] if options else None
    if isinstance(bits, dict) and (bits.get("conj") or bits.get("neg")):
        return UnreadableTensor(
            "has a pending conjugation or negation: call resolve_conj() or resolve_neg() before it is saved"
        )
    return tensor


def _from_array(budget: ReadBudget, array: Any, dtype: Any, *__: Any) -> InlineTensor | UnreadableTensor:
    if not isinstance(array, OpaqueObject) or not isinstance(dtype, TorchDtype) or dtype.name not in BY_TORCH_NAME:
        raise TypeError("expected a NumPy array and a torch.dtype")
    try:
        name, shape, data = as_plain_array(array)
        budget.spend_memory(len(data))
    except ReadBudgetError:
        raise
    except (TypeError, ValueError) as error:
        return UnreadableTensor(f"was saved as an array that cannot be read: {error}")
    if name != dtype.name:
        return UnreadableTensor(f"was saved as a NumPy array of another dtype, {name}")
    return InlineTensor(TensorInfo(BY_TORCH_NAME[dtype.name], shape), data)


def _from_cpu(_: ReadBudget, data: Any, dtype: Any, *__: Any) -> Any:
    is_tensor = isinstance(data, TorchTensor) and isinstance(dtype, TorchDtype)
    if is_tensor and data.info.dtype == BY_TORCH_NAME.get(dtype.name):
        return data
    return UnreadableTensor("was moved to the CPU in another dtype")


def _rebuild_from_type(budget: ReadBudget, function: Any, _: Any, args: Any, *__: Any) -> Any:
    """Return a tensor that had additional attributes, without these."""
    if not isinstance(function, AllowedCallable) or function not in _REBUILD.values() or not isinstance(args, tuple):
        raise TypeError("expected a function that rebuilds a tensor, and its arguments")
    return function.make(budget, *args)


def _make_device(_: ReadBudget, kind: Any, number: Any = None) -> TorchDevice:
    if not isinstance(kind, str) or not isinstance(number, int | None):
        raise TypeError("a torch.device must have a type and an index")
    return TorchDevice(kind if number is None else f"{kind}:{number}")


def _make_layout(_: ReadBudget, text: Any) -> TorchLayout:
    if not isinstance(text, str):
        raise TypeError("a torch.layout must have a name")
    return TorchLayout(text)


def _make_size(budget: ReadBudget, given: Any = ()) -> TorchSize:
    if not isinstance(given, tuple | list):
        raise TypeError("a torch.Size must have a list of integers")
    budget.spend(len(given))
    return TorchSize(check_sizes(tuple(given)))


def _make_unreadable(why: str) -> Callable[..., UnreadableTensor]:
    return lambda *_: UnreadableTensor(why)


def _return_first(_: ReadBudget, data: Any, *__: Any) -> Any:
    return data


_REBUILD_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "_rebuild_tensor": _rebuild_tensor_v2,
    "_rebuild_tensor_v2": _rebuild_tensor_v2,
    "_rebuild_tensor_v3": _rebuild_tensor_v3,
    "_rebuild_parameter": _return_first,
    "_rebuild_parameter_with_state": _return_first,
    "_rebuild_device_tensor_from_numpy": _from_array,
    "_rebuild_xla_tensor": _from_array,
    "_rebuild_device_tensor_from_cpu_tensor": _from_cpu,
    "_rebuild_meta_tensor_no_storage": _make_unreadable("is on the meta device and has no data"),
    "_rebuild_nested_tensor": _make_unreadable("is a nested tensor"),
    "_rebuild_qtensor": _make_unreadable("is quantized"),
    "_rebuild_sparse_tensor": _make_unreadable("is sparse"),
    "_rebuild_wrapper_subclass": _make_unreadable(
        "is a DTensor, or of another class that wraps tensors, so the file has only one rank's shard: save full "
        "tensors, or use torch.distributed.checkpoint"
    ),
}

_REBUILD = {f"torch._utils.{name}": AllowedCallable(name, make) for name, make in _REBUILD_FUNCTIONS.items()}

#: Further globals in the pickles of DTensors and of quantized tensors.
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
    **{f"torch.{name}": TorchDtype(name) for name in (*BY_TORCH_NAME, *OTHERS)},
    **{f"torch.{name}Storage": TorchStorageType(dtype) for name, dtype in STORAGES.items()},
    **{f"torch.distributed.{name}": AllowedCallable(name, plain_record(name)) for name in _DISTRIBUTED},
    **{f"torch.{name}": TorchLayout(name) for name in _QUANTIZED},
    "torch.UntypedStorage": TorchStorageType("uint8"),
    "torch.storage.UntypedStorage": TorchStorageType("uint8"),
    "torch.Size": AllowedCallable("torch.Size", _make_size),
    "torch.Tensor": AllowedCallable("torch.Tensor", _make_unreadable("is of another version of torch")),
    "torch.device": AllowedCallable("torch.device", _make_device),
    "torch.nn.parameter.Buffer": AllowedCallable("torch.nn.Buffer", _return_first),
    "torch.nn.parameter.Parameter": AllowedCallable("torch.nn.Parameter", _return_first),
    "torch.serialization._get_layout": AllowedCallable("torch.layout", _make_layout),
    "torch._tensor._rebuild_from_type_v2": AllowedCallable("torch.Tensor", _rebuild_from_type),
}
