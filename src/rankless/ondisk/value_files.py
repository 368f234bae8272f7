"""The files of values, and the order of parameters in optimizers.

The file that all ranks share lists parameters by name, because a pipeline stage knows only its own parameters. If all
ranks have the same list, its order is saved with the per-rank state: formats that number parameters need it.

Rank 0 builds both files in the commit of a save; live copies and conversions build them, too. Readers restore the order
(:mod:`rankless.formats.native`). The keys, and the order of sorted entries, are parts of the format.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rankless.errors import CorruptCheckpointError
from rankless.ondisk import values

#: The prefix of the slots of optimizers.
_OPTIMIZER = "optimizer"

#: The prefix of the slots of schedulers.
_SCHEDULER = "scheduler"

#: The member of the description of a tensor of a wrapper subclass that has the name of the class.
SUBCLASS = "tensor_subclass"

#: The member of this description with torchao's own, as JSON: see :mod:`rankless.ondisk.torchao_form`.
TORCHAO = "torchao"

#: The key of the values that an optimizer keeps besides the states of parameters and the settings of groups.
OWN_STATE = "own"

#: Key of a flag of this: more of it is among the states and settings, as in ``Optimizer.state_dict()``.
IN_STATE_DICT = "in_state_dict"

#: The key of the order of dimensions in memory of a state tensor, under the tensor's name.
DIMENSION_ORDER = "dimension_order"

#: Key of a flag: the group lists its parameters in the order of the optimizer, not by name.
ORDERED = "ordered"

#: Key of a flag: parameters have no names but numbers over all groups, as in ``Optimizer.state_dict()``.
BY_NUMBER = "by_number"

#: Key of a flag that is not in files: only the parameters that were trained may have a number.
MAY_SKIP_FROZEN = "may_skip_frozen"

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


def build_state_file(merged: Mapping[str, Any], shared: Mapping[str, bytes]) -> bytes:
    """Return the file of values that all ranks share; ``shared`` is JSON.

    Raises ``UnsupportedValueError`` if the file is too large.

    A save calls it on rank 0; each rank also checks the size of its own values with it in the first vote.
    """
    parts = {slot: values.to_json(_as_stored(slot, value)) for slot, value in merged.items()}
    members = (values.to_json(name) + b":" + part for name, part in {**parts, **shared}.items())
    return values.check_size(b"{" + b",".join(members) + b"}", values.SHARED_FILE)


def _as_stored(slot: str, value: Any) -> Any:
    if slot.startswith(_SCHEDULER):
        return _join_stages(value)
    return {**value, "groups": sort_by_name(value["groups"])} if slot.startswith(_OPTIMIZER) else value


def _join_stages(entries: Any) -> Any:
    """Return the encoded entries of all stages as a checkpoint stores them: a single one if their states are equal.

    It has the parameters of each group if there are several groups: a load may have them in another order.
    """
    if not isinstance(entries, list) or not entries:
        return entries
    contents = [_without_params(entry) for entry in entries]
    if not all(content == contents[0] for content in contents):
        return entries
    groups = _join_groups([entry.get("params") for entry in entries if isinstance(entry, dict)])
    return {**contents[0], "params": groups} if len(groups) > 1 else contents[0]


def _join_groups(params: Sequence[Any]) -> list[list[str]]:
    """Return the parameters in each group of all stages; nothing if they are unknown, or stages have other groups."""
    if not all(params) or len(set(map(len, params))) != 1:
        return []
    return [sorted(set(itertools.chain(*groups))) for groups in zip(*params, strict=True)]


def _without_params(entry: Any) -> Any:
    return {key: value for key, value in entry.items() if key != "params"} if isinstance(entry, dict) else entry


def build_ranks_file(rank_values: Sequence[bytes], merged: Mapping[str, Any]) -> bytes:
    """Return the file of values that belong to single ranks, and of the order of optimizers' parameters if known.

    A save calls it on rank 0 with the values of all ranks, in their order.
    """
    orders = {slot: order_names(value["groups"]) for slot, value in merged.items() if slot.startswith(_OPTIMIZER)}
    order_json = b',"order":' + values.to_json(orders) if orders else b""
    return values.check_size(b'{"ranks":[' + b",\n".join(rank_values) + b"]" + order_json + b"}\n", values.RANKS_FILE)
