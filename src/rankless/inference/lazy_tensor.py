"""Stored tensors that stand for their bytes: an engine's ``load_weights`` takes them as if they were read.

A :class:`LazyTensor` wraps a *meta* tensor whose strides and offset say which elements of the stored tensor it has. So
torch itself follows every view, without a rule of rankless for each. What happens to it decides what is read:

- ``parameter.copy_(lazy)`` is noted, and executed later together with other copies.
- An operation that computes reads exactly the elements of its view first, and goes on with a plain tensor.
- An operation that writes *into* it makes it real: from then on it is a plain tensor in memory. (gpt_oss zeroes a bias
  on all tensor-parallel ranks except one; a recorder of copies would load what is in the file.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Protocol, Self
from weakref import WeakSet

import torch

from rankless.errors import StateError

_aten = torch.ops.aten

#: Operations that use the shape and the dtype of a tensor, and not its elements.
_SHAPE_ONLY = frozenset(
    {
        _aten.empty_like.default,
        _aten.zeros_like.default,
        _aten.ones_like.default,
        _aten.full_like.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
        _aten.new_zeros.default,
        _aten.new_ones.default,
        _aten.new_full.default,
    }
)

#: The device of stored tensors.
_HOST = torch.device("cpu")

#: An operation of torch, such as ``aten.copy_.default``.
Operation = Any


class Loader(Protocol):
    """What executes the copies of lazy tensors: :class:`rankless.inference.weights_loader.WeightsLoader`."""

    contents: WeakSet[StoredContent]

    def note_copy(self, target: torch.Tensor, source: LazyTensor) -> None:
        """Copy the elements of ``source`` into ``target``, later, but before anything else uses ``target``."""

    def read_view(self, source: LazyTensor, reason: str) -> torch.Tensor:
        """Return the elements of ``source``, which are read now, because of the operation ``reason``."""

    def read_whole(self, source: LazyTensor, reason: str) -> torch.Tensor:
        """Return the whole stored tensor of which ``source`` is a view, in memory of its own, flat."""


class StoredContent:
    """What a lazy tensor and all views of it are views of: the stored tensor, or a real one after it was changed."""

    __slots__ = ("__weakref__", "loader", "name", "real")

    def __init__(self, loader: Loader, name: str) -> None:
        self.loader, self.name = loader, name
        self.real: torch.Tensor | None = None
        loader.contents.add(self)

    def copy(self) -> StoredContent:
        """Return the content of a copy: to change it does not change this one."""
        content = StoredContent(self.loader, self.name)
        content.real = None if self.real is None else self.real.clone()
        return content


class LazyTensor(torch.Tensor):
    """A view of a stored tensor. See the module."""

    content: StoredContent
    meta: torch.Tensor

    @staticmethod
    def __new__(
        cls: type[Self],
        content: StoredContent,
        meta: torch.Tensor,
        device: torch.device = _HOST,
        strides: Sequence[int] | None = None,
    ) -> Self:
        """Make a lazy tensor of the elements of ``meta``, with these ``strides`` if they are to look otherwise."""
        lazy: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls,
            meta.shape,
            strides=meta.stride() if strides is None else strides,
            storage_offset=meta.storage_offset() if strides is None else 0,
            dtype=meta.dtype,
            device=device,
        )
        lazy.content, lazy.meta = content, meta
        return lazy

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Operation, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Follow, note or execute an operation on a lazy tensor: torch calls it for each."""
        del types
        kwargs = kwargs or {}
        for written in _iterate_written(func, args, kwargs):
            _make_real(written, str(func))
        if func is _aten.copy_.default and _is_unread(args[1]) and not isinstance(args[0], LazyTensor):
            args[1].content.loader.note_copy(args[0], args[1])
            return args[0]
        if args and _is_unread(args[0]) and not any(isinstance(arg, LazyTensor) for arg in args[1:]):
            result = _follow(func, args[0], args[1:], kwargs)
            if result is not None:
                return result
        return func(*_realize(args, func), **_realize(kwargs, func))

    def numpy(self, *, force: bool = False) -> Any:
        """Return the elements as an array: they are read now."""
        return _realize(self, "numpy").numpy(force=force)

    def tolist(self) -> Any:
        """Return the elements as a list: they are read now."""
        return _realize(self, "tolist").tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return f"LazyTensor({self.content.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: object) -> Any:
        raise StateError(f"{self.content.name!r} was not read yet: it can be neither copied by Python nor pickled")


