"""Effects of a model's ``state_dict`` hooks on its tensors, found by running the hooks on tensors without data.

A hook may rename a tensor, or split it. Then each result consists of elements of one of the model's tensors in some
order, and their bytes are stored without a copy. Results that a hook computes or joins cannot be traced like this.

:mod:`rankless.state.model.model_traversal` asks it on each rank when a model is viewed. The names that hooks give are
in files.

Ranks keep one name and one layout for a tensor that is split, so nothing is gathered. A hook that computes is an error,
whose remedy is ``state_dict_hooks=False``.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import msgspec
import torch
from torch import nn

from rankless.engine.plan.split_tensors import SplitLayout
from rankless.state.model.model_view import is_extra


class HookedStateDict(msgspec.Struct, frozen=True):
    """The result of ``state_dict``: tensors of the model and other values by name.

    ``splits`` describe how hooks split tensors, by the model's name of the tensor. ``computed`` are the names of
    tensors that are neither of the model nor made of its elements.
    """

    values: dict[str, Any]
    splits: dict[str, tuple[SplitLayout, ...]] = msgspec.field(default_factory=dict)
    computed: list[str] = msgspec.field(default_factory=list)


def has_hooks(module: nn.Module) -> bool:
    """Return whether any submodule of a model has a hook on ``state_dict``."""
    return any(submodule._state_dict_hooks for submodule in module.modules())  # noqa: SLF001


def has_own_state_dict(module: nn.Module) -> bool:
    """Return whether any submodule of a model has a hook on ``state_dict``, or a ``state_dict`` of its own.

    If not, and without hooks that run before ``state_dict``, it returns the results of :func:`state_dict_names` and
    ``get_extra_state``.
    """
    return any(
        submodule._state_dict_hooks  # noqa: SLF001
        or getattr(submodule.state_dict, "__func__", None) is not nn.Module.state_dict
        or getattr(submodule._save_to_state_dict, "__func__", None) is not nn.Module._save_to_state_dict  # noqa: SLF001
        for submodule in module.modules()
    )


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
    if has_hooks(module):
        from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415 - few models have hooks

        from rankless.state.model.stand_ins import StandIns  # noqa: PLC0415 - as above

        for submodule in module.modules():
            if isinstance(submodule, FSDPModule):
                submodule.reshard()  # as state_dict does, but before the tensors get their stand-ins
        stand_ins = StandIns(state_dict_names(module))
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
