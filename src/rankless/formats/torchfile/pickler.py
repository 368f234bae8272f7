"""Writing a pickle as ``torch.save`` does, for trees with tensors that are only described and not in memory.

The bytes equal those that torch's pickler writes for the same tree, so that files can be compared with torch's own.

Conversions into the formats of NxD and DeepSpeed plan their files with it, before any tensor is there. torch reads the
bytes.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rankless.errors import UnsupportedValueError
from rankless.formats.torchfile.torch_dtypes import STORAGES
from rankless.formats.torchfile.torch_placeholders import TorchDevice, TorchDtype, TorchLayout, TorchSize
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import BY_TORCH_NAME, TORCH_NAMES, dtype_width

_PROTOCOL = 2


@dataclass(frozen=True, eq=False)
class PickledGlobal:
    """A class or function, by its module and name.

    Make only one object for each, because pickles refer to earlier objects by identity.
    """

    module: str
    name: str


@dataclass(frozen=True, eq=False)
class PickledObject:
    """An object of the class ``kind`` with a dict of attributes as its state."""

    kind: PickledGlobal
    state: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class StorageRef:
    """A contiguous tensor with its elements in the file's storage number ``storage``, outside of the pickle."""

    info: TensorInfo
    storage: int


#: The storage class of each dtype of torch that has one.
_CLASSES = {dtype: PickledGlobal("torch", f"{kind}Storage") for kind, dtype in STORAGES.items()}
_UNTYPED = PickledGlobal("torch.storage", "UntypedStorage")
_DTYPES = {dtype: PickledGlobal("torch", dtype) for dtype in BY_TORCH_NAME}
_TENSOR, _TENSOR_OF_DTYPE = (PickledGlobal("torch._utils", f"_rebuild_tensor_v{number}") for number in (2, 3))
_SIZE, _DEVICE, _LAYOUT = (
    PickledGlobal("torch", "Size"),
    PickledGlobal("torch", "device"),
    PickledGlobal("torch.serialization", "_get_layout"),
)


def pickle_tree(tree: Any) -> bytes:
    """Return the pickle of a tree of plain values, :class:`PickledObject` objects and :class:`StorageRef` tensors.

    Raises ``UnsupportedValueError`` if the tree has another value.
    """
    file = io.BytesIO()
    try:
        RecordPickler(file, _PROTOCOL).dump(tree)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UnsupportedValueError(f"the tree holds an object that is not a plain value: {error}") from error
    return file.getvalue()


#: Python's pickler in pure Python; the one in C cannot write the name of a class that does not exist.
_Python: Any = pickle._Pickler  # noqa: SLF001


class RecordPickler(_Python):  # type: ignore[misc]
    """A pickler that also writes :class:`PickledObject` objects, and tensors that are only described."""

    dispatch: ClassVar[dict[type, Callable[..., None]]] = dict(_Python.dispatch)

    def persistent_id(self, obj: Any) -> Any:
        """Return the id of a storage, because its bytes are outside of the pickle; ``None`` for all other objects."""
        return _storage_id(obj) if type(obj) is _Storage else None

    def _save_global(self, obj: PickledGlobal) -> None:
        self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        self.memoize(obj)

    def _save_dtype(self, obj: TorchDtype) -> None:
        self.save(_DTYPES[obj.name])

    def _save_object(self, obj: PickledObject) -> None:
        self.save(obj.kind)
        self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        self.memoize(obj)
        self.save(dict(obj.state))
        self.write(pickle.BUILD)

    def _save_tensor(self, obj: StorageRef) -> None:
        dtype, shape = TORCH_NAMES[obj.info.dtype], obj.info.shape
        hooks: OrderedDict[str, Any] = OrderedDict()
        args = (_Storage(obj), 0, shape, _row_major_strides(shape), False, hooks)
        if dtype in _CLASSES:
            self._save_call(obj, _TENSOR, args)
        else:
            self._save_call(obj, _TENSOR_OF_DTYPE, (*args, _DTYPES[dtype]))

    def _save_call(self, obj: Any, function: PickledGlobal, args: tuple[Any, ...]) -> None:
        self.save(function)
        self.save(args)
        self.write(pickle.REDUCE)
        self.memoize(obj)

    dispatch[PickledGlobal] = _save_global
    dispatch[TorchDtype] = _save_dtype
    dispatch[PickledObject] = _save_object
    dispatch[StorageRef] = _save_tensor
    dispatch[TorchSize] = lambda self, obj: self._save_call(obj, _SIZE, (tuple(obj),))
    dispatch[TorchDevice] = lambda self, obj: self._save_call(obj, _DEVICE, _device_args(obj))
    dispatch[TorchLayout] = lambda self, obj: self._save_call(obj, _LAYOUT, (obj.text,))


@dataclass(frozen=True)
class _Storage:
    tensor: StorageRef


def _storage_id(storage: _Storage) -> tuple[Any, ...]:
    info, number = storage.tensor.info, storage.tensor.storage
    kind = _CLASSES.get(TORCH_NAMES[info.dtype])
    width = 1 if kind is None else dtype_width(info.dtype)
    return "storage", kind or _UNTYPED, str(number), "cpu", info.nbytes // width


def _device_args(device: TorchDevice) -> tuple[Any, ...]:
    kind, _, number = device.text.partition(":")
    return (kind, int(number)) if number else (kind,)


def _row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides in elements. Like in torch, an empty dimension counts as one of size 1."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
