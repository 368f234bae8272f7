"""Stored tensors that stand for their bytes: an engine's ``load_weights`` takes them as if they were read.

A :class:`LazyTensor` wraps a *meta* tensor. Its strides and offset say which elements of the stored tensor it has. So
torch itself follows every view, without a rule of rankless for each. Its uses decide which elements are read:

- ``parameter.copy_(lazy)`` is noted, and executed later together with other copies.
- An operation that computes reads exactly the elements of its view first, and goes on with a plain tensor.
- An operation that writes *into* it makes it real: from then on it is a plain tensor in memory. (gpt_oss zeroes a bias
  on all tensor-parallel ranks except one; a recorder of copies would load the file's values.)

:class:`~rankless.inference.weights_loader.WeightsLoader` makes them on each rank; torch calls them in the thread of the
engine's loader. A tensor that torch sees must never have other elements than the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
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

#: Operations that give a tensor other memory, as those with the tag ``inplace_view`` give it another shape.
_OTHER_MEMORY = frozenset({"aten::set_", "aten::resize_", "aten::resize_as_"})

#: The device of stored tensors.
_HOST = torch.device("cpu")

#: An operation of torch, such as ``aten.copy_.default``.
Operation = Any


class Loader(Protocol):
    """The object that executes the copies of lazy tensors: a ``WeightsLoader``."""

    contents: WeakSet[StoredContent]

    def note_copy(self, target: torch.Tensor, source: LazyTensor) -> None:
        """Copy the elements of ``source`` into ``target``, later, but before anything else uses ``target``."""

    def read_view(self, source: LazyTensor, reason: str) -> torch.Tensor:
        """Return the elements of ``source``, which are read now, because of the operation ``reason``."""

    def read_content(self, content: StoredContent, reason: str) -> torch.Tensor:
        """Return all that a content has, in memory of its own, because of the operation ``reason``."""


class StoredContent:
    """The content that a lazy tensor and all views of it share: a stored tensor, a copy of a view, or a real tensor.

    ``meta`` says which elements of the stored tensor it has, and ``look`` where each will be in memory, on ``device``.
    """

    __slots__ = ("__weakref__", "device", "loader", "look", "meta", "name", "real")

    def __init__(
        self, loader: Loader, name: str, meta: torch.Tensor, look: torch.Tensor, device: torch.device = _HOST
    ) -> None:
        self.loader, self.name, self.meta, self.look, self.device = loader, name, meta, look, device
        self.real: torch.Tensor | None = None
        loader.contents.add(self)

    def make_real(self, reason: str) -> torch.Tensor:
        """Return the memory of all views of it, which an operation is going to change."""
        if self.real is None:
            self.real = self.loader.read_content(self, reason).to(self.device)
        return self.real


class LazyTensor(torch.Tensor):
    """A view of a stored tensor. See the module.

    ``meta`` says which elements of the stored tensor it has. ``look`` has the strides that it shows: other ones than in
    ``meta`` if it is a view of a copy.
    """

    content: StoredContent
    meta: torch.Tensor
    look: torch.Tensor

    @staticmethod
    def __new__(cls: type[Self], content: StoredContent, meta: torch.Tensor, look: torch.Tensor) -> Self:
        """Make a lazy tensor of some elements of a content."""
        lazy: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls,
            look.shape,
            strides=look.stride(),
            storage_offset=look.storage_offset(),
            dtype=look.dtype,
            device=content.device,
        )
        lazy.content, lazy.meta, lazy.look = content, meta, look
        return lazy

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Operation, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Follow, note or execute an operation on a lazy tensor: torch calls it for each."""
        del types
        kwargs = kwargs or {}
        if is_composed(func):
            return func.decompose(*args, **kwargs)
        for written in iterate_written(func, args, kwargs):
            if isinstance(written, LazyTensor):
                _refuse_other_shapes(func, written)
                written.content.make_real(str(func))
        if func is _aten.copy_.default and is_unread(args[1]) and not isinstance(args[0], LazyTensor):
            args[1].content.loader.note_copy(args[0], args[1])
            return args[0]
        if args and is_unread(args[0]) and not any(isinstance(arg, LazyTensor) for arg in args[1:]):
            with torch.inference_mode(mode=False):  # as the tensors that are followed were made
                result = _follow(func, args[0], args[1:], kwargs)
            if result is not None:
                return result
            if is_view(func):  # that no strides describe, such as conj(): a change of it must change the tensor
                args[0].content.make_real(str(func))
        # A view has the mode of its base, and lazy tensors are never made in inference mode.
        with torch.inference_mode(mode=False) if is_view(func) else nullcontext():
            return func(*realize(args, func), **realize(kwargs, func))

    def _as_plain(self, reason: str) -> torch.Tensor:
        """Return a plain tensor with the memory that all views of this one have from now on."""
        self.content.make_real(reason)
        plain: torch.Tensor = realize(self, reason)
        return plain

    def numpy(self, *, force: bool = False) -> Any:
        """Return the elements as an array: they are read now."""
        return self._as_plain("numpy").numpy(force=force)

    def tolist(self) -> Any:
        """Return the elements as a list: they are read now."""
        return realize(self, "tolist").tolist()

    def data_ptr(self) -> int:
        """Return the address of the elements: they are read now, and stay as long as a view of this tensor."""
        return self._as_plain("data_ptr").data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory of the elements: they are read now."""
        return self._as_plain("untyped_storage").untyped_storage()

    def __dlpack__(self, **options: Any) -> Any:
        return self._as_plain("__dlpack__").__dlpack__(**options)

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its gradient. It cannot be assigned."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise StateError(
            f"{self.content.name!r} is a stored tensor: its data cannot be replaced by a tensor of shape "
            f"{tuple(value.shape)}; use a tensor of your own"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return f"LazyTensor({self.content.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, spec: str) -> str:
        return format(realize(self, "format"), spec) if self.dim() == 0 else object.__format__(self, spec)

    def __reduce_ex__(self, _: object) -> Any:
        raise StateError(f"{self.content.name!r} was not read yet: it can be neither copied by Python nor pickled")

    __deepcopy__ = __reduce_ex__


@cache
def is_view(func: Operation) -> bool:
    """Return whether an operation returns a view of its argument, and reads no elements."""
    return any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)  # noqa: SLF001


@cache
def is_composed(func: Operation) -> bool:
    """Return whether torch executes an operation as others. In inference mode it does not do so by itself."""
    try:
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")  # noqa: SLF001
    except RuntimeError:  # an operation such as prim::device, which only wrapped tensors have
        return False
    return bool(has_kernel)


def is_unread(value: object) -> bool:
    """Return whether a value is a lazy tensor with unchanged content."""
    return isinstance(value, LazyTensor) and value.content.real is None


@cache
def _written_arguments(func: Operation) -> Sequence[tuple[int, str]]:
    """Return the position and the name of each argument that an operation writes into."""
    return [
        (number, argument.name)
        for number, argument in enumerate(func._schema.arguments)  # noqa: SLF001
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def iterate_written(func: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operation writes into."""
    for number, name in _written_arguments(func):
        value = args[number] if number < len(args) else kwargs.get(name)
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, torch.Tensor):
                yield tensor


