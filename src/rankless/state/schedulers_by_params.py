"""Schedulers of several stages: each is stored with the parameters that it schedules, and found again by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rankless.observe.warning import warn_caller
from rankless.ondisk.values import are_same, to_json
from rankless.state.array_decoder import are_same_decoded

#: Keys of the states of torch's schedulers whose values are lists with an item for each parameter group.
BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs", "base_momentums", "max_momentums")

#: Keys of theirs whose values are lists of something else.
_NOT_BY_GROUP = ("_milestones", "_schedule_phases")

#: The key of the states of the schedulers in a chain.
_LINKS = "_schedulers"

#: A saved entry, and the number of one of its groups.
_Place = tuple[Mapping[str, Any], int]

#: The mark of a state that differed between ranks which schedule the same parameters.
_DIFFERED = "differed"


def scheduled_params(scheduler: Any, names: Mapping[int, Sequence[str]]) -> list[list[str]] | None:
    """Return the names of the parameters in each group that a scheduler schedules; ``None`` if they are unknown.

    ``names`` are those of the parameters of models, by ``id``.
    """
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
    if not groups or not all(id(parameter) in names for group in groups for parameter in group["params"]):
        return None
    return [sorted(name for parameter in group["params"] for name in names[id(parameter)]) for group in groups]


def merge_entries(ranks: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the encoded entries of all ranks, each once, in an order that does not depend on the ranks.

    Entries without parameters are distinguished by their position. If ranks hold different states of one, that of the
    lowest rank is stored, and marked.
    """
    if all(are_same(entries, ranks[0]) for entries in ranks):
        return ranks[0]
    merged: dict[bytes, dict[str, Any]] = {}
    for entries in ranks:
        for position, entry in enumerate(entries):
            key = to_json(entry["params"]) if entry["params"] else b"%06d" % position
            first = merged.setdefault(key, entry)
            if not are_same({**first, _DIFFERED: True}, {**entry, _DIFFERED: True}):
                merged[key] = {**first, _DIFFERED: True}
    if any(entry.get(_DIFFERED) for entry in merged.values()):
        warn_caller(
            "ranks hold different states of a scheduler: that of the lowest rank is saved, and a load calls the "
            "scheduler reconstructed"
        )
    return [merged[key] for key in sorted(merged)]


def is_uncertain(entries: Any, params: Sequence[list[list[str]] | None]) -> bool:
    """Return whether what :func:`find_entries` returned may not be the state that the schedulers here had.

    Ranks had different states of one, or stages had different schedulers, whose parameters are not known here: the
    checkpoint has them in an order of its own.
    """
    stored = entries if isinstance(entries, list) else [entries]
    is_by_position = len(stored) > 1 and None in params
    return any(entry.get(_DIFFERED) or (is_by_position and entry.get("params")) for entry in stored)


def find_entries(saved: Any, params: Sequence[list[list[str]] | None]) -> Any:
    """Return the saved entry of each of several schedulers, given the ``params`` of each one's groups.

    It is ``None`` for a scheduler of which the checkpoint has no state, or several that differ. If parameters are not
    known, here or in the checkpoint, all entries are returned as they are stored: they are matched by position.
    """
    entries = saved if isinstance(saved, list) else [saved]
    if None in params or not all(isinstance(entry, Mapping) and entry.get("params") for entry in entries):
        return saved
    if len(entries) == len(params) == 1 and not any(_find_places(entries, names) for names in params[0] or ()):
        return entries  # all parameters have other names here
    return [_find_entry(entries, groups or []) for groups in params]


def _find_entry(saved: Sequence[Mapping[str, Any]], groups: Sequence[list[str]]) -> Mapping[str, Any] | None:
    """Return the saved entry with these groups, or one that is made of parts of several."""
    if (entry := next((entry for entry in saved if entry["params"] == groups), None)) is not None:
        return entry
    found = [_find_places(saved, names) for names in groups]
    first = next((places[0][0] for places in found if places), None)
    if first is None:
        return None
    # A group without parameters, or with new ones, is the one with its number.
    found = [places or [(first, number)] for number, places in enumerate(found)]
    return _join_entries(found) if all(map(_are_alike, found)) else None


def _join_entries(found: Sequence[Sequence[_Place]]) -> Mapping[str, Any] | None:
    """Return the entry with the groups at the first of each of these places; ``None`` if it is not certain."""
    chosen, entries = [places[0] for places in found], [entry for places in found for entry, _ in places]
    first = chosen[0][0]
    marks = {_DIFFERED: True} if any(entry.get(_DIFFERED) for entry in entries) else {}
    if len(chosen) == len(first["params"]) and chosen == [(first, number) for number in range(len(chosen))]:
        return {**first, **marks}
    if any(_may_list_groups(entry["state"], len(entry["params"])) for entry in entries):
        return None
    state = _join_states([(entry["state"], number) for entry, number in chosen])
    return None if state is None else {"class": first["class"], "state": state, **marks}


def _find_places(saved: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[_Place]:
    """Return the saved entries, each with the number of its group, that have parameters of these names."""
    return [
        (entry, number)
        for entry in saved
        for number, group in enumerate(entry["params"])
        if not set(names).isdisjoint(group)
    ]


def _are_alike(places: Sequence[_Place]) -> bool:
    """Return whether the states of several groups, which are one group here, are known and the same."""
    if any(number >= len(entry["params"]) for entry, number in places):
        return False
    first, *others = [
        {"class": entry["class"], "state": _join_states([(entry["state"], number)])} for entry, number in places
    ]
    return all(are_same_decoded(other, first) for other in others)


def _may_list_groups(state: Any, count: int) -> bool:
    """Return whether a state has a list of unknown meaning that may have an item for each of ``count`` groups."""
    if not isinstance(state, Mapping):
        return len(state) == count if isinstance(state, list | tuple) else getattr(state, "shape", ())[:1] == (count,)
    unknown = (value for key, value in state.items() if key not in {*BY_GROUP, *_NOT_BY_GROUP, _LINKS})
    return any(_may_list_groups(value, count) for value in (*unknown, *state.get(_LINKS, ())))


def _join_states(places: Sequence[tuple[Mapping[str, Any], int]]) -> dict[str, Any] | None:
    """Return one state with groups of several states, by number; ``None`` if anything else in the states differs."""
    first, joined = places[0][0], {}
    for key, value in first.items():
        values = [state.get(key) for state, _ in places]
        if key in BY_GROUP and all(_has_item(state.get(key), index) for state, index in places):
            joined[key] = [state[key][index] for state, index in places]
        elif key == _LINKS:
            links = zip(*([(link, index) for link in state[key]] for state, index in places), strict=False)
            joined[key] = [_join_states(link_places) for link_places in links]
        elif all(are_same_decoded(other, value) for other in values):
            joined[key] = value
        else:
            return None
    return None if any(link is None for link in joined.get(_LINKS, ())) else joined


def _has_item(items: Any, index: int) -> bool:
    return isinstance(items, list) and index < len(items)
