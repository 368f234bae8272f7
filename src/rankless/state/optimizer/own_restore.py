"""A restore of the values that one optimizer keeps besides the states of its parameters and their groups.

:mod:`rankless.state.optimizer.optimizer_restore` makes one for each optimizer on each rank; :meth:`OwnRestore.apply`
runs the optimizer's own code, in the vote "putting values in place". It must run after the states and settings are in
place, because that code may read them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from rankless.ondisk.value_files import IN_STATE_DICT
from rankless.state.optimizer.own_state import (
    GROUPS,
    STATE,
    find_entry,
    find_related,
    has_own_form,
    own_values,
    put_own,
)
from rankless.state.user_objects import loading_code


class OwnRestore:
    """The saved values that an optimizer with parameters of these ``names`` gets.

    ``saved`` has the entries of the whole checkpoint. If it ``is_unclassed``, another system saved the state dict:
    there, and in files for ``Optimizer.load_state_dict``, values are also among the settings of groups and the states.
    """

    def __init__(
        self, optimizer: Optimizer, names: Sequence[str], saved: Sequence[Mapping[str, Any]], *, is_unclassed: bool
    ) -> None:
        self._optimizer, self.is_unclassed = optimizer, is_unclassed
        self._entry = find_entry(saved, names, len(optimizer.param_groups))
        related = find_related(saved, names)
        self._is_related = bool(related)
        self._has_differed = any(entry.get("differed") for entry in (*related, self._entry or {}))
        if self._entry is None and is_unclassed and not self._is_related:
            self._entry = {"params": list(names), IN_STATE_DICT: True}
        self._in_place = self._entry is not None and bool(self._entry.get(IN_STATE_DICT))
        needs_live = self._in_place or (self._entry is None and not self._is_related)
        #: The values that the optimizer gives now, if they matter.
        self._live: Mapping[Any, Any] = own_values(optimizer).get("values", {}) if needs_live else {}

    @property
    def class_name(self) -> str:
        """The name of the optimizer's class."""
        return type(self._optimizer).__qualname__

    def list_saved(self) -> list[tuple[int, Any]]:
        """Return the ``id`` of the optimizer with the values that it gets, if it gets some."""
        return [] if self._entry is None else [(id(self._optimizer), self._entry.get("values"))]

    @property
    def has_differed(self) -> bool:
        """True if ranks had different values, and only one rank's were saved, or if something was left out."""
        return self._has_differed

    def lacks_values(self, settings: Collection[str], states: Collection[str]) -> bool:
        """Return whether the checkpoint lacks values, given the names of all settings and states that it has."""
        if self._entry is None:
            return self._is_related or bool(self._live)
        groups, states_by_number = self._live.get(GROUPS, ()), self._live.get(STATE, {})
        lacking = self._live.keys() - {GROUPS, STATE} - self._entry.get("values", {}).keys()
        lacking |= {key for group in groups for key in group} - {*settings}
        return bool(lacking | {key for state in states_by_number.values() for key in state} - {*states})

    def unused_keys(self) -> list[str]:
        """Return the saved keys that the optimizer has no code of its own to load."""
        if self._entry is None or has_own_form(self._optimizer):
            return []
        return [str(key) for key in self._entry.get("values", {})]

    def apply(self) -> bool:
        """Give the optimizer its values, after its states and settings. Return whether it changed some of these."""
        entry = self._entry
        if entry is None and not has_own_form(self._optimizer):
            return False
        with loading_code(self._optimizer, "optimizer"):
            if entry is None and own_values(self._optimizer):
                return False
            return put_own(self._optimizer, self._take_in_place(entry) if entry and self._in_place else entry or {})

    def _take_in_place(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entry with the values that the restored groups and states have, which states then lack.

        Groups keep theirs, as torch leaves them: code of the optimizer may read such a setting.
        """
        live_groups = self._optimizer.param_groups
        parameters = [parameter for group in live_groups for parameter in group["params"]]
        groups = [
            {key: group[key] for key in keys if key in group}
            for group, keys in zip(live_groups, self._live.get(GROUPS, ()), strict=False)
        ]
        states = dict[int, dict[str, Any]]()
        for number, keys in self._live.get(STATE, {}).items():
            live = self._optimizer.state.get(parameters[number], {})
            states[number] = {key: live.pop(key) for key in keys if key in live}
        return {**entry, "values": {**entry.get("values", {}), GROUPS: groups, STATE: states}}
