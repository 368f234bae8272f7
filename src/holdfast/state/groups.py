"""Parameter groups of several optimizers and ranks, put together for a checkpoint and found again in one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import OptimizerMismatchError, StateError
from holdfast.layout import values
from holdfast.state.optimizer import Group, names

#: What a checkpoint says of one optimizer: its groups, encoded, each with a class, parameters, settings and states.
Encoded = list[dict[str, Any]]


def merge(parts: Sequence[Encoded]) -> Encoded:
    """The groups of all parts, in an order that does not depend on which part brought what.

    Groups of one class, number and settings are one; so stages of a pipeline that train alike are one
    optimizer, on however many ranks.
    """
    distinct = [part for i, part in enumerate(parts) if part not in parts[:i]]
    found: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for group in (group for part in distinct for group in part):
        identity = (group["class"] or "", group["number"], json.dumps(group["settings"]))
        found.setdefault(identity, []).append(group)
    merged = [_as_one(same) for _, same in sorted(found.items())]
    _check_disjoint(merged)
    return merged


def _as_one(same: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One group of several; nobody knows the order of its parameters then, unless it is of one part only."""
    names = {name for group in same for name in group["params"]}
    states = [state for group in same for state in values.members(group["state"])]
    known: dict[str, Any] = {}
    for name, state in states:
        if known.setdefault(str(name), state) != state:
            raise StateError(f"ranks hold different optimizer state of {name!r} that is no tensor")
    order = {} if len(same) == 1 else {"params": sorted(names), "ordered": False}
    return {**same[0], **order, "state": values.table(states)}


def _check_disjoint(merged: Encoded) -> None:
    groups: dict[str, int] = {}
    for number, group in enumerate(merged):
        for name in group["params"]:
            if groups.setdefault(name, number) != number:
                raise StateError(
                    f"ranks, or parts of the optimizer, train {name!r} with different settings, or in different groups"
                )


def match(found: Sequence[Group], saved: Encoded) -> list[dict[str, Any] | None]:
    """The saved group that each group takes its settings from; ``None`` for a group without parameters.

    Raises ``OptimizerMismatchError`` where the optimizer is of another class or groups its parameters otherwise.
    """
    home = {name: group for group in saved for name in group["params"]}
    for group in found:
        _check_class(group, saved)
    missing = sorted({*names(found)} - home.keys())
    if missing:
        raise OptimizerMismatchError(
            f"the optimizer trains {_listed(missing)}, of which the checkpoint has no optimizer state"
        )
    matched = [_match(group, home, saved) for group in found]
    _check_apart(found, matched)
    return matched


def check_trained(saved: Encoded, trained: set[str]) -> None:
    """Raise ``OptimizerMismatchError`` for saved parameters that no rank trains."""
    extra = sorted({name for group in saved for name in group["params"]} - trained)
    if extra:
        raise OptimizerMismatchError(
            f"the checkpoint holds optimizer state of {_listed(extra)}, which this optimizer does not train"
        )


def _check_class(group: Group, saved: Encoded) -> None:
    own, theirs = group.source.kind, [one["class"] for one in saved]
    if saved and own is not None and None not in theirs and own not in theirs:
        raise OptimizerMismatchError(f"the checkpoint holds the state of {theirs[0]}, the optimizer is {own}")


def _match(group: Group, home: Mapping[str, dict[str, Any]], saved: Encoded) -> dict[str, Any] | None:
    own_names = group.names()
    if not own_names:
        same = [one for one in saved if one["number"] == group.number]
        return same[0] if len(same) == 1 else None
    first = home[own_names[0]]
    other = next((name for name in own_names if home[name] is not first), None)
    if other is not None:
        raise OptimizerMismatchError(
            f"parameter group {group.number} holds {own_names[0]!r} and {other!r}, which are in different groups in "
            "the checkpoint; group parameters as when it was saved"
        )
    own = group.source.kind
    if None not in {own, first["class"]} and own != first["class"]:
        raise OptimizerMismatchError(f"the checkpoint holds the state of {first['class']}, the optimizer is {own}")
    return first


def _check_apart(found: Sequence[Group], matched: Sequence[dict[str, Any] | None]) -> None:
    """Two groups of one optimizer cannot be one in the checkpoint: their settings would become the same."""
    known: dict[tuple[int, int], int] = {}
    for group, saved in zip(found, matched, strict=True):
        if saved is not None and group.members and saved["number"] is not None:
            number = known.setdefault((id(group.source), id(saved)), group.number)
            if number != group.number:
                raise OptimizerMismatchError(
                    f"parameter groups {number} and {group.number} of the optimizer are one in the checkpoint; "
                    "group parameters as when it was saved"
                )


def _listed(found: Sequence[str]) -> str:
    """A few of some names, for a message."""
    shown = ", ".join(repr(name) for name in found[:5])
    return shown + (f" and {len(found) - 5} more" if len(found) > 5 else "")  # noqa: PLR2004
