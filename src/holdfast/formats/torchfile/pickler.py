"""Writing a pickle as ``torch.save`` writes it, of trees whose tensors are only described: no tensor is in memory.

The bytes are those that torch's pickler makes of the same tree, so that files can be compared with torch's own.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from holdfast.errors import UnsupportedValueError
from holdfast.formats.torchfile.dtypes import DTYPES, STORAGES
from holdfast.formats.torchfile.objects import TorchDevice, TorchDtype, TorchLayout, TorchSize
from holdfast.ondisk.dtypes import WIDTHS
from holdfast.ondisk.files import TensorInfo

_PROTOCOL = 2


@dataclass(frozen=True, eq=False)
class PickledGlobal:
    """A class or function by its module and name. The same one must be the same object, as it is in Python."""

    module: str
    name: str


@dataclass(frozen=True, eq=False)
class PlainTensor:
    """An object that has nothing but attributes."""

    kind: PickledGlobal
    state: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class StorageRef:
    """A tensor whose elements lie beside the pickle, whole and row-major, as storage number ``storage``."""

    info: TensorInfo
    storage: int


#: What each dtype of safetensors files is called in torch, and its class of storages where it has one.
TORCH = {name: dtype for dtype, name in DTYPES.items()}
_CLASSES = {dtype: PickledGlobal("torch", f"{kind}Storage") for kind, dtype in STORAGES.items()}
_UNTYPED = PickledGlobal("torch.storage", "UntypedStorage")
_DTYPES = {dtype: PickledGlobal("torch", dtype) for dtype in DTYPES}
_TENSOR, _TENSOR_OF_DTYPE = (PickledGlobal("torch._utils", f"_rebuild_tensor_v{number}") for number in (2, 3))
_SIZE, _DEVICE, _LAYOUT = (
    PickledGlobal("torch", "Size"),
    PickledGlobal("torch", "device"),
    PickledGlobal("torch.serialization", "_get_layout"),
)


def pickle_tree(tree: Any) -> bytes:
    """The pickle of a tree of plain values, :class:`PlainTensor` objects and :class:`StorageRef` tensors.

    Raises ``UnsupportedValueError`` for what is none of these.
    """
    file = io.BytesIO()
    try:
        _Pickler(file, _PROTOCOL).dump(tree)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UnsupportedValueError(f"the tree has what is no plain value: {error}") from error
    return file.getvalue()


#: Python's own, in Python: the one in C cannot name a class that is not there.
_Python: Any = pickle._Pickler  # noqa: SLF001


class _Pickler(_Python):  # type: ignore[misc]
    dispatch: ClassVar[dict[type, Callable[..., None]]] = dict(_Python.dispatch)

    def persistent_id(self, obj: Any) -> Any:
        """Storages lie outside of the pickle."""
        return _storage(obj) if type(obj) is _Storage else None

    def _global(self, obj: PickledGlobal) -> None:
        self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        self.memoize(obj)

    def _dtype(self, obj: TorchDtype) -> None:
        self.save(_DTYPES[obj.name])

    def _plain(self, obj: PlainTensor) -> None:
        self.save(obj.kind)
        self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        self.memoize(obj)
        self.save(dict(obj.state))
        self.write(pickle.BUILD)

    def _tensor(self, obj: StorageRef) -> None:
        dtype, shape = TORCH[obj.info.dtype], obj.info.shape
        hooks: OrderedDict[str, Any] = OrderedDict()
        rest = (_Storage(obj), 0, shape, _strides(shape), False, hooks)
        if dtype in _CLASSES:
            self._reduce(obj, _TENSOR, rest)
        else:
            self._reduce(obj, _TENSOR_OF_DTYPE, (*rest, _DTYPES[dtype]))

    def _reduce(self, obj: Any, maker: PickledGlobal, args: tuple[Any, ...]) -> None:
        self.save(maker)
        self.save(args)
        self.write(pickle.REDUCE)
        self.memoize(obj)

    dispatch[PickledGlobal] = _global
    dispatch[TorchDtype] = _dtype
    dispatch[PlainTensor] = _plain
    dispatch[StorageRef] = _tensor
    dispatch[TorchSize] = lambda self, obj: self._reduce(obj, _SIZE, (tuple(obj),))
    dispatch[TorchDevice] = lambda self, obj: self._reduce(obj, _DEVICE, _device(obj))
    dispatch[TorchLayout] = lambda self, obj: self._reduce(obj, _LAYOUT, (obj.text,))


@dataclass(frozen=True)
class _Storage:
    tensor: StorageRef


def _storage(storage: _Storage) -> tuple[Any, ...]:
    info, number = storage.tensor.info, storage.tensor.storage
    kind = _CLASSES.get(TORCH[info.dtype])
    width = 1 if kind is None else WIDTHS[info.dtype]
    return "storage", kind or _UNTYPED, str(number), "cpu", info.nbytes // width


def _device(device: TorchDevice) -> tuple[Any, ...]:
    kind, _, number = device.text.partition(":")
    return (kind, int(number)) if number else (kind,)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """In elements; as torch has them, a dimension of no index counts as one."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
