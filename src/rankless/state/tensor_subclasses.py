"""Tensors of wrapper subclasses, such as quantized ones: stored as their inner tensors, and described by plain values.

A wrapper subclass is one that torch calls traceable: ``__tensor_flatten__`` returns the names of its inner tensors, and
a context. A load fills the inner tensors of a tensor that exists, and requires an equal description of it.

Views of models and optimizers describe wrappers with it, on each rank of a save or load. Descriptions are in
``state.json`` and are compared at a load; they must not depend on the rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, TypeGuard

import msgspec
import torch
from msgspec.structs import replace
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rankless.engine.plan.layout_types import FlatSharded, PlacementLayout, Replicated, Sharded, is_dividing
from rankless.errors import UnsupportedTensorError
from rankless.ondisk.value_files import SUBCLASS, TORCHAO
from rankless.state.tensor_views import (
    NAMES,
    PLAIN_CLASSES,
    TensorView,
    check_present,
    convert_layout,
    local_tensor,
    view_of,
)

#: Stand in a context for the dtype and shape of the tensor itself: the shape of a shard depends on the rank.
_OWN_DTYPE, _OWN_SHAPE = "dtype", "shape"


class WrapperView(msgspec.Struct, frozen=True):
    """A tensor of a wrapper subclass as a checkpoint sees it.

    ``description`` has plain values: the class, dtype, shape, context and ``inner``, the names of the inner tensors.
    ``inner`` are these by name, live. If an inner tensor is a wrapper itself, its inner tensors have names with a dot,
    such as ``tensor_impl.scale`` of an ``AffineQuantizedTensor`` of torchao.
    """

    description: dict[str, Any]
    inner: dict[str, TensorView]


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether the shard of a tensor on this rank belongs to a wrapper subclass."""
    local = local_tensor(tensor)
    if type(local) in PLAIN_CLASSES:
        return False
    return is_traceable_wrapper_subclass(local) and not local.is_nested and not isinstance(local, AsyncCollectiveTensor)


def is_description(value: object) -> TypeGuard[dict[str, Any]]:
    """Return whether a value, perhaps of a forged file, describes a tensor of a wrapper subclass."""
    if not isinstance(value, dict) or SUBCLASS not in value:
        return False
    inner, shape = value.get("inner"), value.get("shape")
    has_inner = isinstance(inner, list) and all(type(name) is str for name in inner)
    return has_inner and isinstance(shape, list) and all(type(size) is int for size in shape)


def is_alike(saved: Any, here: Mapping[str, Any]) -> bool:
    """Return whether two descriptions agree. torchao's is compared if ``saved``, of a file of torchao, has no other."""
    if isinstance(saved, dict) and saved.keys() == {TORCHAO}:
        from rankless.ondisk.torchao_form import has_equal_settings  # noqa: PLC0415 - few files are of torchao

        return has_equal_settings(saved[TORCHAO], here.get(TORCHAO, ""))
    return is_description(saved) and _without_torchao(saved) == _without_torchao(here)


