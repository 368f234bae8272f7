"""Proof that initializers set tensors, found by running them on copies of the model that share no tensor with it.

An initializer runs several times, from the same states of the random number generators. All memory that it gets without
values has another pattern in each run. Tensors that differ afterwards depend on such memory.

It runs on each rank while a load matches, before anything has changed; afterwards the generators are as before.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rankless.errors import StateError
from rankless.state.model.materialize import MetaTensor, find_initializer, initialize_outside
from rankless.state.model.module_copies import copy_modules

#: The bytes of memory without values in each run: two that are neither true nor false, false and, as floats, no number.
_PATTERNS = (0xA5, 0x5A, 0x00, 0xFF)

#: The operations of torch that return memory without values.
_EMPTY = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}


@dataclass(frozen=True)
class ProbeResult:
    """The reasons why tensors would get no value, by name, and the tensors that only modules around theirs set."""

    reasons: dict[str, str]
    set_outside: list[MetaTensor]


class _FillEmpty(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives the memory that torch returns without values one pattern."""

    def __init__(self, pattern: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pattern = pattern

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _EMPTY and not result.is_meta:
            _fill(result, self._pattern)
        return result


def probe_initializers(model: nn.Module, tensors: Collection[MetaTensor]) -> ProbeResult:
    """Return how the ``tensors`` of a model on the meta device would be initialized. The model is not changed.

    Called by :class:`rankless.state.meta_models.MetaModels` for those that are not loaded.
    """
    result = ProbeResult({}, [])
    for owner in dict.fromkeys(meta.owner for meta in tensors):
        reasons = _explain_owner(model, owner, [meta for meta in tensors if meta.owner is owner])
        unset = [meta for meta in tensors if meta.name in reasons]
        set_outside = unset if unset and _is_set_outside(model, owner, unset) else []
        result.set_outside.extend(set_outside)
        result.reasons.update({} if set_outside else reasons)
    return result


def _explain_owner(model: nn.Module, owner: nn.Module, tensors: Collection[MetaTensor]) -> dict[str, str]:
    kind = type(owner).__qualname__
    if find_initializer(model, owner) is None:
        return {meta.name: f"{kind} has no reset_parameters() to initialize it" for meta in tensors}
    try:
        first, *others = (_initialize_copy(model, owner, tensors, pattern) for pattern in _PATTERNS)
    except Exception as error:  # noqa: BLE001 - code of the user
        return {meta.name: f"the code of {kind} that would initialize it failed: {error}" for meta in tensors}
    reason = f"neither reset_parameters() of {kind} nor _init_weights() of its model sets all of it"
    unset = {name for name, value in first.items() if value is None or any(other[name] != value for other in others)}
    return {meta.name: reason for meta in tensors if meta.name in unset}


def _is_set_outside(model: nn.Module, owner: nn.Module, tensors: Collection[MetaTensor]) -> bool:
    """Return whether the initializers of the modules around ``owner`` set all of these tensors, in place."""
    try:
        first, *others = (_initialize_outside_copy(model, owner, tensors, pattern) for pattern in _PATTERNS)
    except Exception:  # noqa: BLE001 - code of the user
        return False
    return all(other == first for other in others)


def _initialize_outside_copy(
    model: nn.Module, owner: nn.Module, tensors: Collection[MetaTensor], pattern: int
) -> list[bytes | None]:
    """Return the bytes of the ``tensors`` after the modules around ``owner`` were initialized on a copy."""
    values = {id(meta.tensor): _fill_copy(meta.tensor, pattern) for meta in tensors}
    with _keep_generators(), torch.no_grad(), _FillEmpty(pattern):
        initialize_outside(model, owner, values)
    return [_bytes_of(value) for value in values.values()]


def _initialize_copy(
    model: nn.Module, owner: nn.Module, tensors: Collection[MetaTensor], pattern: int
) -> dict[str, bytes | None]:
    """Return the bytes of the ``tensors`` of an initialized copy of ``owner``, by name; ``None`` for no tensor."""
    copied = copy_modules(model)
    for module, module_copy in ((module, copied.modules[id(module)]) for module in owner.modules()):
        module_copy._parameters = {  # noqa: SLF001
            name: parameter
            if parameter is None
            else nn.Parameter(_fill_copy(parameter, pattern), parameter.requires_grad)
            for name, parameter in module._parameters.items()  # noqa: SLF001
        }
        module_copy._buffers = {  # noqa: SLF001
            name: buffer if buffer is None else _fill_copy(buffer, pattern)
            for name, buffer in module._buffers.items()  # noqa: SLF001
        }
    owner_copy = copied.modules[id(owner)]
    initialize = find_initializer(copied.model, owner_copy)
    parts = _list_parts(copied.model)
    if initialize is not None:
        with _keep_generators(), torch.no_grad(), _FillEmpty(pattern):
            initialize()
    if not parts <= _list_parts(copied.model):
        raise StateError("it replaces modules, whose tensors may be those that are loaded")
    return {meta.name: _bytes_of(getattr(owner_copy, meta.name.rpartition(".")[2])) for meta in tensors}


def _list_parts(model: nn.Module) -> set[tuple[str, int]]:
    """Return the modules of a model that have tensors, by name and ``id``."""
    named = model.named_modules(remove_duplicate=False)
    return {(name, id(module)) for name, module in named if module._parameters or module._buffers}  # noqa: SLF001


@contextmanager
def _keep_generators() -> Iterator[None]:
    """Give the global generators of Python, NumPy and torch their states back at the end."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the one that initializers use
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def _fill_copy(tensor: torch.Tensor, pattern: int) -> torch.Tensor:
    """Return a tensor of the same kind in memory, with the pattern in every byte. Of a sharded tensor it is whole."""
    filled = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    _fill(filled, pattern)
    vars(filled).update(vars(tensor) if type(tensor) in {torch.Tensor, nn.Parameter, nn.Buffer} else {})
    return filled


def _fill(tensor: torch.Tensor, pattern: int) -> None:
    torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(pattern)


def _bytes_of(tensor: torch.Tensor | None) -> bytes | None:
    if tensor is None or tensor.is_meta:
        return None
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
