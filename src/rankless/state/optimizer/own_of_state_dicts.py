"""Further values of an optimizer that is passed as a state dict, besides the states of parameters and their groups.

:mod:`rankless.state.optimizer.optimizer_view` and ``optimizer_restore`` call it on each rank for optimizers that were
passed as state dicts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rankless.ondisk.value_files import IN_STATE_DICT
from rankless.state.optimizer.own_state import (
    GROUPS,
    STATE,
    add_digests,
    add_values,
    find_entry,
    find_related,
    resolve_references,
)
from rankless.state.optimizer.storable_states import check_tree


def further_values(state_dict: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the further keys of a state dict, as ``values``, and its states of no parameter, as ``entries``."""
    values = {key: value for key, value in state_dict.items() if key not in {STATE, GROUPS}}
    numbers = {number for group in state_dict[GROUPS] for number in group["params"]}
    entries = {key: value for key, value in state_dict[STATE].items() if key not in numbers}
    return {name: value for name, value in (("values", values), ("entries", entries)) if value}


def entry_of_state_dict(state_dict: Mapping[Any, Any], names: Sequence[str]) -> dict[str, Any] | None:
    """Return the stored entry of a state dict, as :func:`~rankless.state.optimizer.own_state.own_entry` does."""
    further = further_values(state_dict)
    check_tree(further, "the state dict of an optimizer")
    # In a live optimizer, its own values may be among the settings and states, which are stored as such.
    return add_digests({"params": list(names), **further, IN_STATE_DICT: True}) if further else None


class StateDictOwnRestore:
    """The saved values that a state dict of an optimizer gets, with parameters of these ``names``."""

    is_unclassed = False
    class_name = "an optimizer that is passed as a state dict"

    def __init__(self, state_dict: dict[Any, Any], names: Sequence[str], saved: Sequence[Mapping[str, Any]]) -> None:
        self._state_dict = state_dict
        self._entry = find_entry(saved, names, len(state_dict[GROUPS]))
        self._related = find_related(saved, names)

    def list_saved(self) -> list[tuple[int, Any]]:
        """Return the ``id`` of the state dict with the values that it gets, if it gets some."""
        return [] if self._entry is None else [(id(self._state_dict), self._entry.get("values"))]

    @property
    def has_differed(self) -> bool:
        """True if ranks had different values, or if something was left out."""
        return any(entry.get("differed") for entry in (*self._related, self._entry or {}))

    def lacks_values(self, settings: Collection[str], states: Collection[str]) -> bool:
        """Return whether the checkpoint lacks values that the state dict has, or has them in another order."""
        del settings, states  # the live ones are matched as such
        if self._entry is None:
            return bool(self._related or further_values(self._state_dict).get("values"))
        return bool(self._state_dict.keys() - {STATE, GROUPS} - self._entry.get("values", {}).keys())

    def unused_keys(self) -> list[str]:
        """Return no key: all are put in place."""
        return []

    def apply(self) -> bool:
        """Put the values into the state dict, after its states and settings. Return that it changed none of these."""
        if self._entry is not None:
            states = self._state_dict[STATE]
            numbers = [number for group in self._state_dict[GROUPS] for number in group["params"]]
            values = resolve_references(
                dict(self._entry.get("values", {})), [states.get(number, {}) for number in numbers]
            )
            added = add_values({GROUPS: self._state_dict[GROUPS]}, {**values, STATE: {}})
            for place, further in values.get(STATE, {}).items():
                states[numbers[place]] = {**states.get(numbers[place], {}), **further}
            self._state_dict.update({key: value for key, value in added.items() if key != STATE})
            states.update(self._entry.get("entries", {}))
        return False
