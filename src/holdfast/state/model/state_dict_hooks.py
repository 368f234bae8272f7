"""What the ``state_dict`` hooks of a model make of its tensors, learnt by running them on tensors without data.

A hook may rename a tensor, or split it. Then each result is elements of one of the model's tensors in some order, and
what is stored are its bytes, with no copy made. What a hook computes, or joins, cannot be told so.
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

from holdfast.engine.plan.split_tensors import SplitLayout, split_tiles
from holdfast.state.model.view import is_extra

_TO = torch.ops.aten._to_copy.default  # noqa: SLF001

#: Operations whose result has the elements of their first argument, in their order.
_COPIES = {torch.ops.aten.clone.default, _TO}

#: Operations that put tensors one after another, in dimension 0.
_JOINS = {torch.ops.aten.cat.default, torch.ops.aten.stack.default}


@dataclass(frozen=True)
class HookedStateDict:
    """What ``state_dict`` says: tensors of the model and other values by name.

    ``splits`` tell what becomes of those tensors that hooks split, by the name that the model has for them.
    ``made`` are the names of tensors that are neither of the model nor made of its elements.
    """

    values: dict[str, Any]
    splits: dict[str, tuple[SplitLayout, ...]] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)


def has_hooks(module: nn.Module) -> bool:
    """Whether any part of a model has a hook on ``state_dict``."""
    return any(part._state_dict_hooks for part in module.modules())  # noqa: SLF001


def state_dict_names(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of a model, by the names that it has for them itself."""
    return {
        f"{path}.{name}" if path else name: tensor
        for path, part in module.named_modules(remove_duplicate=False)
        for name, tensor in (*part._parameters.items(), *part._buffers.items())  # noqa: SLF001
        if tensor is not None and name not in part._non_persistent_buffers_set  # noqa: SLF001
    }


def hooked_state_dict(module: nn.Module) -> HookedStateDict:
    """What a model's ``state_dict`` says, without a copy and without data."""
    tensors = state_dict_names(module)
    if has_hooks(module):
        stand_ins = _StandIns(tensors)
        with suppress(Exception), torch.no_grad(), stand_ins.origins:  # a hook that needs data gets some below
            return stand_ins.told(module.state_dict(destination=stand_ins, keep_vars=True))
    with torch.no_grad():
        values = dict(module.state_dict(keep_vars=True))
    known = {id(tensor) for tensor in itertools.chain(module.parameters(), module.buffers())}
    return HookedStateDict(values, made=[name for name, one in values.items() if _is_unknown(name, one, known)])


def _is_unknown(name: str, value: object, known: set[int]) -> bool:
    return isinstance(value, torch.Tensor) and id(value) not in known and not is_extra(name)


@dataclass(frozen=True)
class _Strided:
    """Elements of a tensor of the model: a strided view of it, flattened."""

    name: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def is_contiguous(self) -> bool:
        """Whether they are one range of the tensor."""
        steps = itertools.accumulate(self.size[:0:-1], operator.mul, initial=1)
        axes = zip(self.size[::-1], self.stride[::-1], steps, strict=True) if self.size else ()
        return all(size == 1 or step == whole for size, step, whole in axes)


class _Origins(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes where the elements of each tensor without data come from that is made while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, tuple[torch.dtype, Sequence[_Strided]]] = {}
        self._kept: list[torch.Tensor] = []

    def note(self, tensor: torch.Tensor, origins: Sequence[_Strided]) -> None:
        """Take note of where a tensor's elements come from, which are all of its storage."""
        self._known[_storage(tensor)] = tensor.dtype, origins
        self._kept.append(tensor)  # or another one could get its storage's address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See :class:`TorchDispatchMode`."""
        kwargs = kwargs or {}
        sources = _copied(func, args, kwargs)
        if func is _TO and sources:  # also to a device, which what has no data cannot go to
            made = torch.empty_like(sources[0], dtype=kwargs.get("dtype"))
        else:
            made = func(*args, **kwargs)
        if func._schema.is_mutable:  # noqa: SLF001 - what is written to has other values
            for one in args:
                if _is_bare(one):
                    self._known.pop(_storage(one), None)
        origins = [self.of(one) for one in sources]
        if sources and made.is_contiguous() and None not in origins and {one.dtype for one in sources} == {made.dtype}:
            self.note(made, [one for origin in origins for one in origin or ()])
        return made

    def of(self, tensor: torch.Tensor) -> Sequence[_Strided] | None:
        """Where a tensor's elements come from, in their order; ``None`` where that is not known."""
        if not _is_bare(tensor) or tensor.is_conj() or tensor.is_neg():
            return None
        dtype, origins = self._known.get(_storage(tensor), (None, ()))
        if dtype != tensor.dtype:
            return None
        if len(origins) == 1 and origins[0].is_contiguous():
            start = origins[0].offset + int(tensor.storage_offset())
            return [_Strided(origins[0].name, start, tuple(tensor.shape), tuple(tensor.stride()))]
        number = sum(math.prod(one.size) for one in origins)
        is_whole = tensor.is_contiguous() and tensor.numel() == number
        return origins if is_whole else None


