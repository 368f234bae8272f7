"""The order in which optimizers list their parameters.

The state that all ranks share lists parameters by name, because a pipeline stage knows only its own parameters. If all
ranks have the same list, its order is saved with the per-rank state: formats that number parameters need it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rankless.errors import CorruptCheckpointError

#: Key of a flag: the group lists its parameters in the order of the optimizer, not by name.
ORDERED = "ordered"

#: Key of a flag: parameters have no names but numbers over all groups, as in ``Optimizer.state_dict()``.
BY_NUMBER = "by_number"

#: For each group, the index in the sorted list of each parameter of the optimizer's list; ``None`` if unknown.
Order = list[list[int] | None]


def sort_by_name(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups as all ranks share them, with parameters sorted by name."""
    unflagged = ({key: value for key, value in group.items() if key != ORDERED} for group in groups)
    return [{**group, "params": sorted(group["params"])} for group in unflagged]


def order_names(groups: Sequence[Mapping[str, Any]]) -> Order:
    """Return the order that :func:`sort_by_name` drops."""
    return [_sorted_positions(group["params"]) if group.get(ORDERED) else None for group in groups]


def _sorted_positions(params: Sequence[str]) -> list[int]:
    position = {name: number for number, name in enumerate(sorted(params))}
    return [position[name] for name in params]


def restore_order(groups: Sequence[Mapping[str, Any]], order: object) -> list[dict[str, Any]]:
    """Return the groups in the order of their optimizer, if it is known.

    Raises ``CorruptCheckpointError`` if ``order`` is not one of these groups.
    """
    orders = order if isinstance(order, list) else [None] * len(groups)
    if len(orders) != len(groups):
        raise CorruptCheckpointError(
            f"the optimizer has {len(groups)} parameter groups, but {len(orders)} parameter orders are stored"
        )
    return [_restore_group_order(group, positions) for group, positions in zip(groups, orders, strict=True)]


def _restore_group_order(group: Mapping[str, Any], positions: Any) -> dict[str, Any]:
    params = group["params"]
    if positions is None:
        return {**group, ORDERED: False}
    is_int_list = isinstance(positions, list) and all(type(position) is int for position in positions)
    if not is_int_list or sorted(positions) != list(range(len(params))):
        raise CorruptCheckpointError("the stored order of an optimizer's parameters is not a permutation of them")
    return {**group, "params": [params[position] for position in positions], ORDERED: True}
