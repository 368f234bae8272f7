"""A scheduler's state with its class, so that it goes into no other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast.errors import InvalidArgumentError
from holdfast.state.components import name_components


def scheduler_components(scheduler: object) -> dict[str, list[Any]]:
    """The schedulers passed, by slot; each a list of those that belong to parts of one model."""
    return name_components(
        "scheduler", scheduler, lambda given: not given or not all(map(_is_scheduler, given.values()))
    )


def scheduler_values(parts: Sequence[Any]) -> dict[str, Any] | list[dict[str, Any]]:
    """The class's name, and what ``state_dict`` gives; of parts that differ, a list of these.

    Raises ``InvalidArgumentError`` for what is no scheduler.
    """
    found = [_values(one) for one in parts]
    return found[0] if all(one == found[0] for one in found) else found


def _values(scheduler: Any) -> dict[str, Any]:
    if isinstance(scheduler, dict):
        return {"class": None, "state": scheduler}
    if not _is_scheduler(scheduler):
        raise InvalidArgumentError(
            "a scheduler has state_dict() and load_state_dict(), as torch's have; "
            f"{type(scheduler).__qualname__} lacks them"
        )
    return {"class": type(scheduler).__qualname__, "state": scheduler.state_dict()}


def compare_schedulers(parts: Sequence[Any], saved: Any) -> Iterator[str]:
    """Why saved :func:`scheduler_values` do not go into schedulers: another class, or a chain of another length."""
    theirs = _spread(saved, len(parts))
    if len(theirs) != len(parts):
        yield f"scheduler: {len(theirs)} of them in the checkpoint, {len(parts)} here"
        return
    for mine, one in zip(map(_values, parts), theirs, strict=True):
        if None not in {mine["class"], one["class"]} and one["class"] != mine["class"]:
            yield f"scheduler: the checkpoint holds the state of {one['class']}, this one is {mine['class']}"
        elif _links(mine["state"]) != _links(one["state"]):
            yield f"scheduler: a chain of {_links(one['state'])} in the checkpoint, of {_links(mine['state'])} here"
        elif None not in (sizes := [_groups(one["state"]), _groups(mine["state"])]) and sizes[0] != sizes[1]:
            yield (
                f"scheduler: of {sizes[0]} parameter groups in the checkpoint, of {sizes[1]} here, where its next step "
                "would fail: leave it out, and make it anew"
            )


def load_scheduler(parts: Sequence[Any], saved: Any) -> None:
    """Put saved :func:`scheduler_values` into schedulers."""
    for scheduler, one in zip(parts, _spread(saved, len(parts)), strict=True):
        if isinstance(scheduler, dict):
            scheduler.clear()
            scheduler.update(one["state"])
        else:
            scheduler.load_state_dict(_keyed_as(scheduler.state_dict(), one["state"]))


def _keyed_as(mine: Any, saved: Any) -> Any:
    """A saved state with numbers as keys where a scheduler's own has them: torch's DCP makes text of all keys."""
    if isinstance(mine, list) and isinstance(saved, list) and len(mine) == len(saved):
        return [_keyed_as(one, other) for one, other in zip(mine, saved, strict=True)]
    if not isinstance(mine, dict) or not isinstance(saved, dict):
        return saved
    numbered = bool(mine) and all(type(key) is int for key in mine)
    if numbered and all(isinstance(key, str) and key.isdecimal() for key in saved):
        return type(mine)({int(key): value for key, value in saved.items()})
    return type(saved)({key: _keyed_as(mine.get(key), value) for key, value in saved.items()})


def _spread(saved: Any, number: int) -> list[Any]:
    """What each of some schedulers gets: one that was saved is for all of them."""
    return saved if isinstance(saved, list) else [saved] * number


def _links(state: Any) -> int:
    """How many schedulers a chained one has; 1 for any other."""
    links = state.get("_schedulers", [state]) if isinstance(state, Mapping) else [state]
    return len(links)


def _groups(state: Any) -> int | None:
    """How many parameter groups a scheduler, or the first of a chain, sets the rates of, if it tells."""
    links = state.get("_schedulers", [state]) if isinstance(state, Mapping) else [state]
    rates = links[0].get("base_lrs") if links and isinstance(links[0], Mapping) else None
    return len(rates) if isinstance(rates, list) else None


def _is_scheduler(one: Any) -> bool:
    return hasattr(one, "state_dict") and hasattr(one, "load_state_dict")
