"""The state dict of a checkpoint's model, in the order of the module and with its metadata, as torch creates it.

:mod:`rankless.lightning.checkpoint_dict` calls it on each rank. The order is the same as in ``Module.state_dict``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from rankless.state.model.model_view import EXTRA
from rankless.state.model.wrapper_modules import NameCleaner


def order_state(entries: Mapping[str, Any], module: nn.Module | None) -> OrderedDict[str, Any]:
    """Return entries as ``module.state_dict()`` orders them; those that it does not have are at the end.

    Without a module their order is kept, and there is no metadata.
    """
    if module is None:
        return OrderedDict(entries)
    ordered = OrderedDict((name, entries[name]) for name in _list_names(module) if name in entries)
    ordered.update((name, value) for name, value in entries.items() if name not in ordered)
    clean = NameCleaner(module)
    metadata = OrderedDict(
        (clean(prefix), {"version": child._version})  # noqa: SLF001
        for prefix, child in module.named_modules(remove_duplicate=False)
    )
    ordered._metadata = metadata  # type: ignore[attr-defined]  # noqa: SLF001 - where torch has it
    return ordered


def _list_names(module: nn.Module) -> Iterator[str]:
    """Yield the names of a module's state dict in its order, without creating it: FSDP1 would gather all tensors."""
    clean = NameCleaner(module)
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name in (*child._parameters, *child._buffers, EXTRA):  # noqa: SLF001
            yield clean(f"{prefix}.{name}" if prefix else name)
