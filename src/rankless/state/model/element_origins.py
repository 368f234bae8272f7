"""The origins of elements of tensors without data, which operations of torch rename, split, reorder or join.

:mod:`rankless.state.model.stand_ins` and :mod:`rankless.state.model.hf_conversion` track with it, on each rank for
itself, when a model is viewed. Splits follow from it, and so the bytes of files.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rankless.engine.plan.split_tensors import SplitLayout

_TO = torch.ops.aten._to_copy.default  # noqa: SLF001

#: Operations that return the elements of their first argument, in the same order.
_COPIES = {torch.ops.aten.clone.default, _TO}

#: Operations that concatenate tensors, if the dimension is 0.
_CONCATENATIONS = {torch.ops.aten.cat.default, torch.ops.aten.stack.default}


@dataclass(frozen=True)
class StridedElements:
    """Elements of the tensor called ``name``: a strided view of it, flattened."""

    name: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def is_contiguous(self) -> bool:
        """Return whether the elements are one range of the tensor."""
        contiguous_strides = itertools.accumulate(self.size[:0:-1], operator.mul, initial=1)
        axes = zip(self.size[::-1], self.stride[::-1], contiguous_strides, strict=True) if self.size else ()
        return all(size == 1 or stride == contiguous for size, stride, contiguous in axes)


class OriginTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records the origin of the elements of each tensor without data that is created."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._origins: dict[int, tuple[torch.dtype, Sequence[StridedElements]]] = {}
        self._tensors: list[torch.Tensor] = []

    def record(self, tensor: torch.Tensor, origins: Sequence[StridedElements]) -> None:
        """Record the origins of a tensor's elements, which must be all of its storage."""
        self._origins[_storage_id(tensor)] = tensor.dtype, origins
        self._tensors.append(tensor)  # else another tensor could get its storage's address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See :class:`TorchDispatchMode`."""
        kwargs = kwargs or {}
        sources = _copied_tensors(func, args, kwargs)
        if func is _TO and sources:  # the device is ignored: a tensor without data cannot be copied to one
            result = torch.empty_like(sources[0], dtype=kwargs.get("dtype"))
        else:
            result = func(*args, **kwargs)
        if func._schema.is_mutable:  # noqa: SLF001 - the arguments written to change their values
            for argument in args:
                if _is_fake(argument):
                    self._origins.pop(_storage_id(argument), None)
        origins = [self.find_origins(source) for source in sources]
        if (
            sources
            and result.is_contiguous()
            and None not in origins
            and {source.dtype for source in sources} == {result.dtype}
        ):
            self.record(result, [elements for origin in origins for elements in origin or ()])
        return result

    def find_origins(self, tensor: torch.Tensor) -> Sequence[StridedElements] | None:
        """Return the origins of a tensor's elements, in order; ``None`` if they are unknown."""
        if not _is_fake(tensor) or tensor.is_conj() or tensor.is_neg():
            return None
        dtype, origins = self._origins.get(_storage_id(tensor), (None, ()))
        if dtype != tensor.dtype:
            return None
        if len(origins) == 1 and origins[0].is_contiguous():
            start = origins[0].offset + int(tensor.storage_offset())
            return [StridedElements(origins[0].name, start, tuple(tensor.shape), tuple(tensor.stride()))]
        numel = sum(math.prod(elements.size) for elements in origins)
        is_whole = tensor.is_contiguous() and tensor.numel() == numel
        return origins if is_whole else None


def _copied_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[torch.Tensor]:
    """Return the tensors without data that an operation concatenates: its result has their elements in order."""
    if func in _COPIES:
        sources: Sequence[Any] = args[:1]
    elif func in _CONCATENATIONS and (args[1] if len(args) > 1 else kwargs.get("dim", 0)) == 0:
        sources = args[0]
    else:
        return ()
    return sources if all(_is_fake(source) for source in sources) else ()


def make_splits(
    name: str, shape: tuple[int, ...], origins: Sequence[StridedElements]
) -> Iterator[tuple[str, SplitLayout]]:
    """Yield the elements that a stored tensor consists of, each with the name of the tensor that they are of."""
    start = 0
    for elements in origins:
        yield elements.name, SplitLayout(name, shape, start, elements.offset, elements.size, elements.stride)
        start += math.prod(elements.size)


def whole_tensor(name: str, tensor: torch.Tensor) -> StridedElements:
    """Return all elements of a tensor."""
    return StridedElements(name, 0, tuple(tensor.shape), tuple(tensor.stride()))


def _is_fake(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a plain tensor without data, as the stand-ins are."""
    return type(value) is torch.Tensor and value.is_meta


def _storage_id(tensor: torch.Tensor) -> int:
    return cast("int", tensor.untyped_storage()._cdata)  # noqa: SLF001
