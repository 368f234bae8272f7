"""States of a parameter as a state dict has them, made from their stored form in a checkpoint.

Writers of other formats call it in conversions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankless.state.optimizer.object_states import join_states
from rankless.state.optimizer.state_strides import is_order


def without_orders(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a parameter's states that are no tensors, without the orders of dimensions of tensors.

    Called by writers of formats that store each state by itself: under a tensor's name, its order would replace it.
    """
    return {name: value for name, value in plain.items() if not is_order(value)}


def whole_states(tensors: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return all states of a parameter: tensors that were stored by themselves are in their collections again."""
    return join_states({**tensors, **without_orders(plain)})
