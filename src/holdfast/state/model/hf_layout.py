"""How transformers stores a model's tensors where it has them otherwise in memory: fused experts as one each.

Its own conversion, turned round as ``save_pretrained`` does, is run on tensors without data: where each result lies in
the tensor that it is a view of tells which bytes are stored under which name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from holdfast.errors import UnsupportedTensorError
from holdfast.ondisk.files import TensorInfo
from holdfast.state.model.hf_config import unwrap_model
from holdfast.state.tensors import DTYPES


class TensorOrigin(NamedTuple):
    """A stored tensor is the bytes from ``start`` on of the tensor in memory called ``name``."""

    name: str
    start: int


#: Tensors as they are stored, by name.
Stored = Mapping[str, tuple[TensorInfo, TensorOrigin]]


def stored_layout(model: object, infos: Mapping[str, TensorInfo]) -> Stored:
    """What becomes of a model's tensors, given by name, dtype and shape, in a folder of transformers.

    They stay what they are for all models but transformers'. Raises ``UnsupportedTensorError`` for a conversion that
    does more than to cut tensors into ranges of bytes.
    """
    module: Any = unwrap_model(model) if isinstance(model, nn.Module) else None
    as_they_are = {name: (info, TensorOrigin(name, 0)) for name, info in infos.items()}
    if not hasattr(getattr(module, "config", None), "model_type"):
        return as_they_are
    try:
        from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415 - not everybody has it
    except ImportError:  # before version 5 tensors were stored as they are
        return as_they_are
    memory = {name: torch.empty(info.shape, dtype=DTYPES[info.dtype], device="meta") for name, info in infos.items()}
    with _Views():
        found = revert_weight_conversion(module, dict(memory))
    return _told(found, memory, infos)


class _Views(TorchFunctionMode):
    """No tensor is copied just to lie in one piece: a view tells where it comes from."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


def _told(
    found: Mapping[str, torch.Tensor], memory: Mapping[str, torch.Tensor], infos: Mapping[str, TensorInfo]
) -> dict[str, tuple[TensorInfo, TensorOrigin]]:
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in memory.items()}  # noqa: SLF001
    told = {}
    for name, view in found.items():
        owner = owners.get(view.untyped_storage()._cdata)  # noqa: SLF001
        if owner is None or not view.is_contiguous():
            raise UnsupportedTensorError(
                f"transformers stores {name!r} in another order of elements than the model has it in memory, which "
                "holdfast does not convert: use the model's save_pretrained(), or a file with shard=False"
            )
        info = TensorInfo(infos[owner].dtype, tuple(view.shape))
        told[name] = info, TensorOrigin(owner, int(view.storage_offset()) * view.element_size())
    _check_whole(told, infos)
    return told


def _check_whole(told: Stored, infos: Mapping[str, TensorInfo]) -> None:
    """Raise ``UnsupportedTensorError`` where stored tensors are not all of a tensor in memory, or some of it twice."""
    for name, pieces in match_by_origin(told):
        reached = 0
        for stored_name, start in pieces:
            if start != reached:
                break
            reached += told[stored_name][0].nbytes
        if reached != infos[name].nbytes:
            raise UnsupportedTensorError(f"transformers stores {name!r} in parts that are not all of it")
    missing = sorted(infos.keys() - {origin.name for _, origin in told.values()})
    if missing:
        raise UnsupportedTensorError(f"transformers does not store {missing[0]!r} of the model")


def match_by_origin(told: Stored) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """For each tensor in memory what it is stored as, in order: names, and where they start in bytes."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name, (_, origin) in told.items():
        found.setdefault(origin.name, []).append((origin.start, name))
    for name, pieces in found.items():
        yield name, [(stored_name, start) for start, stored_name in sorted(pieces)]
