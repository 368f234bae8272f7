"""Effects of a model's ``state_dict`` hooks on its tensors, found by running the hooks on tensors without data.

A hook may rename a tensor, or split it. Then each result consists of elements of one of the model's tensors in some
order, and their bytes are stored without a copy. Results that a hook computes or joins cannot be traced like this.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeGuard, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rankless.engine.plan.split_tensors import SplitLayout, split_tiles
from rankless.state.model.model_view import is_extra

_TO = torch.ops.aten._to_copy.default  # noqa: SLF001

#: Operations whose result has the elements of their first argument, in the same order.
_COPIES = {torch.ops.aten.clone.default, _TO}

#: Operations that concatenate tensors, if the dimension is 0.
_CONCATENATIONS = {torch.ops.aten.cat.default, torch.ops.aten.stack.default}


@dataclass(frozen=True)
class HookedStateDict:
    """The result of ``state_dict``: tensors of the model and other values by name.

    ``splits`` describe how hooks split tensors, by the model's name of the tensor. ``computed`` are the names of
    tensors that are neither of the model nor made of its elements.
    """

    values: dict[str, Any]
    splits: dict[str, tuple[SplitLayout, ...]] = field(default_factory=dict)
    computed: list[str] = field(default_factory=list)


def has_hooks(module: nn.Module) -> bool:
    """Return whether any submodule of a model has a hook on ``state_dict``."""
    return any(submodule._state_dict_hooks for submodule in module.modules())  # noqa: SLF001


def state_dict_names(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of a model, by its own names of them."""
    return {
        f"{path}.{name}" if path else name: tensor
        for path, submodule in module.named_modules(remove_duplicate=False)
        for name, tensor in (*submodule._parameters.items(), *submodule._buffers.items())  # noqa: SLF001
        if tensor is not None and name not in submodule._non_persistent_buffers_set  # noqa: SLF001
    }


def hooked_state_dict(module: nn.Module) -> HookedStateDict:
    """Return a model's ``state_dict`` without a copy, with its hooks run on tensors without data if possible."""
    tensors = state_dict_names(module)
    if has_hooks(module):
        stand_ins = _StandIns(tensors)
        with suppress(Exception), torch.no_grad(), stand_ins.origins:  # a hook that needs data gets it below
            return stand_ins.to_result(module.state_dict(destination=stand_ins, keep_vars=True))
    with torch.no_grad():
        values = dict(module.state_dict(keep_vars=True))
    model_ids = {id(tensor) for tensor in itertools.chain(module.parameters(), module.buffers())}
    return HookedStateDict(
        values, computed=[name for name, value in values.items() if _is_unknown(name, value, model_ids)]
    )


def _is_unknown(name: str, value: object, model_ids: set[int]) -> bool:
    return isinstance(value, torch.Tensor) and id(value) not in model_ids and not is_extra(name)


@dataclass(frozen=True)
class _Strided:
    """Elements of a tensor of the model: a strided view of it, flattened."""

    name: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def is_contiguous(self) -> bool:
        """Return whether the elements are one range of the tensor."""
        contiguous_strides = itertools.accumulate(self.size[:0:-1], operator.mul, initial=1)
        axes = zip(self.size[::-1], self.stride[::-1], contiguous_strides, strict=True) if self.size else ()
        return all(size == 1 or stride == contiguous for size, stride, contiguous in axes)


class _OriginTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records the origin of the elements of each tensor without data that is created."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._origins: dict[int, tuple[torch.dtype, Sequence[_Strided]]] = {}
        self._tensors: list[torch.Tensor] = []

    def record(self, tensor: torch.Tensor, origins: Sequence[_Strided]) -> None:
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

    def find_origins(self, tensor: torch.Tensor) -> Sequence[_Strided] | None:
        """Return the origins of a tensor's elements, in order; ``None`` if they are unknown."""
        if not _is_fake(tensor) or tensor.is_conj() or tensor.is_neg():
            return None
        dtype, origins = self._origins.get(_storage_id(tensor), (None, ()))
        if dtype != tensor.dtype:
            return None
        if len(origins) == 1 and origins[0].is_contiguous():
            start = origins[0].offset + int(tensor.storage_offset())
            return [_Strided(origins[0].name, start, tuple(tensor.shape), tuple(tensor.stride()))]
        numel = sum(math.prod(elements.size) for elements in origins)
        is_whole = tensor.is_contiguous() and tensor.numel() == numel
        return origins if is_whole else None


