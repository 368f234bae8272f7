"""Schedulers: their state is stored with their class, so that it is not loaded into another class.

A save calls it on each rank in its first vote (:mod:`rankless.state.capture`), a load while it matches and when it puts
values in place (:mod:`rankless.state.restore`). The form of :func:`scheduler_entries` is in ``state.json``, and the
form of :func:`scheduler_values` in the file of one scheduler (:mod:`rankless.components.scheduler_file`): old files
must stay readable.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import torch

from rankless.errors import InvalidArgumentError
from rankless.observe.warning import warn_caller
from rankless.state.components import name_components
from rankless.state.schedulers_by_params import BY_GROUP, scheduled_params
from rankless.state.user_objects import loading_code, read_state

#: The keys of the states of the schedulers in a chain, and of the functions or objects that compute rates.
_LINKS, _RULES = "_schedulers", "lr_lambdas"

#: The public keys that all schedulers of torch have, or had in an earlier version.
_OF_ALL = frozenset({"base_lrs", "last_epoch", "verbose"})


def scheduler_components(scheduler: object) -> dict[str, list[Any]]:
    """Return the schedulers passed, by slot. Each is a list of those that belong to the parts of one model."""
    return name_components(
        "scheduler", scheduler, lambda given: not given or not all(map(_is_scheduler, given.values()))
    )


def scheduler_entries(parts: Sequence[Any], names: Mapping[int, Sequence[str]]) -> list[dict[str, Any]]:
    """Return the class's name, the ``state_dict`` and the scheduled parameters of each part.

    ``names`` has the names of parameters, by ``id``. Raises ``InvalidArgumentError`` if an object is not a scheduler.
    """
    return [{**_scheduler_entry(part), "params": scheduled_params(part, names)} for part in parts]


def scheduler_values(parts: Sequence[Any]) -> dict[str, Any] | list[dict[str, Any]]:
    """Return the class's name and the ``state_dict``; a list of these if the parts differ.

    Raises ``InvalidArgumentError`` if an object is not a scheduler.
    """
    entries = [_scheduler_entry(part) for part in parts]
    return entries[0] if all(entry == entries[0] for entry in entries) else entries


def _scheduler_entry(scheduler: Any) -> dict[str, Any]:
    if isinstance(scheduler, dict):
        return {"class": None, "state": scheduler}
    if not _is_scheduler(scheduler):
        raise InvalidArgumentError(
            "a scheduler must have state_dict() and load_state_dict(), as torch's have; "
            f"{type(scheduler).__qualname__} lacks them"
        )
    return {"class": type(scheduler).__qualname__, "state": read_state(scheduler)}


def compare_schedulers(parts: Sequence[Any], saved: Any) -> Iterator[str]:
    """Yield a message for each scheduler that saved :func:`scheduler_values` cannot be loaded into.

    The reason is another class, also of a link in a chain, a chain of another length, or another number of parameter
    groups.
    """
    saved_entries = entry_per_scheduler(saved, len(parts))
    if len(saved_entries) != len(parts):
        yield f"scheduler: {len(saved_entries)} of them in the checkpoint, {len(parts)} here"
        return
    for live, stored in zip(map(_scheduler_entry, parts), saved_entries, strict=True):
        if None not in {live["class"], stored["class"]} and stored["class"] != live["class"]:
            yield f"scheduler: the checkpoint holds the state of {stored['class']}, this one is {live['class']}"
        elif (lengths := [_chain_length(entry["state"]) for entry in (stored, live)])[0] != lengths[1]:
            yield f"scheduler: a chain of {lengths[0]} in the checkpoint, of {lengths[1]} here"
        elif (
            None not in (sizes := [_count_groups(entry["state"]) for entry in (stored, live)]) and sizes[0] != sizes[1]
        ):
            yield (
                f"scheduler: of {sizes[0]} parameter groups in the checkpoint, of {sizes[1]} here, where its next step "
                "would fail: leave it out, and make a new one"
            )
    for differences in _list_key_differences(parts, saved_entries):
        if differences.are_of_other_class:
            yield (
                f"scheduler: the checkpoint has {_join(differences.unknown)}, which {differences.class_name} does not "
                f"keep{f'; it keeps {_join(differences.lacking)}' if differences.lacking else ''}: its class differs "
                "from the saved one"
            )


def have_other_keys(parts: Sequence[Any], saved: Any) -> bool:
    """Return whether a scheduler keeps other values than the saved one: its class or its version may be another one."""
    return any(True for _ in _list_key_differences(parts, entry_per_scheduler(saved, len(parts))))


class _KeyDifferences(msgspec.Struct, frozen=True):
    """The public keys that only the saved state of a scheduler has, ``unknown``, or only its live one, ``lacking``.

    ``is_named``: the class was saved, and is the same by name.
    """

    scheduler: Any
    unknown: set[str]
    lacking: set[str]
    is_named: bool

    @property
    def class_name(self) -> str:
        """The name of the class here."""
        return type(self.scheduler).__qualname__

    @property
    def are_of_other_class(self) -> bool:
        """True if the saved class is certainly another one: a class of torch keeps the same keys in all versions."""
        is_of_torch = type(self.scheduler).__module__.startswith("torch.optim.")
        return bool(self.unknown) and (bool(self.lacking) or (is_of_torch and not self.is_named))


def _list_key_differences(parts: Sequence[Any], saved_entries: Sequence[Any]) -> Iterator[_KeyDifferences]:
    for scheduler, stored in zip(parts, saved_entries, strict=False):
        if not isinstance(scheduler, dict):
            yield from _compare_keys(scheduler, read_state(scheduler), stored["state"], is_named=bool(stored["class"]))


def _compare_keys(scheduler: Any, live: Any, saved: Any, *, is_named: bool) -> Iterator[_KeyDifferences]:
    """Yield the differences of a scheduler and of the links in its chain."""
    if not isinstance(live, Mapping) or not isinstance(saved, Mapping):
        return
    saved_keys, live_keys = _public_keys(saved), _public_keys(live)
    if saved_keys != live_keys:
        yield _KeyDifferences(scheduler, saved_keys - live_keys, live_keys - saved_keys, is_named)
    links = (getattr(scheduler, _LINKS, ()), live.get(_LINKS, ()), saved.get(_LINKS, ()))
    for link, live_state, saved_state in zip(*links, strict=False):
        yield from _compare_keys(link, live_state, saved_state, is_named=False)


def _public_keys(state: Mapping[Any, Any]) -> set[str]:
    """Return the names of a scheduler's values, with the numbers of the callable objects that have a state."""
    keys = {str(key) for key in state if not str(key).startswith("_")} - _OF_ALL
    rules = state.get(_RULES, ())
    return keys | {
        f"{_RULES}[{number}]" for number, rule in enumerate(rules if isinstance(rules, list) else ()) if rule
    }