class _StandIns(OrderedDict[str, Any]):
    """A state dict to be filled, in which tensors without data stand for those of the model."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._metadata: OrderedDict[str, Any] = OrderedDict()
        self.origins = _Origins()
        self._names = {id(tensor): name for name, tensor in reversed(list(tensors.items()))}
        self._tensors = tensors
        self._made: dict[str, torch.Tensor] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        name = self._names.get(id(value)) if isinstance(value, torch.Tensor) else None
        super().__setitem__(key, value if name is None else self._stand_in(name))

    def _stand_in(self, name: str) -> torch.Tensor:
        if name not in self._made:
            like = self._tensors[name]
            stand_in = self._made[name] = torch.empty(like.shape, dtype=like.dtype, device="meta")
            self.origins.note(stand_in, [_whole(name, stand_in)])
        return self._made[name]

    def told(self, found: Mapping[str, Any]) -> HookedStateDict:
        """What was said, with the tensors of the model for what stood for them."""
        said = HookedStateDict({})
        parts: dict[str, list[SplitLayout]] = {}
        for name, value in found.items():
            origins = self.origins.of(value) if isinstance(value, torch.Tensor) else None
            if not isinstance(value, torch.Tensor) or is_extra(name):
                said.values[name] = value
            elif origins is None or len({one.name for one in origins}) > 1:
                said.made.append(name)
            elif self._is_unchanged(value, origins):
                said.values[name] = self._tensors[origins[0].name]
            else:
                parts.setdefault(origins[0].name, []).extend(_splits(name, value, origins))
        for name, splits in parts.items():
            # Under its own name it would be taken for the tensor as it is.
            is_told_whole = name in found or any(one is self._tensors[name] for one in said.values.values())
            if is_told_whole or not split_tiles(self._made[name].numel(), tuple(splits)):
                said.made.extend(dict.fromkeys(split.name for split in splits))
            else:
                said.values[name], said.splits[name] = self._tensors[name], tuple(splits)
        return said

    def _is_unchanged(self, value: torch.Tensor, origins: Sequence[_Strided]) -> bool:
        """Whether it is a tensor of the model as it is: detached, or copied."""
        like = self._made[origins[0].name]
        return value.shape == like.shape and list(origins) == [_whole(origins[0].name, like)]


def _copied(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[torch.Tensor]:
    """The tensors without data whose elements, one after another, an operation's result has."""
    if func in _COPIES:
        sources: Sequence[Any] = args[:1]
    elif func in _JOINS and (args[1] if len(args) > 1 else kwargs.get("dim", 0)) == 0:
        sources = args[0]
    else:
        return ()
    return sources if all(_is_bare(one) for one in sources) else ()


def _splits(name: str, value: torch.Tensor, origins: Sequence[_Strided]) -> Iterator[SplitLayout]:
    reached = 0
    for one in origins:
        yield SplitLayout(name, tuple(value.shape), reached, one.offset, one.size, one.stride)
        reached += math.prod(one.size)


def _whole(name: str, tensor: torch.Tensor) -> _Strided:
    return _Strided(name, 0, tuple(tensor.shape), tuple(tensor.stride()))


def _is_bare(value: object) -> TypeGuard[torch.Tensor]:
    """Whether it is a plain tensor without data, as the stand-ins are."""
    return type(value) is torch.Tensor and value.is_meta


def _storage(tensor: torch.Tensor) -> int:
    return cast("int", tensor.untyped_storage()._cdata)  # noqa: SLF001