class _StandIns(OrderedDict[str, Any]):
    """A state dict to be filled, in which tensors without data stand for those of the model."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._metadata: OrderedDict[str, Any] = OrderedDict()
        self.origins = _OriginTracker()
        self._names = {id(tensor): name for name, tensor in reversed(list(tensors.items()))}
        self._tensors = tensors
        self._stand_ins: dict[str, torch.Tensor] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        name = self._names.get(id(value)) if isinstance(value, torch.Tensor) else None
        super().__setitem__(key, value if name is None else self._get_stand_in(name))

    def _get_stand_in(self, name: str) -> torch.Tensor:
        if name not in self._stand_ins:
            tensor = self._tensors[name]
            stand_in = self._stand_ins[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            self.origins.record(stand_in, [_whole_tensor(name, stand_in)])
        return self._stand_ins[name]

    def to_result(self, state: Mapping[str, Any]) -> HookedStateDict:
        """Return the result of ``state_dict``, with the model's tensors in place of their stand-ins."""
        result = HookedStateDict({})
        splits_of: dict[str, list[SplitLayout]] = {}
        for name, value in state.items():
            origins = self.origins.find_origins(value) if isinstance(value, torch.Tensor) else None
            if not isinstance(value, torch.Tensor) or is_extra(name):
                result.values[name] = value
            elif origins is None or len({elements.name for elements in origins}) > 1:
                result.computed.append(name)
            elif self._is_unchanged(value, origins):
                result.values[name] = self._tensors[origins[0].name]
            else:
                splits_of.setdefault(origins[0].name, []).extend(_make_splits(name, value, origins))
        for name, splits in splits_of.items():
            # A part under the tensor's own name would be taken for the whole tensor.
            is_stored_whole = name in state or any(value is self._tensors[name] for value in result.values.values())
            if is_stored_whole or not split_tiles(self._stand_ins[name].numel(), tuple(splits)):
                result.computed.extend(dict.fromkeys(split.name for split in splits))
            else:
                result.values[name], result.splits[name] = self._tensors[name], tuple(splits)
        return result

    def _is_unchanged(self, value: torch.Tensor, origins: Sequence[_Strided]) -> bool:
        """Return whether the value is a whole tensor of the model, perhaps detached or copied."""
        stand_in = self._stand_ins[origins[0].name]
        return value.shape == stand_in.shape and list(origins) == [_whole_tensor(origins[0].name, stand_in)]


def _copied_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[torch.Tensor]:
    """Return the tensors without data whose elements, concatenated, are the result of an operation."""
    if func in _COPIES:
        sources: Sequence[Any] = args[:1]
    elif func in _CONCATENATIONS and (args[1] if len(args) > 1 else kwargs.get("dim", 0)) == 0:
        sources = args[0]
    else:
        return ()
    return sources if all(_is_fake(source) for source in sources) else ()


def _make_splits(name: str, value: torch.Tensor, origins: Sequence[_Strided]) -> Iterator[SplitLayout]:
    start = 0
    for elements in origins:
        yield SplitLayout(name, tuple(value.shape), start, elements.offset, elements.size, elements.stride)
        start += math.prod(elements.size)


def _whole_tensor(name: str, tensor: torch.Tensor) -> _Strided:
    return _Strided(name, 0, tuple(tensor.shape), tuple(tensor.stride()))


def _is_fake(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a plain tensor without data, as the stand-ins are."""
    return type(value) is torch.Tensor and value.is_meta


def _storage_id(tensor: torch.Tensor) -> int:
    return cast("int", tensor.untyped_storage()._cdata)  # noqa: SLF001
