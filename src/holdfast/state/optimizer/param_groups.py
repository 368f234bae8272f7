"""Parameter groups of several optimizers and ranks, put together for a checkpoint and found again in one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import OptimizerMismatchError, StateError
from holdfast.ondisk import values
from holdfast.state.optimizer.view import ParamGroup, parameter_names

#: What a checkpoint says of one optimizer: its groups, encoded, each with a class, parameters, settings and states.
Encoded = list[dict[str, Any]]


def merge_groups(parts: Sequence[Encoded]) -> Encoded:
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
    states = [state for group in same for state in values.iterate_members(group["state"])]
    known: dict[str, Any] = {}
    for name, state in states:
        if known.setdefault(str(name), state) != state:
            raise StateError(f"ranks hold different optimizer state of {name!r} that is no tensor")
    order = {} if len(same) == 1 else {"params": sorted(names), "ordered": False}
    return {**same[0], **order, "state": values.as_table(states)}


def _check_disjoint(merged: Encoded) -> None:
    groups: dict[str, int] = {}
    for number, group in enumerate(merged):
        for name in group["params"]:
            if groups.setdefault(name, number) != number:
                raise StateError(
                    f"ranks, or parts of the optimizer, train {name!r} with different settings, or in different groups"
                )


@dataclass(frozen=True)
class MatchLeeway:
    """How far an optimizer may differ from the saved one.

    ``is_partial``: parameters may have no saved state, saved ones need not be trained, and groups may be other ones.
    ``by_name``: parameters are known by name; by their places nobody can tell which of them have no state.
    """

    is_partial: bool = False
    by_name: bool = True

    def advice(self) -> str:
        """What to do about parameters that are on one side only."""
        if self.by_name:
            return "pass strict=False to load the state of the others"
        return "its parameters are known by their places only: pass the model, or make it as when it was saved"


@dataclass(frozen=True)
class GroupMatching:
    """``settings`` are, for each group, the saved group that it takes its settings from; ``None``: it keeps its own.

    ``missing`` are parameters that the checkpoint has no state of. ``regrouped`` are the numbers of groups that keep
    their own settings because the checkpoint groups their parameters otherwise.
    """

    settings: list[dict[str, Any] | None]
    missing: list[str]
    regrouped: list[int]


def match_groups(groups: Sequence[ParamGroup], saved: Encoded, leeway: MatchLeeway) -> GroupMatching:
    """Match the groups of an optimizer with the saved ones.

    Raises ``OptimizerMismatchError`` if the optimizer is of another class and, without leeway, if it trains parameters
    that the checkpoint does not have, or groups them otherwise.
    """
    home = {name: group for group in saved for name in group["params"]}
    for group in groups:
        _check_class(group, saved)
    missing = sorted({*parameter_names(groups)} - home.keys())
    if missing and not leeway.is_partial:
        raise OptimizerMismatchError(
            f"the optimizer trains {_listed(missing)}, of which the checkpoint has no optimizer state; "
            + leeway.advice()
        )
    homes = [_homes(group, home, saved) for group in groups]
    problems = _torn(groups, home)
    problems |= {i: problem for i, problem in _joined(groups, homes).items() if i not in problems}
    if problems and not leeway.is_partial:
        raise OptimizerMismatchError(f"{next(iter(problems.values()))}; group parameters as when it was saved")
    settings = [theirs[0] if theirs and i not in problems else None for i, theirs in enumerate(homes)]
    return GroupMatching(settings, missing, [groups[i].number for i in sorted(problems)])


def check_trained(saved: Encoded, trained: set[str], leeway: MatchLeeway) -> list[str]:
    """The saved parameters that no rank trains. Raises ``OptimizerMismatchError`` for them without leeway."""
    extra = sorted({name for group in saved for name in group["params"]} - trained)
    if extra and not leeway.is_partial:
        raise OptimizerMismatchError(
            f"the checkpoint holds optimizer state of {_listed(extra)}, which this optimizer does not train; "
            + leeway.advice()
        )
    return extra


def _check_class(group: ParamGroup, saved: Encoded) -> None:
    own, theirs = group.source.kind, [one["class"] for one in saved]
    if saved and own is not None and None not in theirs and own not in theirs:
        raise OptimizerMismatchError(f"the checkpoint holds the state of {theirs[0]}, the optimizer is {own}")


def _homes(group: ParamGroup, home: Mapping[str, dict[str, Any]], saved: Encoded) -> list[dict[str, Any]]:
    """The saved groups that have parameters of a group; for a group without parameters, that of its number."""
    own_names = group.names()
    if not own_names:
        same = [one for one in saved if one["number"] == group.number]
        return same if len(same) == 1 else []
    homes = list({id(home[name]): home[name] for name in own_names if name in home}.values())
    own = group.source.kind
    for theirs in homes:
        if None not in {own, theirs["class"]} and own != theirs["class"]:
            raise OptimizerMismatchError(f"the checkpoint holds the state of {theirs['class']}, the optimizer is {own}")
    return homes


def _torn(groups: Sequence[ParamGroup], home: Mapping[str, dict[str, Any]]) -> dict[int, str]:
    """The groups, by place, whose parameters are in several groups in the checkpoint."""
    problems = {}
    for i, group in enumerate(groups):
        first, *others = [name for name in group.names() if name in home] or [""]
        other = next((name for name in others if home[name] is not home[first]), None)
        if other is not None:
            problems[i] = (
                f"parameter group {group.number} holds {first!r} and {other!r}, which are in different groups in the "
                "checkpoint"
            )
    return problems


def _joined(groups: Sequence[ParamGroup], homes: Sequence[Sequence[dict[str, Any]]]) -> dict[int, str]:
    """The groups, by place, that are one with another in the checkpoint: their settings would become the same."""
    problems: dict[int, str] = {}
    known: dict[tuple[int, int], int] = {}
    for i, (group, theirs) in enumerate(zip(groups, homes, strict=True)):
        for saved in theirs if group.members else ():
            if saved["number"] is not None:
                first = known.setdefault((id(group.source), id(saved)), i)
                if first != i:
                    problems[first] = problems[i] = (
                        f"parameter groups {groups[first].number} and {group.number} of the optimizer are one in the "
                        "checkpoint"
                    )
    return problems


def _listed(found: Sequence[str]) -> str:
    """A few of some names, for a message."""
    shown = ", ".join(repr(name) for name in found[:5])
    return shown + (f" and {len(found) - 5} more" if len(found) > 5 else "")  # noqa: PLR2004
