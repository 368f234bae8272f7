"""transformers' own conversion of a model's tensors: it fuses, divides and reorders them in files, such as experts.

The conversion, reversed as ``save_pretrained`` does, is run on tensors without data, and their elements are tracked.

It runs on each rank for itself, without communication; all ranks must get the same layout of the same model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion

from rankless.engine.plan.split_tensors import SplitLayout, Splits, split_tiles
from rankless.errors import UnsupportedTensorError
from rankless.ondisk.data_files import TensorInfo
from rankless.state.model.element_origins import OriginTracker, make_splits, whole_tensor
from rankless.state.model.hf_config import class_before_sharding
from rankless.state.tensor_views import DTYPES


def convert_infos(
    module: nn.Module, infos: Mapping[str, TensorInfo]
) -> tuple[dict[str, TensorInfo], dict[str, Splits]]:
    """Return the tensors that are stored for a model, and where the elements of each of its tensors are stored.

    Called by :func:`rankless.state.model.fused_layout.stored_layout`. Raises ``UnsupportedTensorError`` if the
    conversion does more than move elements, in few enough ranges.
    """
    memory = {name: torch.empty(info.shape, dtype=DTYPES[info.dtype], device="meta") for name, info in infos.items()}
    tracker = OriginTracker()
    for name, tensor in memory.items():
        tracker.record(tensor, [whole_tensor(name, tensor)])
    with tracker, _WithoutContiguous():
        converted = revert_weight_conversion(_without_irreversible(_before_sharding(module)), dict(memory))
    return _find_layout(converted, tracker, infos)


class _WithoutContiguous(TorchFunctionMode):
    """A mode where ``contiguous()`` does not copy, so that parts of a result remain views of its origin."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


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


def _without_irreversible(module: Any) -> Any:
    """Return a module without the conversions that cannot be reversed: a quantizer has built its tensors at the load.

    Such tensors are stored in the form of their library. The given module is left as it is.
    """
    conversions = getattr(module, "_weight_conversions", None) or []
    reversible = [conversion for conversion in conversions if _is_reversible(conversion)]
    if len(reversible) == len(conversions):
        return module
    cls = type(module)
    twin = object.__new__(cls)
    twin.__dict__.update(module.__dict__, _weight_conversions=reversible)
    return twin


def _is_reversible(conversion: Any) -> bool:
    try:
        conversion.reverse_transform()
    except NotImplementedError:
        return False
    return True


def _find_layout(
    converted: Mapping[str, torch.Tensor], tracker: OriginTracker, infos: Mapping[str, TensorInfo]
) -> tuple[dict[str, TensorInfo], dict[str, Splits]]:
    tensors: dict[str, TensorInfo] = {}
    splits: dict[str, list[SplitLayout]] = {}
    for name, tensor in converted.items():
        shape, origins = tuple(tensor.shape), tracker.find_origins(tensor)
        # A file may also have a tensor of the same name in the order of the memory.
        if origins is None or (name in infos and [*origins] != [whole_tensor(name, tensor)]):
            raise _reordered(name)
        tensors[name] = TensorInfo(infos[origins[0].name].dtype, shape)
        for origin, split in make_splits(name, shape, origins):
            splits.setdefault(origin, []).append(split)
    _check_complete(splits, infos)
    return tensors, {name: tuple(of_tensor) for name, of_tensor in splits.items()}


def _reordered(name: str) -> UnsupportedTensorError:
    return UnsupportedTensorError(
        f"transformers stores the elements of {name!r} in another order than the model has in memory, which rankless "
        "does not convert: use the model's save_pretrained(), or a file with shard=False"
    )


def _check_complete(splits: Mapping[str, list[SplitLayout]], infos: Mapping[str, TensorInfo]) -> None:
    """Raise ``UnsupportedTensorError`` if the stored tensors do not cover each tensor in memory exactly once."""
    if missing := sorted(infos.keys() - splits.keys()):
        raise UnsupportedTensorError(f"transformers does not store {missing[0]!r} of the model")
    for name, of_tensor in splits.items():
        if not split_tiles(math.prod(infos[name].shape), tuple(of_tensor)):
            raise UnsupportedTensorError(
                f"transformers stores {name!r} as tensors that do not cover it once, or in too many ranges: use the "
                "model's save_pretrained(), or a file with shard=False"
            )
