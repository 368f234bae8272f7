"""The order in which optimizers list their parameters.

What all ranks share has it by name, as a stage of a pipeline knows its own parameters only. Where all ranks have one
list, its order is kept with what belongs to ranks: formats that number parameters need it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import CorruptCheckpointError

#: Whether a group lists its parameters in the order of the optimizer; else by name.
ORDERED = "ordered"

#: Whether an optimizer's parameters have no names, as in ``Optimizer.state_dict()``: they are numbered over all groups.
BY_NUMBER = "by_number"

#: For each group, the place of each parameter of the optimizer's list in the list by name; ``None`` where not known.
Order = list[list[int] | None]


def sort_by_name(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups as all ranks share them."""
    plain = ({key: value for key, value in group.items() if key != ORDERED} for group in groups)
    return [{**group, "params": sorted(group["params"])} for group in plain]


def order_names(groups: Sequence[Mapping[str, Any]]) -> Order:
    """What :func:`sort_by_name` loses."""
    return [_places(group["params"]) if group.get(ORDERED) else None for group in groups]


def _places(params: Sequence[str]) -> list[int]:
    place = {name: number for number, name in enumerate(sorted(params))}
    return [place[name] for name in params]


def restore_order(groups: Sequence[Mapping[str, Any]], order: object) -> list[dict[str, Any]]:
    """Groups in the order of their optimizer again, where it is known. Raises ``CorruptCheckpointError``."""
    known = order if isinstance(order, list) else [None] * len(groups)
    if len(known) != len(groups):
        raise CorruptCheckpointError("there are other groups of parameters than orders of them")
    return [_ordered(group, places) for group, places in zip(groups, known, strict=True)]


def _ordered(group: Mapping[str, Any], places: Any) -> dict[str, Any]:
    params = group["params"]
    if places is None:
        return {**group, ORDERED: False}
    whole = isinstance(places, list) and all(type(place) is int for place in places)
    if not whole or sorted(places) != list(range(len(params))):
        raise CorruptCheckpointError("the order of an optimizer's parameters is none")
    return {**group, "params": [params[place] for place in places], ORDERED: True}
