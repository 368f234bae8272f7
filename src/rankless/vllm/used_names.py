"""The names of the tensors that the models of a worker of vLLM were loaded from.

:mod:`rankless.vllm.model_loader` notes them, in the thread that loads. Reloads and followed versions must have all of
them: a parameter would keep its old values if its tensor is missing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from weakref import WeakKeyDictionary

from torch import nn

#: The names of the tensors that the models of this process took something of when they were loaded.
_used_names: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


def note_used_names(model: nn.Module, names: Iterable[str]) -> None:
    """Note the tensors that a model was loaded from."""
    _used_names[model] = frozenset(names)


def find_missing_names(model: nn.Module, names: Collection[str]) -> list[str]:
    """Return the tensors that a model was loaded from and that are not among ``names``; none if that is not known."""
    return sorted(_used_names.get(model, frozenset()) - {*names})
