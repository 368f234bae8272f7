"""Values of an optimizer besides its states and settings, in the state dicts of files.

The schemas of state dicts call it, on each rank of a conversion; a save of an optimizer on rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rankless.state.optimizer.left_out_values import has_values, warn_left_out
from rankless.state.optimizer.own_state import add_values, find_entry, find_related, resolve_references


def add_own_values(
    state_dict: dict[str, Any], saved: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[str, Any]:
    """Return the state dict of a file with the values that a save stored for parameters of these ``names``.

    Warn of values that have no place in any state dict: values of several optimizers that are one now, or the reverse.
    """
    entry = find_entry(saved, names, len(state_dict["param_groups"]))
    if entry is None and has_values(find_related(saved, names)):
        warn_left_out("a file of torch.save")
    if entry is None:
        return state_dict
    states = [state_dict["state"].get(number, {}) for number in range(len(names))]
    whole = add_values(state_dict, resolve_references(dict(entry.get("values", {})), states))
    return {**whole, "state": {**whole["state"], **entry.get("entries", {})}}
