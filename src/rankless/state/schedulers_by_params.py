"""Schedulers of several stages: each is stored with the parameters that it schedules, and found again by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rankless.observe.warning import warn_caller
from rankless.ondisk.values import are_same, to_json

#: Keys of the states of torch's schedulers whose values are lists with an item for each parameter group.
BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs", "base_momentums", "max_momentums")

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
            key = to_json(entry["params"] or position)
            first = merged.setdefault(key, entry)
            if not are_same({**first, _DIFFERED: True}, {**entry, _DIFFERED: True}):
                merged[key] = {**first, _DIFFERED: True}
    if any(entry.get(_DIFFERED) for entry in merged.values()):
        warn_caller(
            "ranks hold different states of a scheduler: that of the lowest rank is saved, and a load calls the "
            "scheduler reconstructed"
        )
    return [merged[key] for key in sorted(merged)]


def has_differed(saved: Any) -> bool:
    """Return whether a stored scheduler had other states on other ranks."""
    return any(entry.get(_DIFFERED) for entry in (saved if isinstance(saved, list) else [saved]))


def find_entries(saved: Any, params: Sequence[list[list[str]] | None]) -> Any:
    """Return the saved entry of each of several schedulers, given the ``params`` of each one's groups.

    If one cannot be found by its parameters, all are returned as they are stored: they are matched by position.
    """
    if not isinstance(saved, list):
        return saved
    entries = [None if groups is None else _find_entry(saved, groups) for groups in params]
    return saved if None in entries else entries


def _find_entry(saved: Sequence[Mapping[str, Any]], groups: Sequence[list[str]]) -> Mapping[str, Any] | None:
    places = [_find_group(saved, names) for names in groups]
    found = [place for place in places if place is not None]
    if not found or len(found) != len(places):
        return None
    entry = found[0][0]
    if all(other is entry for other, _ in found) and [index for _, index in found] == [*range(len(entry["params"]))]:
        return entry
    state = _join_states([(other["state"], index) for other, index in found])
    same_class = len({other["class"] for other, _ in found}) == 1
    return {"class": entry["class"], "state": state} if same_class and state is not None else None


def _find_group(saved: Sequence[Mapping[str, Any]], names: Sequence[str]) -> tuple[Mapping[str, Any], int] | None:
    """Return the saved entry, and the number of its group, that has parameters of these names."""
    for entry in saved:
        for index, group in enumerate(entry.get("params") or ()):
            if not set(names).isdisjoint(group):
                return entry, index
    return None


def _join_states(places: Sequence[tuple[Mapping[str, Any], int]]) -> dict[str, Any] | None:
    """Return one state with groups of several states, by number; ``None`` if anything else in the states differs."""
    first, joined = places[0][0], {}
    for key, value in first.items():
        values = [state.get(key) for state, _ in places]
        if key in BY_GROUP and all(isinstance(items, list) for items in values):
            joined[key] = [state[key][index] for state, index in places]
        elif key == "_schedulers":
            links = zip(*([(link, index) for link in state[key]] for state, index in places), strict=False)
            joined[key] = [_join_states(link_places) for link_places in links]
        elif all(other == value for other in values):
            joined[key] = value
        else:
            return None
    return None if any(link is None for link in joined.get("_schedulers", ())) else joined