def _join(names: Collection[str]) -> str:
    return ", ".join(sorted(names))


def load_scheduler(parts: Sequence[Any], saved: Any, loaded_groups: Collection[int] = ()) -> None:
    """Load saved :func:`scheduler_values` into schedulers.

    The parameter groups that were not loaded with them get the learning rates of the schedule: torch's schedulers
    compute each rate from the one before. ``loaded_groups`` are the ``id`` of the groups that were.
    """
    for scheduler, entry in zip(parts, entry_per_scheduler(saved, len(parts)), strict=True):
        if isinstance(scheduler, dict):
            scheduler.clear()
            scheduler.update(entry["state"])
        else:
            with loading_code(scheduler, "scheduler"):
                scheduler.load_state_dict(_restore_integer_keys(scheduler.state_dict(), entry["state"]))
            _set_rates(scheduler, loaded_groups)


def _set_rates(scheduler: Any, loaded_groups: Collection[int]) -> None:
    """Give the optimizer of a scheduler its last learning rates, except in ``loaded_groups``.

    Warn if a scheduler of an optimizer does not say what its rates are.
    """
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
    if not groups or all(id(group) in loaded_groups for group in groups):
        return
    _set_momentum(scheduler)
    rates = getattr(scheduler, "_last_lr", None)
    if not isinstance(rates, list) or len(rates) != len(groups):
        warn_caller(
            f"the scheduler {type(scheduler).__qualname__} was loaded without its optimizer, and does not say which "
            "learning rates it has set: load the optimizer with it, or set the rates of its param_groups"
        )
        return
    for group, rate in zip(groups, rates, strict=True):
        if id(group) not in loaded_groups and isinstance(group.get("lr"), torch.Tensor):
            group["lr"].copy_(torch.as_tensor(rate))
        elif id(group) not in loaded_groups:
            group["lr"] = rate