@cache
def is_view(func: Operation) -> bool:
    """Return whether an operation returns a view of its argument, and reads no elements."""
    return any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)  # noqa: SLF001


def _is_unread(value: object) -> bool:
    return isinstance(value, LazyTensor) and value.content.real is None


@cache
def _written_arguments(func: Operation) -> Sequence[tuple[int, str]]:
    """Return the position and the name of each argument that an operation writes into."""
    return [
        (number, argument.name)
        for number, argument in enumerate(func._schema.arguments)  # noqa: SLF001
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _iterate_written(func: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[LazyTensor]:
    for number, name in _written_arguments(func):
        value = args[number] if number < len(args) else kwargs.get(name)
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, LazyTensor):
                yield tensor


def _follow(func: Operation, lazy: LazyTensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operation that reads no elements; ``None`` if it needs them."""
    if is_view(func):
        try:
            result = func(lazy.meta, *args, **kwargs)
        except (
            RuntimeError
        ):  # a view of a rearranged copy, which no strides describe: torch raises for the real one, too
            return None
        return _map_tensors(lambda meta: LazyTensor(lazy.content, meta, lazy.device), result)
    if func in _SHAPE_ONLY:
        return func(_empty_as(lazy), *args, **kwargs)
    if func is _aten.clone.default or (
        func is _aten._to_copy.default and kwargs.get("dtype", lazy.dtype) in {None, lazy.dtype}  # noqa: SLF001
    ):
        return _follow_copy(lazy, kwargs)
    return None


def _follow_copy(lazy: LazyTensor, kwargs: Mapping[str, Any]) -> LazyTensor | None:
    """Return a copy with the same elements, maybe with other strides or on another device; ``None`` if unknown."""
    memory_format = kwargs.get("memory_format") or torch.preserve_format
    device = kwargs.get("device") or lazy.device
    if memory_format is torch.contiguous_format:
        strides = torch.empty(lazy.shape, device="meta").stride()
    elif memory_format is torch.preserve_format:
        strides = torch.empty_like(_empty_as(lazy, "meta")).stride()
    else:
        return None
    return LazyTensor(lazy.content.copy(), lazy.meta, device, strides)


def _empty_as(lazy: LazyTensor, device: torch.device | str | None = None) -> torch.Tensor:
    """Return a tensor like ``lazy`` whose memory was never touched."""
    return torch.empty_strided(lazy.shape, lazy.stride(), dtype=lazy.dtype, device=device or lazy.device)


def _make_real(lazy: LazyTensor, reason: str) -> None:
    content = lazy.content
    if content.real is None:
        content.real = content.loader.read_whole(lazy, reason)


def _realize(value: Any, func: Operation) -> Any:
    """Return an argument with plain tensors in place of lazy ones."""
    if isinstance(value, LazyTensor):
        content = value.content
        if content.real is None:
            return content.loader.read_view(value, str(func))
        flat = content.real.view(value.dtype)
        return flat.as_strided(value.meta.shape, value.meta.stride(), value.meta.storage_offset()).to(value.device)
    if isinstance(value, Mapping):
        return {key: _realize(item, func) for key, item in value.items()}
    return _map_tensors(lambda item: _realize(item, func), value) if isinstance(value, list | tuple) else value


def _map_tensors(function: Callable[[Any], Any], value: Any) -> Any:
    return type(value)(map(function, value)) if isinstance(value, list | tuple) else function(value)
