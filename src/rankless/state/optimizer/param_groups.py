"""Parameter groups of several optimizers and ranks: merged for a checkpoint, and matched with a saved one.

:mod:`rankless.state.capture` merges on each rank, and on rank 0 for all ranks; a load matches on each rank. The order
of merged groups is in ``state.json``, and must not depend on the ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rankless.errors import OptimizerMismatchError, StateError
from rankless.ondisk import values
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.validation import split_state_key
from rankless.ondisk.value_files import ORDERED
from rankless.state.array_decoder import are_same_decoded
from rankless.state.optimizer.optimizer_view import ParamGroup, parameter_names

#: The encoded groups of one optimizer in a checkpoint, each with a class, parameters, settings and states.
EncodedGroups = list[dict[str, Any]]


def merge_groups(parts: Sequence[EncodedGroups]) -> EncodedGroups:
    """Return the groups of all parts, in an order that does not depend on the order of the parts.

    Groups with equal class, number and settings are merged. So stages of a pipeline that train with equal settings
    become one optimizer, on any number of ranks.
    """
    distinct = [part for i, part in enumerate(parts) if not any(values.are_same(part, other) for other in parts[:i])]
    groups_of: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for group in (group for part in distinct for group in part):
        identity = (group["class"] or "", group["number"], json.dumps(group["settings"]))
        groups_of.setdefault(identity, []).append(group)
    merged = [_merge_equal_groups(equal_groups) for _, equal_groups in sorted(groups_of.items())]
    _check_disjoint(merged)
    return merged


def _merge_equal_groups(equal_groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the merge of several groups. The order of its parameters is unknown, unless there is only one."""
    names = {name for group in equal_groups for name in group["params"]}
    states = [state for group in equal_groups for state in values.iterate_members(group["state"])]
    state_of: dict[str, Any] = {}
    for name, state in states:
        if not values.are_same(state_of.setdefault(str(name), state), state):
            raise StateError(f"ranks hold different optimizer state of {name!r} that is not a tensor")
    order = {} if len(equal_groups) == 1 else {"params": sorted(names), "ordered": False}
    return {**equal_groups[0], **order, "state": values.as_table(states)}


def _check_disjoint(merged: EncodedGroups) -> None:
    groups: dict[str, int] = {}
    for number, group in enumerate(merged):
        for name in group["params"]:
            if groups.setdefault(name, number) != number:
                raise StateError(
                    f"ranks, or parts of the optimizer, train {name!r} with different settings, or in different groups"
                )