def _set_momentum(scheduler: Any) -> None:
    """Let a scheduler that cycles the momentum set it: torch's keep no list of it, and set it where they compute rates.

    Of a sequence, only the link that is active does.
    """
    links = list(getattr(scheduler, _LINKS, ()))
    if links and hasattr(scheduler, "_milestones"):
        active = bisect_right(scheduler._milestones, scheduler.last_epoch)  # noqa: SLF001
        links = links[active : active + 1]
    for link in links:
        _set_momentum(link)
    schedulers = torch.optim.lr_scheduler
    if not isinstance(scheduler, (schedulers.OneCycleLR, schedulers.CyclicLR)) or not scheduler.cycle_momentum:
        return
    if getattr(scheduler, "_scale_fn_custom", None) is not None:  # a further call may change what it counts
        warn_caller(
            f"the scheduler {type(scheduler).__qualname__} was loaded without its optimizer, whose momentum it sets at "
            "its next step: load the optimizer with it"
        )
    else:
        with schedulers._enable_get_lr_call(scheduler), suppress(ValueError):  # noqa: SLF001 - else it warns
            scheduler.get_lr()


def _restore_integer_keys(live: Any, saved: Any) -> Any:
    """Return a saved state with integer keys where the scheduler's own state has them. DCP stores all keys as text.

    For example, the ``milestones`` ``{"30": 1}`` of a ``MultiStepLR`` become ``{30: 1}``.
    """
    if isinstance(live, list) and isinstance(saved, list) and len(live) == len(saved):
        return [_restore_integer_keys(live_item, saved_item) for live_item, saved_item in zip(live, saved, strict=True)]
    if not isinstance(live, dict) or not isinstance(saved, dict):
        return saved
    numbered = bool(live) and all(type(key) is int for key in live)
    if numbered and all(isinstance(key, str) and key.isdecimal() for key in saved):
        return type(live)({int(key): value for key, value in saved.items()})
    return type(saved)({key: _restore_integer_keys(live.get(key), value) for key, value in saved.items()})


def entry_per_scheduler(saved: Any, number: int) -> list[Any]:
    """Return the entry of each scheduler. A single saved entry is for all of them."""
    return saved if isinstance(saved, list) else [saved] * number


def _chain_length(state: Any) -> int:
    """Return the number of schedulers in a chained one, or 1 for any other scheduler."""
    links = state.get("_schedulers", [state]) if isinstance(state, Mapping) else [state]
    return len(links)


def _count_groups(state: Any) -> int | None:
    """Return the number of parameter groups of a scheduler, or of the first one of a chain; ``None`` if unknown."""
    links = state.get("_schedulers", [state]) if isinstance(state, Mapping) else [state]
    first = links[0] if links and isinstance(links[0], Mapping) else {}
    lists = (first[key] for key in BY_GROUP if isinstance(first.get(key), list))
    return next(map(len, lists), None)


def _is_scheduler(candidate: Any) -> bool:
    return hasattr(candidate, "state_dict") and hasattr(candidate, "load_state_dict")
