"""Changes of shared values that follow from changed parameters: groups of optimizers, states, schedulers.

Values keep the encoding of the codec that reads them, so nothing here looks into a state. A verb returns changes, and
:class:`rankless.formats.edited_reader.EditedReader` applies them to the values of the first checkpoint, on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankless.errors import InvalidArgumentError
from rankless.ondisk.value_files import OWN_STATE
from rankless.state.schedulers_by_params import BY_GROUP

#: Changes the shared values of a checkpoint.
ValueChange = Callable[[Mapping[str, Any]], Mapping[str, Any]]

#: Returns the new names of a parameter: itself, others, several, or none if it is dropped.
RenameNames = Callable[[str], Sequence[str]]

#: The entries of schedulers that have an element for each parameter group of the optimizer.
_PER_GROUP = (*BY_GROUP, "last_lr", "_initial_lrs")

_OPTIMIZER, _SCHEDULER, _MODEL = "optimizer", "scheduler", "model"


def rename_parameters(rename: RenameNames) -> ValueChange:
    """Return a change that gives all values the new names of parameters.

    Each new parameter is in the group of the one that it comes from. Groups that have none any more are dropped, and so
    are the entries of schedulers for them.
    """

    def change(shared: Mapping[str, Any]) -> Mapping[str, Any]:
        kept = {slot: _kept_groups(value, rename) for slot, value in shared.items() if _kind(slot) == _OPTIMIZER}
        return {slot: _rename_slot(slot, value, rename, kept) for slot, value in shared.items()}

    return change


def add_parameters(names: Sequence[str], like: str, group: str) -> ValueChange:
    """Return a change that adds parameters to the parameter group of another one, in the optimizer of a ``group``.

    Numbers that the optimizer keeps for the other one, such as its steps, are zero for them. The change raises
    ``InvalidArgumentError`` for other values.
    """
    model = group.partition("/")[2]

    def change(shared: Mapping[str, Any]) -> Mapping[str, Any]:
        if group not in shared:
            return shared
        added = {**shared}
        added[group] = {**shared[group], "groups": [_add_to_group(e, names, like) for e in shared[group]["groups"]]}
        for slot, value in shared.items():
            if _kind(slot) == _SCHEDULER and slot.partition("/")[2] in {model, ""}:
                in_slot = _add_to_scheduler(value, names, like)
                added[slot] = _add_to_scheduler(in_slot, [f"{model}/{name}" for name in names], f"{model}/{like}")
        return added

    return change


def _add_to_group(entry: Mapping[str, Any], names: Sequence[str], like: str) -> dict[str, Any]:
    """Return a parameter group with more parameters, if it has the one that they are like."""
    if like not in entry["params"]:
        return dict(entry)
    present = {*entry["params"]}
    states = dict(entry["state"])
    for name in names if like in states else ():
        states[name] = {key: _as_new(value, key, name) for key, value in states[like].items()}
    params = _insert_after(like, [name for name in names if name not in present], entry["params"])
    return {**entry, "params": params, "state": states}


def _as_new(value: Any, key: str, name: str) -> Any:
    """Return the value that a new parameter has in place of one of a trained parameter."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return type(value)(0)
    raise InvalidArgumentError(
        f"no rule says what the value {key!r} of {name!r} is: edit the model alone, or name another parameter"
    )


def _kind(slot: str) -> str:
    return slot.partition("/")[0]


def _kept_groups(optimizer: Any, rename: RenameNames) -> list[bool]:
    """Return for each parameter group whether it has parameters after the change, or had none before."""
    return [not entry["params"] or any(map(rename, entry["params"])) for entry in optimizer.get("groups", ())]


def _rename_slot(slot: str, value: Any, rename: RenameNames, kept: Mapping[str, list[bool]]) -> Any:
    if _kind(slot) == _MODEL and isinstance(value, Mapping):
        return {new: item for name, item in value.items() for new in rename(name)}
    if _kind(slot) == _OPTIMIZER:
        entries = zip(value["groups"], kept[slot], strict=True)
        groups = [_rename_group(entry, rename) for entry, is_kept in entries if is_kept]
        own = [{**entry, "params": _rename_all(entry["params"], rename)} for entry in value.get(OWN_STATE, ())]
        _check_own(value.get(OWN_STATE, ()), own)
        return {**value, "groups": groups, **({OWN_STATE: own} if own else {})}
    if _kind(slot) == _SCHEDULER:
        return _rename_scheduler(value, rename)
    return value


def _check_own(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``InvalidArgumentError`` if an optimizer has own values for parameters, and their number changes."""
    for old, new in zip(before, after, strict=True):
        if len(old["params"]) != len(new["params"]):
            raise InvalidArgumentError(
                "an optimizer of the checkpoint keeps values of all its parameters together, which cannot follow if "
                "parameters are added or removed: edit the model alone, with model_only"
            )


def _rename_all(names: Sequence[str], rename: RenameNames) -> list[str]:
    return [new for name in names for new in rename(name)]


def _rename_group(entry: Mapping[str, Any], rename: RenameNames) -> dict[str, Any]:
    params = _rename_all(entry["params"], rename)
    states = {new: state for name, state in entry["state"].items() for new in rename(name)}
    return {**entry, "params": params, "state": states}


def _rename_scheduler(value: Any, rename: RenameNames) -> Any:
    """Return a scheduler, or a list of several, with the new names in its groups."""
    if isinstance(value, list):
        return [_rename_scheduler(entry, rename) for entry in value]
    params = value.get("params") if isinstance(value, Mapping) else None
    if not params:
        return value
    renamed = [sorted(_rename_all(names, rename)) for names in params]
    kept = [bool(new) or not old for old, new in zip(params, renamed, strict=True)]
    scheduler = {**value, "params": [names for names, is_kept in zip(renamed, kept, strict=True) if is_kept]}
    return scheduler if all(kept) else {**scheduler, "state": _drop_entries(scheduler.get("state"), kept)}


def _drop_entries(state: Any, kept: Sequence[bool]) -> Any:
    """Return the state of a scheduler without its entries for dropped groups; entries of parts of it go, too."""
    if isinstance(state, list):
        return [_drop_entries(part, kept) for part in state]
    if not isinstance(state, Mapping):
        return state
    return {
        key: [entry for entry, is_kept in zip(value, kept, strict=True) if is_kept]
        if key in _PER_GROUP and isinstance(value, list) and len(value) == len(kept)
        else _drop_entries(value, kept)
        for key, value in state.items()
    }


def _add_to_scheduler(value: Any, names: Sequence[str], like: str) -> Any:
    if isinstance(value, list):
        return [_add_to_scheduler(entry, names, like) for entry in value]
    params = value.get("params") if isinstance(value, Mapping) else None
    if not params:
        return value
    return {**value, "params": [sorted(_insert_after(like, names, group)) for group in params]}


def _insert_after(like: str, names: Sequence[str], params: Sequence[str]) -> list[str]:
    """Return the parameters of a group, with others after one of them if it has that."""
    return [listed for name in params for listed in ([name, *names] if name == like else [name])]
