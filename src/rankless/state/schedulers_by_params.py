"""Schedulers of several stages: each is stored with the parameters that it schedules, and found again by them.

:mod:`rankless.state.capture` merges entries on rank 0 in the vote "exchanging tensor specs", and
:mod:`rankless.state.restore` finds them on each rank. The order of merged entries is stored, and must not depend on the
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rankless.observe.warning import warn_caller
from rankless.ondisk.values import are_same, to_json
from rankless.state.array_decoder import are_same_decoded

#: Keys of the states of torch's schedulers with lists of one item for each parameter group.
BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs", "base_momentums", "max_momentums")

#: Keys of the same states with lists of something else.
_NOT_BY_GROUP = ("_milestones", "_schedule_phases")

#: The key of the states of the schedulers in a chain.
_LINKS = "_schedulers"

#: A saved entry, and the number of one of its groups.
_Place = tuple[Mapping[str, Any], int]

#: The mark of a state that differed between ranks which schedule the same parameters.
_DIFFERED = "differed"


def scheduled_params(scheduler: Any, names: Mapping[int, Sequence[str]]) -> list[list[str]] | None:
    """Return the names of the parameters in each group that a scheduler schedules; ``None`` if they are unknown.

    ``names`` has the names of models' parameters, by ``id``. Without a model, an optimizer that was created from
    ``named_parameters()`` knows them.
    """
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
    named = [_name_group(group, names) for group in groups or ()]
    return [group for group in named if group is not None] if named and None not in named else None


def _name_group(group: Mapping[str, Any], names: Mapping[int, Sequence[str]]) -> list[str] | None:
    if all(id(parameter) in names for parameter in group["params"]):
        return sorted(name for parameter in group["params"] for name in names[id(parameter)])
    own = group.get("param_names", ())
    return sorted(own) if not names and len(own) == len(group["params"]) else None


def merge_entries(ranks: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the encoded entries of all ranks, each once, in an order that does not depend on the ranks.

    If all ranks have the same, their order is kept: a caller without a model may load them by position. Entries of the
    same parameters, or without parameters, are distinguished by their order on their rank. If ranks hold different
    states of one, or only some ranks have one without parameters, the state of the lowest rank is stored, and marked.
    """
    if all(are_same(entries, ranks[0]) for entries in ranks):
        return ranks[0]
    merged: dict[tuple[bytes, int], dict[str, Any]] = {}
    keys = [[to_json(entry["params"]) if entry["params"] else b"" for entry in entries] for entries in ranks]
    for names, entries in zip(keys, ranks, strict=True):
        for key, entry in zip(zip(names, _count_earlier(names), strict=True), entries, strict=True):
            first = merged.setdefault(key, entry)
            is_everywhere = key[0] or all(other.count(b"") > key[1] for other in keys)
            if not is_everywhere or not are_same({**first, _DIFFERED: True}, {**entry, _DIFFERED: True}):
                merged[key] = {**first, _DIFFERED: True}
    if any(entry.get(_DIFFERED) for entry in merged.values()):
        warn_caller(
            "ranks hold different states of a scheduler, or other numbers of schedulers of unknown parameters: that of "
            "the lowest rank is saved, and a load calls the scheduler reconstructed"
        )
    return [merged[key] for key in sorted(merged)]


def _count_earlier(items: Sequence[Any]) -> list[int]:
    """Return for each item how many before it are equal: an optimizer may have several schedulers."""
    return [items[:index].count(item) for index, item in enumerate(items)]


