"""The layout in which transformers stores tensors that are fused in memory, such as those of experts.

Its own conversion, reversed as ``save_pretrained`` does, is run on tensors without data. The storage offset of each
result in the tensor that it is a view of is the start of the bytes that are stored under its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from rankless.errors import UnsupportedTensorError
from rankless.ondisk.data_files import TensorInfo
from rankless.state.model.hf_config import class_before_sharding, unwrap_model
from rankless.state.model.hf_optional_tensors import names_not_saved
from rankless.state.tensor_views import DTYPES


class TensorOrigin(NamedTuple):
    """The origin of a stored tensor: the tensor in memory called ``name``, from byte ``start`` on."""

    name: str
    start: int


#: Stored tensors and their origins, by name.
Stored = Mapping[str, tuple[TensorInfo, TensorOrigin]]


def stored_layout(model: object, infos: Mapping[str, TensorInfo]) -> Stored:
    """Return the tensors that transformers stores for a model, whose tensors are given by name, dtype and shape.

    For other models the tensors are stored unchanged; some models have tensors that are not stored. Raises
    ``UnsupportedTensorError`` if the conversion does more than divide tensors into ranges of bytes.
    """
    module: Any = unwrap_model(model) if isinstance(model, nn.Module) else None
    infos = {name: info for name, info in infos.items() if name not in names_not_saved(module)}
    unchanged = {name: (info, TensorOrigin(name, 0)) for name, info in infos.items()}
    if not hasattr(getattr(module, "config", None), "model_type"):
        return unchanged
    try:
        from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415 - optional dependency
    except ImportError:  # before version 5 tensors were stored unchanged
        return unchanged
    memory = {name: torch.empty(info.shape, dtype=DTYPES[info.dtype], device="meta") for name, info in infos.items()}
    with _ViewTracker():
        converted = revert_weight_conversion(_before_sharding(module), dict(memory))
    return _find_origins(converted, memory, infos)


def _before_sharding(module: nn.Module) -> Any:
    """Return a module with the classes that its parts had before ``fully_shard``: transformers converts by their names.

    The tree of modules is copied, without their tensors; the given one is left as it is.
    """
    if not any(isinstance(child, FSDPModule) for child in module.modules()):
        return module
    copies: dict[nn.Module, nn.Module] = {}

    def copy_tree(original: nn.Module) -> nn.Module:
        if original not in copies:
            cls = class_before_sharding(original)
            copies[original] = cls.__new__(cls)
            children = {
                name: child if child is None else copy_tree(child)
                for name, child in original._modules.items()  # noqa: SLF001 - with children that are None
            }
            copies[original].__dict__.update(original.__dict__, _modules=children)
        return copies[original]

    return copy_tree(module)


class _ViewTracker(TorchFunctionMode):
    """A mode in which ``contiguous()`` does not copy, so that a result remains a view of its origin."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


def _find_origins(
    converted: Mapping[str, torch.Tensor], memory: Mapping[str, torch.Tensor], infos: Mapping[str, TensorInfo]
) -> dict[str, tuple[TensorInfo, TensorOrigin]]:
    origins = {tensor.untyped_storage()._cdata: name for name, tensor in memory.items()}  # noqa: SLF001
    stored = {}
    for name, view in converted.items():
        origin = origins.get(view.untyped_storage()._cdata)  # noqa: SLF001
        if origin is None or not view.is_contiguous():
            raise UnsupportedTensorError(
                f"transformers stores the elements of {name!r} in another order than the model has in memory, which "
                "rankless does not convert: use the model's save_pretrained(), or a file with shard=False"
            )
        info = TensorInfo(infos[origin].dtype, tuple(view.shape))
        stored[name] = info, TensorOrigin(origin, int(view.storage_offset()) * view.element_size())
    _check_complete(stored, infos)
    return stored


def _check_complete(stored: Stored, infos: Mapping[str, TensorInfo]) -> None:
    """Raise ``UnsupportedTensorError`` if the stored tensors do not cover each tensor in memory exactly once."""
    for name, ranges in group_by_origin(stored):
        stop = 0
        for stored_name, start in ranges:
            if start != stop:
                break
            stop += stored[stored_name][0].nbytes
        if stop != infos[name].nbytes:
            raise UnsupportedTensorError(f"transformers stores {name!r} as tensors that do not cover it")
    missing = sorted(infos.keys() - {origin.name for _, origin in stored.values()})
    if missing:
        raise UnsupportedTensorError(f"transformers does not store {missing[0]!r} of the model")


def group_by_origin(stored: Stored) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Yield, for each tensor in memory, the tensors that it is stored as, in order: names and starts in bytes."""
    ranges_of: dict[str, list[tuple[int, str]]] = {}
    for name, (_, origin) in stored.items():
        ranges_of.setdefault(origin.name, []).append((origin.start, name))
    for name, ranges in ranges_of.items():
        yield name, [(stored_name, start) for start, stored_name in sorted(ranges)]