class MatchTolerance(msgspec.Struct, frozen=True):
    """The tolerated differences between an optimizer and the saved one.

    ``is_partial``: parameters may have no saved state, saved ones need not be trained, and groups may differ.
    ``by_name``: parameters are matched by name; if by position, it is unknown which of them have no state. ``tied``:
    further names of parameters in the checkpoint, with the names under which their states are. ``unread``: see
    :func:`are_same_decoded`. ``has_model``: the parameters have names here, and none in the checkpoint.
    """

    is_partial: bool = False
    by_name: bool = True
    tied: Mapping[str, str] = msgspec.field(default_factory=dict)
    unread: frozenset[int] = frozenset()
    has_model: bool = False

    def has_settings_of(self, saved: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        """Return whether two saved groups are of one class, and are known to have the same settings."""
        return saved["class"] == other["class"] and are_same_decoded(saved["settings"], other["settings"], self.unread)

    def explain_missing(self, names: Sequence[str]) -> str:
        """Return a clause about a parameter without a state that was tied to another one."""
        name = next((name for name in names if name in self.tied), None)
        return f" ({name!r} was one tensor with {self.tied[name]!r} when it was saved: tie them)" if name else ""

    def suggest_remedy(self) -> str:
        """Return advice for parameters that are only in the checkpoint, or only in the optimizer."""
        if self.by_name:
            return "pass strict=False to load the state of the others"
        if self.has_model:
            return (
                "the checkpoint has its parameters by position only: create the optimizer as when it was saved, of a "
                "model with the same parameters, such as one without tied weights"
            )
        return (
            "its parameters are matched by position only: pass the model, or create the optimizer as when it was saved"
        )


class GroupMatching(msgspec.Struct, frozen=True):
    """A matching of groups: ``settings`` are their saved groups, or ``None`` for a group that keeps its own settings.

    ``missing`` are parameters that have no state in the checkpoint. ``regrouped`` are the numbers of groups that keep
    their own settings because the checkpoint groups their parameters differently. ``is_unsure``: a group without
    parameters keeps its own because the checkpoint has several of its number, with other settings.
    """

    settings: list[dict[str, Any] | None]
    missing: list[str]
    regrouped: list[int]
    is_unsure: bool = False


def match_groups(groups: Sequence[ParamGroup], saved: EncodedGroups, tolerance: MatchTolerance) -> GroupMatching:
    """Match the groups of an optimizer with the saved ones.

    Raises ``OptimizerMismatchError`` if the optimizer's class differs and, unless tolerated, if it trains parameters
    that the checkpoint does not have, or groups them differently.
    """
    group_of = {name: group for group in saved for name in group["params"]}
    for group in groups:
        _check_class(group, saved)
    missing = sorted({*parameter_names(groups)} - group_of.keys() - _find_empty(groups))
    if missing and not tolerance.is_partial:
        raise OptimizerMismatchError(
            f"the optimizer trains {_format_few(missing)}, and the checkpoint has no optimizer state of them"
            f"{tolerance.explain_missing(missing)}; " + tolerance.suggest_remedy()
        )
    saved_groups = [_find_saved_groups(group, group_of, saved, tolerance) for group in groups]
    problems = _find_split_groups(groups, group_of, tolerance)
    problems |= {i: problem for i, problem in _find_merged_groups(groups, saved_groups).items() if i not in problems}
    if problems and not tolerance.is_partial:
        raise OptimizerMismatchError(
            f"{next(iter(problems.values()))}; group parameters as when it was saved, or "
            "pass strict=False: groups that were divided in another way keep their settings here, and a scheduler of "
            "them must be left out and made anew"
        )
    settings = [
        candidates[0] if candidates and i not in problems else None for i, candidates in enumerate(saved_groups)
    ]
    is_unsure = None in settings and _has_unsure(groups, settings, saved)
    return GroupMatching(settings, missing, [groups[i].number for i in sorted(problems)], is_unsure)


def _has_unsure(groups: Sequence[ParamGroup], settings: Sequence[dict[str, Any] | None], saved: EncodedGroups) -> bool:
    """Return whether a group without parameters has no saved group, although the checkpoint has several like it."""
    unset = (group for group, saved_group in zip(groups, settings, strict=True) if saved_group is None)
    return any(not group.param_names() and bool(_find_alike(group, saved)) for group in unset)


def check_trained(saved: EncodedGroups, trained: set[str], tolerance: MatchTolerance) -> list[str]:
    """Return the saved parameters that no rank trains. Raises ``OptimizerMismatchError`` for them unless tolerated."""
    untrained = sorted({name for group in saved for name in group["params"]} - trained)
    if untrained and not tolerance.is_partial:
        raise OptimizerMismatchError(
            f"the checkpoint holds optimizer state of {_format_few(untrained)}, which this optimizer does not train; "
            + tolerance.suggest_remedy()
        )
    return untrained


def pair_merged_states(
    saved: EncodedGroups, infos: Mapping[str, TensorInfo], kept: str, dropped: str, tolerance: MatchTolerance
) -> list[tuple[str, str]] | None:
    """Return which state tensors of two parameters must be equal, if both parameters are one tensor here.

    ``dropped`` is a saved one. ``None``: their settings, or values of their states that are no tensors, may differ
    already, or one of them has no state, or was not trained.
    """
    group_of = {name: group for group in saved for name in group["params"]}
    if kept not in group_of or not tolerance.has_settings_of(group_of[kept], group_of[dropped]):
        return None
    plain, other_plain = [group_of[name]["state"].get(name) for name in (kept, dropped)]
    tensors_of: dict[str, dict[str, str]] = {kept: {}, dropped: {}}
    for name in infos:
        parameter, state = split_state_key(name)
        if parameter in tensors_of:
            tensors_of[parameter][state] = name
    if (
        not are_same_decoded(plain, other_plain, tolerance.unread)
        or tensors_of[kept].keys() != tensors_of[dropped].keys()
    ):
        return None
    return [(name, tensors_of[dropped][state]) for state, name in sorted(tensors_of[kept].items())]


def _check_class(group: ParamGroup, saved: EncodedGroups) -> None:
    class_name, saved_classes = group.adapter.class_name, [saved_group["class"] for saved_group in saved]
    if saved and class_name is not None and None not in saved_classes and class_name not in saved_classes:
        raise _class_error(saved_classes[0], class_name)


def _class_error(saved: str | None, present: str | None) -> OptimizerMismatchError:
    return OptimizerMismatchError(
        f"the checkpoint holds the state of {saved}, the optimizer is {present}: create {saved}, or leave out the "
        "optimizer to load the rest"
    )


def _find_saved_groups(
    group: ParamGroup, group_of: Mapping[str, dict[str, Any]], saved: EncodedGroups, tolerance: MatchTolerance
) -> list[dict[str, Any]]:
    """Return the saved groups that have parameters of a group; for an empty group, the one that is alike."""
    names = group.param_names()
    if not names:
        alike = _find_alike(group, saved)
        return alike[:1] if all(tolerance.has_settings_of(alike[0], other) for other in alike[1:]) else []
    saved_groups = list({id(group_of[name]): group_of[name] for name in names if name in group_of}.values())
    class_name = group.adapter.class_name
    for saved_group in saved_groups:
        if None not in {class_name, saved_group["class"]} and class_name != saved_group["class"]:
            raise _class_error(saved_group["class"], class_name)
    return saved_groups


def _find_alike(group: ParamGroup, saved: EncodedGroups) -> EncodedGroups:
    """Return the saved groups of the class and number of a group without parameters; those without, if there are any.

    A stage of a pipeline may have no bias, and so no parameter in its second group.
    """
    class_name = group.adapter.class_name
    alike = [
        other
        for other in saved
        if other["number"] == group.number and (None in {class_name, other["class"]} or class_name == other["class"])
    ]
    return [other for other in alike if not other["params"]] or alike


def _find_split_groups(
    groups: Sequence[ParamGroup], group_of: Mapping[str, dict[str, Any]], tolerance: MatchTolerance
) -> dict[int, str]:
    """Return a message for each group, by index, if the checkpoint has its parameters in groups of other settings.

    Groups with equal settings are one here if a stage of a pipeline that saved had no parameter in an earlier group.
    """
    problems = {}
    for i, group in enumerate(groups):
        first, *others = [name for name in group.param_names() if name in group_of] or [""]
        other = next(
            (
                name
                for name in others
                if group_of[name] is not group_of[first]
                and not tolerance.has_settings_of(group_of[name], group_of[first])
            ),
            None,
        )
        if other is not None:
            problems[i] = (
                f"parameter group {group.number} holds {first!r} and {other!r}, which are in different groups in the "
                "checkpoint"
            )
    return problems


def _find_merged_groups(
    groups: Sequence[ParamGroup], saved_groups: Sequence[Sequence[dict[str, Any]]]
) -> dict[int, str]:
    """Return a message for each group, by index, that is merged with another one in the checkpoint.

    A saved group without a known order was several groups of equal settings, of several optimizers or pipeline stages.
    """
    problems: dict[int, str] = {}
    first_of: dict[tuple[int, int], int] = {}
    for i, (group, candidates) in enumerate(zip(groups, saved_groups, strict=True)):
        for saved in candidates if group.members else ():
            if saved["number"] is not None and saved.get(ORDERED):
                first = first_of.setdefault((id(group.adapter), id(saved)), i)
                if first != i:
                    problems[first] = problems[i] = (
                        f"parameter groups {groups[first].number} and {group.number} of the optimizer hold parameters "
                        "that are in one group in the checkpoint"
                    )
    return problems


def _find_empty(groups: Sequence[ParamGroup]) -> set[str]:
    """Return the parameters without elements. Their states have no values: DeepSpeed saves none of them."""
    members = (member for group in groups for member in group.members)
    return {ref.name for member in members for ref in member.refs if 0 in ref.tensor.shape}


def _format_few(names: Sequence[str]) -> str:
    """Return a few of some names, for a message: for example ``'a', 'b'``, or five names ``and 3 more``."""
    shown = ", ".join(repr(name) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")  # noqa: PLR2004