def _refuse_other_shapes(func: Operation, lazy: LazyTensor) -> None:
    """Raise ``StateError`` if an operation would give a lazy tensor another shape, or other memory, in place."""
    if torch.Tag.inplace_view in func.tags or func._schema.name in _OTHER_MEMORY:  # noqa: SLF001
        raise StateError(
            f"{func} was called on the stored tensor {lazy.content.name!r}: it cannot get another shape in place; use "
            "what returns a view, such as t() or squeeze()"
        )


def _follow(func: Operation, lazy: LazyTensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operation that reads no elements; ``None`` if it needs them."""
    if is_view(func):
        return _follow_view(func, lazy, args, kwargs)
    if func in _SHAPE_ONLY:
        return func(_empty_as(lazy), *args, **kwargs)
    if func is _aten.clone.default or (
        func is _aten._to_copy.default and kwargs.get("dtype", lazy.dtype) in {None, lazy.dtype}  # noqa: SLF001
    ):
        return _follow_copy(lazy, kwargs)
    return None


def _follow_view(func: Operation, lazy: LazyTensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    is_original = lazy.look is lazy.meta
    if func is _aten.as_strided.default and not is_original:  # it has the copy's strides
        return None
    try:
        metas = func(lazy.meta, *args, **kwargs)
        looks = metas if is_original else func(lazy.look, *args, **kwargs)
    except RuntimeError:  # a view that no strides describe, or one that is not possible of a real tensor either
        return None
    pairs = list(zip(metas, looks, strict=True)) if isinstance(metas, list | tuple) else [(metas, looks)]
    if any(meta.is_conj() or meta.is_neg() for meta, _ in pairs):
        return None
    if func is _aten.as_strided.default and not _fits(metas):  # torch raises an error for a real tensor only
        return None
    views = [LazyTensor(lazy.content, meta, look) for meta, look in pairs]
    return type(metas)(views) if isinstance(metas, list | tuple) else views[0]


def _fits(view: torch.Tensor) -> bool:
    """Return whether all elements of a view on the meta device are in its storage."""
    reach = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    end = (view.storage_offset() + reach + 1) * view.itemsize
    return view.numel() == 0 or end <= view.untyped_storage().nbytes()


def _follow_copy(lazy: LazyTensor, kwargs: Mapping[str, Any]) -> LazyTensor | None:
    """Return a copy with the same elements, maybe with other strides or on another device; ``None`` if unknown."""
    memory_format = kwargs.get("memory_format") or torch.preserve_format
    device = torch.device(kwargs.get("device") or lazy.device)
    if memory_format is torch.contiguous_format:
        look = torch.empty(lazy.shape, dtype=lazy.dtype, device="meta")
    elif memory_format is torch.preserve_format:
        look = torch.empty_like(_empty_as(lazy, "meta"))
    else:
        return None
    content = StoredContent(lazy.content.loader, lazy.content.name, lazy.meta, look, device)
    return LazyTensor(content, lazy.meta, look)


def _empty_as(lazy: LazyTensor, device: torch.device | str | None = None) -> torch.Tensor:
    """Return a tensor like ``lazy`` with memory that was never touched."""
    return torch.empty_strided(lazy.shape, lazy.stride(), dtype=lazy.dtype, device=device or lazy.device)


def realize(value: Any, func: Operation) -> Any:
    """Return an argument with plain tensors in place of lazy ones."""
    if isinstance(value, LazyTensor):
        real, look = value.content.real, value.look
        if real is None:
            return value.content.loader.read_view(value, str(func))
        flat = real.as_strided((real.untyped_storage().nbytes() // real.itemsize,), (1,), 0).view(look.dtype)
        return flat.as_strided(look.shape, look.stride(), look.storage_offset())
    if isinstance(value, Mapping):
        return {key: realize(item, func) for key, item in value.items()}
    return _map_tensors(lambda item: realize(item, func), value) if isinstance(value, list | tuple) else value


def _map_tensors(function: Callable[[Any], Any], value: Any) -> Any:
    return type(value)(map(function, value))