def _without_torchao(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description without torchao's own text, which depends on its version and says nothing else."""
    return {key: value for key, value in description.items() if key != TORCHAO}


def explain_difference(saved: object, here: object) -> str:
    """Return a text about how two descriptions differ; a value that is no description stands for a plain tensor."""
    if isinstance(saved, dict) and isinstance(here, dict) and saved.keys() == {TORCHAO}:
        return f"{saved[TORCHAO]} in the checkpoint, {here.get(TORCHAO, _name_kind(here))} here"
    if not is_description(saved) or not is_description(here):
        return f"{_name_kind(saved)} in the checkpoint, {_name_kind(here)} here"
    key = next(key for key in (*here, *saved) if key != TORCHAO and saved.get(key) != here.get(key))
    return f"{key.replace('_', ' ')} {saved.get(key)!r} in the checkpoint, {here.get(key)!r} here"


def _name_kind(description: object) -> str:
    return f"a {description[SUBCLASS]}" if is_description(description) else "a plain tensor"


def iter_inner(tensor: torch.Tensor, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the inner tensors, by name, of a tensor of a wrapper subclass."""
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        inner = getattr(tensor, name)
        if _is_nested(inner):
            yield from iter_inner(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, inner


def _is_nested(inner: torch.Tensor) -> bool:
    return is_wrapper(inner) and not isinstance(inner, DTensor)


def view_outside(tensor: torch.Tensor, subject: str) -> TensorView:
    """Return the view of a tensor as a parameter: of the shape and layout that plain states of it have."""
    if not is_wrapper(tensor):
        return view_of(tensor, subject)
    layout = convert_layout(tensor, subject) if isinstance(tensor, DTensor) else None
    return TensorView(NAMES.get(tensor.dtype, ""), tuple(tensor.shape), layout, local_tensor(tensor))


def view_wrapper(tensor: torch.Tensor, subject: str) -> WrapperView:
    """Return the view of a tensor of a wrapper subclass: :func:`is_wrapper` is true for it.

    Raises ``UnsupportedTensorError``, which names ``subject``, if its inner tensors cannot be stored, or if it is
    sharded and it is unknown how they are divided.
    """
    local = local_tensor(tensor)
    inner = {name: view_of(value, f"{subject}, its {name}") for name, value in iter_inner(local)}
    for name, view in inner.items():
        check_present(view, f"{subject}, its {name}")
    if isinstance(tensor, DTensor):
        layout = convert_layout(tensor, subject)
        inner = _divide_rows(tensor, layout, inner, subject) if layout.division else _replicate(layout, inner)
    description = {
        **_describe_class(local, subject),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "inner": list(inner),
    }
    return WrapperView(description, inner)


def _describe_class(local: torch.Tensor, subject: str) -> dict[str, Any]:
    names, context = local.__tensor_flatten__()  # type: ignore[attr-defined]
    nested = {
        name: _describe_class(getattr(local, name), subject) for name in names if _is_nested(getattr(local, name))
    }
    return {
        SUBCLASS: type(local).__qualname__,
        "context": _describe_context(context, local, subject),
        **({"nested": nested} if nested else {}),
    }


def _describe_context(value: Any, local: torch.Tensor, subject: str) -> Any:
    """Return a context as plain values that do not depend on the rank."""
    if isinstance(value, tuple | list) and list(value) == list(local.shape):
        return _OWN_SHAPE
    if isinstance(value, tuple | list):
        return [_describe_context(item, local, subject) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _describe_context(item, local, subject) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        members = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"class": type(value).__qualname__, "members": _describe_context(members, local, subject)}
    return _describe_leaf(value, local, subject)


def _describe_leaf(value: Any, local: torch.Tensor, subject: str) -> Any:
    if value is local.dtype:
        return _OWN_DTYPE
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, torch.device):
        return value.type
    if value is None or type(value) in {bool, int, float, str, torch.dtype}:
        return value
    raise UnsupportedTensorError(
        f"{subject} is a {type(local).__qualname__}, whose context (of __tensor_flatten__) has a "
        f"{type(value).__qualname__}, which cannot be stored: pass its dequantized values in a state dict"
    )


def _replicate(layout: PlacementLayout, inner: Mapping[str, TensorView]) -> dict[str, TensorView]:
    whole = PlacementLayout(layout.mesh, (Replicated(),) * len(layout.placements))
    return {name: replace(view, layout=whole) for name, view in inner.items()}


def _divide_rows(
    tensor: DTensor, layout: PlacementLayout, inner: Mapping[str, TensorView], subject: str
) -> dict[str, TensorView]:
    """Return the views of the inner tensors of a tensor that is sharded by rows: they are divided with the rows."""
    ((count, placement), *others) = layout.division
    if placement != Sharded(0) or others:
        raise _unsupported_layout(tensor, subject, "only rows can be divided, with Shard(0) over one mesh dimension")
    local = local_tensor(tensor)
    rows, held = tensor.shape[0], local.shape[0]
    chunk = -(-rows // count)
    if chunk * (count - 1) >= rows:
        raise _unsupported_layout(tensor, subject, "a rank holds no rows")
    divided = _find_divided(local)
    if divided is None:
        raise _unsupported_layout(tensor, subject, "slices of its shard do not show how its inner tensors are divided")
    views = _replicate(layout, inner)
    for name in divided:
        view = inner[name]
        size, numel = view.shape[0], view.local.numel()
        if chunk * size % held or rows * size % held or not view.local.is_contiguous():
            raise _unsupported_layout(tensor, subject, f"blocks of its {name} contain elements of several shards")
        flat = FlatSharded(0, chunk * numel // held)
        placements = tuple(
            flat if is_dividing(placement, size) else Replicated()
            for placement, size in zip(layout.placements, layout.mesh.shape, strict=True)
        )
        shape = (rows * size // held, *view.shape[1:])
        views[name] = replace(view, shape=shape, layout=PlacementLayout(layout.mesh, placements))
    return views


def _find_divided(local: torch.Tensor) -> list[str] | None:
    """Return the inner tensors that are sliced with a tensor's rows, in proportion; ``None`` if that is unknown.

    torch's DCP needs such slices, too. They may have to end at a block.
    """
    wholes, rows = dict(iter_inner(local)), local.shape[0]
    for stop in (2**i for i in range(rows.bit_length()) if 2**i < rows):
        try:
            with torch.no_grad():
                part = local[:stop]
        except Exception:  # noqa: BLE001, S112 - each class has its own errors for a slice that it does not support
            continue
        parts = dict(iter_inner(part)) if type(part) is type(local) else {}
        if parts.keys() != wholes.keys():
            return None
        divided = [name for name, whole in wholes.items() if parts[name].shape != whole.shape]
        are_rows = all(
            parts[name].shape[1:] == wholes[name].shape[1:] and len(parts[name]) * rows == len(wholes[name]) * stop
            for name in divided
        )
        return divided if are_rows else None
    return None


def _unsupported_layout(tensor: DTensor, subject: str, reason: str) -> UnsupportedTensorError:
    return UnsupportedTensorError(
        f"{subject} is a {type(local_tensor(tensor)).__qualname__} of shape {list(tensor.shape)} with the placements "
        f"{tensor.placements} on {tensor.device_mesh.shape} ranks: {reason}; keep it unsharded, or shard it by rows "
        "such that every rank holds whole blocks"
    )