def find_entries(saved: Any, params: Sequence[list[list[str]] | None]) -> tuple[Any, bool]:
    """Return the saved entry of each of several schedulers, given the ``params`` of each one's groups.

    It is ``None`` for a scheduler if the checkpoint has no state of it, or several that differ. If parameters are known
    only here, or only in the checkpoint, all entries are returned as they are stored: they are matched by position.
    Also return whether an entry may not be the state that the scheduler had: ranks had different states of it, or
    something was matched by position that may be in another order here.
    """
    entries = saved if isinstance(saved, list) else [saved]
    named = [entry for entry in entries if _has_params(entry)]
    unnamed = [entry for entry in entries if not _has_params(entry)]
    known = [groups for groups in params if groups is not None]
    if not params:  # this stage has no scheduler
        return [], False
    if bool(named) != bool(known):
        is_ordered = any(not are_same_decoded(entry["state"], entries[0]["state"]) for entry in entries)
        has_ordered_groups = any(_has_ordered_groups(entry["state"]) for entry in entries)
        return saved, is_ordered or has_ordered_groups or any(map(_has_differed, entries))
    if len(entries) == len(params) == 1 and not any(_find_places(entries, names) for names in params[0] or ()):
        # All parameters have other names here, and their groups may be in another order.
        return entries, _has_differed(entries[0]) or _has_ordered_groups(entries[0]["state"])
    if not all(map(_has_differed, unnamed[params.count(None) :])):
        return saved, True  # more schedulers than here: the caller refuses that
    found = [
        _find_entry([entry for entry, other in _with_turns(named) if other == turn], groups)
        if groups is not None
        else next(iter(unnamed[turn:]), None)
        for groups, turn in zip(params, _count_earlier(params), strict=True)
    ]
    return found, any(_has_differed(entry) for entry in found if entry is not None)


def _has_ordered_groups(state: Any) -> bool:
    """Return whether the groups of a scheduler have different states, so that their order matters."""
    if not isinstance(state, Mapping):
        return False
    lists = [items for key, items in state.items() if key in BY_GROUP and isinstance(items, list)]
    count = max(map(len, lists), default=1)
    return (
        any(not are_same_decoded(item, items[0]) for items in lists for item in items)
        or any(_has_ordered_groups(link) for link in state.get(_LINKS, ()))
        or (count > 1 and _may_list_groups(state, count))
    )


def _has_params(entry: Any) -> bool:
    return isinstance(entry, Mapping) and bool(entry.get("params"))


def _has_differed(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry has the mark of a state that differed between ranks."""
    return bool(entry.get(_DIFFERED))


def _with_turns(named: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], int]]:
    """Return each saved entry with the number of entries of the same parameters before it."""
    return list(zip(named, _count_earlier([entry["params"] for entry in named]), strict=True))


def _find_entry(saved: Sequence[Mapping[str, Any]], groups: Sequence[list[str]]) -> Mapping[str, Any] | None:
    """Return the saved entry with these groups, or one that is made of parts of several."""
    if (entry := next((entry for entry in saved if entry["params"] == groups), None)) is not None:
        return entry
    found = [_find_places(saved, names) for names in groups]
    first = next((places[0][0] for places in found if places), None)
    if first is None:
        return None
    # A group without parameters, or with new ones, may be the one with its number.
    taken = [number for places in found for entry, number in places if entry is first]
    guessed = [number for number, places in enumerate(found) if not places]
    if any(groups[number] and number in taken for number in guessed):
        return None
    found = [places or [(first, number)] for number, places in enumerate(found)]
    marks = {_DIFFERED: True} if any(groups[number] or number in taken for number in guessed) else {}
    entry = _join_entries(found) if all(map(_are_alike, found)) else None
    return None if entry is None else {**entry, **marks}


def _join_entries(found: Sequence[Sequence[_Place]]) -> Mapping[str, Any] | None:
    """Return the entry with the groups at the first of each of these places; ``None`` if it is not certain."""
    chosen, entries = [places[0] for places in found], [entry for places in found for entry, _ in places]
    first = chosen[0][0]
    marks = {_DIFFERED: True} if any(entry.get(_DIFFERED) for entry in entries) else {}
    if len(chosen) == len(first["params"]) and chosen == [(first, number) for number in range(len(chosen))]:
        return {**first, **marks}
    if any(_may_list_groups(entry["state"], len(entry["params"])) for entry in entries):
        return None
    if any(entry["class"] != first["class"] for entry in entries):
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
    if count > 1 and {str(key) for key in state} == {*map(str, range(count))}:
        return True
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
