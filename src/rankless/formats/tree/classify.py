"""Recognizing the states of models and optimizers by their structure. Each dict is examined once.

:mod:`rankless.formats.tree.detect_components` and the reader of Accelerate have one for each tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankless.formats.stored_tensor import is_tensor
from rankless.formats.tree.optimizer_states import GROUPS, STATE, is_flattened
from rankless.formats.tree.tree_traversal import is_extra
from rankless.ondisk.read_budget import ReadBudget

#: Units of work for an entry of a model's state dict.
_ENTRY = 4


class TreeClassifier:
    """A classifier of the dicts and lists of one tree. Its results are cached; its work is charged to ``budget``."""

    def __init__(self, budget: ReadBudget) -> None:
        self._budget = budget
        self._tensor_counts: dict[int, int] = {}
        self._states: dict[int, bool] = {}
        self._optimizers: dict[int, bool] = {}

    def count_tensors(self, node: Any) -> int:
        """Return the number of tensors in a dict and its nested dicts, read as the state dict of a model."""
        if not isinstance(node, dict):
            return 0
        if id(node) not in self._tensor_counts:
            self._budget.spend(_ENTRY * len(node))
            self._tensor_counts[id(node)] = sum(
                self.count_tensors(value) if _is_inner(key, value) else is_tensor(value) for key, value in node.items()
            )
        return self._tensor_counts[id(node)]

    def is_state(self, node: Mapping[Any, Any]) -> bool:
        """Return whether a dict has only named tensors and extra state, as the state dict of a model has."""
        if id(node) not in self._states:
            self._budget.spend(_ENTRY * len(node))
            self._states[id(node)] = all(
                self.is_state(value)
                if _is_inner(key, value)
                else isinstance(key, str) and (is_tensor(value) or is_extra(key) or value == {})
                for key, value in node.items()
            )
        return self._states[id(node)]

    def is_optimizer(self, node: Any) -> bool:
        """Return whether a tree is the state of an optimizer."""
        if not isinstance(node, dict) or not node:
            return False
        if id(node) not in self._optimizers:
            self._optimizers[id(node)] = self._is_optimizer(node)
        return self._optimizers[id(node)]

    def are_optimizers(self, node: Any) -> bool:
        """Return whether a tree is a list of states of optimizers."""
        if not isinstance(node, list) or not node:
            return False
        if id(node) not in self._optimizers:
            self._budget.spend(len(node))
            self._optimizers[id(node)] = all(map(self.is_optimizer, node))
        return self._optimizers[id(node)]

    def _is_optimizer(self, node: Mapping[Any, Any]) -> bool:
        groups = node.get(GROUPS)
        if isinstance(groups, list):
            self._budget.spend(len(groups))
            return all(isinstance(group, dict) for group in groups) and isinstance(node.get(STATE, {}), dict)
        self._budget.spend(len(node))
        return is_flattened(node)


def _is_inner(key: object, value: object) -> bool:
    """Return whether a value is a nested dict of a state dict."""
    return isinstance(value, dict) and bool(value) and not is_extra(key)
