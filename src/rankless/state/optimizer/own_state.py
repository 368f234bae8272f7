"""The values that an optimizer stores in its ``state_dict()`` besides the states of its parameters and their groups.

The optimizer gives it by its own ``state_dict``, with hooks, and takes it by its own ``load_state_dict``. Entries of
``optimizer.state`` that belong to no parameter are of this kind, too.

A save reads it on each rank in its first vote, and merges on rank 0 in the vote "exchanging tensor specs"; a load puts
it in place on each rank. The form of an entry, and the order of merged ones, are in ``state.json``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from rankless.errors import StateError, UnsupportedTensorError, UnsupportedValueError
from rankless.observe.warning import warn_caller
from rankless.ondisk.dtypes import dtype_of_array
from rankless.ondisk.values import are_same
from rankless.state.array_encoder import INLINE_BYTES, digest_tensor
from rankless.state.optimizer.adapters import HOOKS
from rankless.state.optimizer.object_states import COLLECTIONS
from rankless.state.optimizer.storable_states import check_tree
from rankless.state.user_objects import read_state

#: Key of a flag until entries of ranks are merged: other ranks have the parameters, and other optimizers step them.
DIVIDED = "divided"

#: Classes of states that cannot change: it does not matter if parameters share one.
_IMMUTABLE = frozenset({int, float, bool, str, bytes, complex, type(None)})

#: The parts of a state dict that are stored as the states of parameters and as their groups.
STATE, GROUPS = "state", "param_groups"


def has_own_form(optimizer: Any) -> bool:
    """Return whether an optimizer has code of its own, or hooks, for its state dict."""
    kind = type(optimizer)
    return (
        not isinstance(optimizer, Optimizer)
        or kind.state_dict is not Optimizer.state_dict
        or kind.load_state_dict is not Optimizer.load_state_dict
        or any(getattr(optimizer, hooks, None) for hooks in HOOKS)
    )


def own_values(optimizer: Any) -> dict[str, Any]:
    """Return the values that an optimizer stores besides the states and settings that a checkpoint has; empty if none.

    ``values`` has them as its state dict does: keys at the top, keys of groups, keys of states. ``entries`` are those
    of its ``state`` that belong to no parameter.
    """
    state = getattr(optimizer, "state", {})
    entries = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
    own = _further_values(optimizer, _read_state_dict(optimizer)) if has_own_form(optimizer) else {}
    return {name: value for name, value in (("values", own), ("entries", entries)) if value}


def _read_state_dict(optimizer: Any) -> Mapping[Any, Any]:
    """Return an optimizer's ``state_dict()``. Raises ``StateError`` if the result has no form of a state dict."""
    given: Mapping[Any, Any] = read_state(optimizer)
    parts = (given.get(STATE, {}), given.get(GROUPS, [])) if isinstance(given, Mapping) else (None, None)
    if not isinstance(parts[0], Mapping) or not isinstance(parts[1], list | tuple):
        raise StateError(
            f"state_dict() of {type(optimizer).__qualname__} must return a dict with state, a dict, and param_groups, "
            "a list, if it has these: return what torch.optim.Optimizer.state_dict() does, with further keys"
        )
    return given


def _further_values(optimizer: Any, given: Mapping[Any, Any]) -> dict[Any, Any]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    live = getattr(optimizer, "state", {})
    references = {
        id(value): (number, name)
        for number, parameter in enumerate(parameters)
        for name, value in live.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }
    further = {key: value for key, value in given.items() if key not in {STATE, GROUPS}}
    states = {
        number: new
        for number, parameter in enumerate(parameters)
        if (new := _new_keys(given.get(STATE, {}).get(number, {}), live.get(parameter, {}), references))
    }
    groups = [
        _new_settings(group, live_group, references)
        for group, live_group in zip(given.get(GROUPS, []), optimizer.param_groups, strict=False)
    ]
    further |= {STATE: states} if states else {}
    further |= {GROUPS: groups} if any(groups) else {}
    check_tree(further, "the state_dict() of an optimizer")
    return {key: _refer(value, references) for key, value in further.items()}


#: A state of a parameter: the parameter's number in its optimizer, and the state's name.
_Place = tuple[int, str]


def _new_keys(given: Any, live: Any, references: Mapping[int, _Place]) -> dict[Any, Any]:
    """Return the entries of a state that the live one lacks, unless they only arrange live tensors in another way."""
    if not isinstance(given, Mapping) or not isinstance(live, Mapping):
        return {}
    return {
        key: value
        for key, value in given.items()
        if key not in live and not all(id(leaf) in references for leaf in tree_leaves(value))
    }


def _new_settings(given: Any, live: Any, references: Mapping[int, _Place]) -> dict[Any, Any]:
    """Return the settings of a group that the live one lacks, or has with another value, as after a load of such."""
    if not isinstance(given, Mapping):
        return {}
    changed = {
        key: value
        for key, value in _settings_of(given).items()
        if key in live and value is not live[key] and not _are_equal(value, live[key])
    }
    return {**_new_keys(given, live, references), **changed}


#: The key of the one entry of a dict that stands for a live state.
_REFERENCE = "rankless.state"


def _refer(tree: Any, references: Mapping[int, _Place]) -> Any:
    """Return a tree with references in place of states of parameters, because these are stored as such."""
    if type(tree) is dict:
        return {key: _refer(value, references) for key, value in tree.items()}
    if type(tree) is list:
        return [_refer(value, references) for value in tree]
    if isinstance(tree, torch.Tensor) and id(tree) in references:
        return {_REFERENCE: list(references[id(tree)])}
    return tree


def resolve_references(tree: Any, states: Sequence[Mapping[str, Any]]) -> Any:
    """Return a tree with live states in place of the references of :func:`_refer`."""
    if type(tree) is dict and tree.keys() == {_REFERENCE}:
        number, name = tree[_REFERENCE]
        return states[number][name]
    if type(tree) is dict:
        return {key: resolve_references(value, states) for key, value in tree.items()}
    if type(tree) is list:
        return [resolve_references(value, states) for value in tree]
    return tree


def own_entry(optimizer: Any, names: Sequence[str]) -> dict[str, Any] | None:
    """Return the entry that a save stores of one optimizer, with its parameters' ``names``; ``None`` if it has nothing.

    Tensors and arrays that are stored apart get a digest, so that ranks compare them.
    """
    own = own_values(optimizer)
    state = getattr(optimizer, "state", {})
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    tables = list(state.values())
    values = list(chain.from_iterable(map(dict.values, tables))) if {*map(type, tables)} <= {dict} else tables
    kinds = {*map(type, values)}
    if kinds & _IMMUTABLE:
        values = [value for value in values if type(value) not in _IMMUTABLE]
    are_tensors = all(issubclass(kind, torch.Tensor) for kind in kinds - _IMMUTABLE)
    # This runs in each save, while the training waits: a look for an object that is two states, in loops of C.
    if not are_tensors or len({*map(id, values)}) != len(values) or not trained.issuperset(map(id, state)):
        own |= _find_lost(optimizer, trained)
    if not own:
        return None
    numbered = _find_numbered(optimizer, own.get("entries", {})) if has_own_form(optimizer) else []
    if numbered:
        raise UnsupportedValueError(
            f"the state of {type(optimizer).__qualname__} has an entry under the key {numbered[0]!r}, which is the "
            "number of a parameter in its state_dict(), and would replace that one's state: use a text as the key"
        )
    return add_digests({"params": list(names), **own})


def add_digests(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry with digests of its tensors and arrays that are stored apart."""
    digests = [digest_tensor(tensor) for tensor in map(_find_stored, tree_leaves(entry)) if tensor is not None]
    return {**entry, **({"digests": digests} if digests else {})}


def warn_left_out(optimizer: Any, subject: str, fate: str = "It is not saved") -> bool:
    """Warn of a part that a save leaves out. Return ``True``, the mark by which a load knows that it is not exact."""
    warn_caller(f"{type(optimizer).__qualname__} has {subject}. {fate}, and a load calls the optimizer reconstructed")
    return True


def _find_lost(optimizer: Any, trained: Container[int]) -> dict[str, Any]:
    """Return the mark of an optimizer's entry if it has states that a load cannot give back as they are.

    Such states belong to tensors in no group, or are one object for several parameters. Warn of them.
    """
    lost, seen, places = False, set[int](), dict[int, str]()
    for key, states in optimizer.state.items():
        if isinstance(key, torch.Tensor) and id(key) not in trained:
            described = list(states) if isinstance(states, Mapping) else type(states).__qualname__
            lost = warn_left_out(
                optimizer,
                f"the state {described} of a tensor of shape {list(key.shape)} that is in none of its groups, such as "
                "a parameter that was removed from one: delete it from optimizer.state",
            )
        elif isinstance(key, torch.Tensor) and isinstance(states, Mapping):
            place = f"a parameter of shape {list(key.shape)}, which keeps {list(states)}"
            for value in _list_mutable(states):
                other = places.setdefault(id(value), place)
                lost = lost or (id(value) in seen and _warn_of_shared(optimizer, value, other, place))
                seen.add(id(value))
    return {"differed": True} if lost else {}


def _warn_of_shared(optimizer: Any, value: Any, *places: str) -> bool:
    return warn_left_out(
        optimizer,
        f"one {type(value).__qualname__} as two states, of {' and of '.join(places)}",
        "After a load each is an object of its own",
    )


def _list_mutable(states: Mapping[Any, Any]) -> list[Any]:
    """Return the tensors, arrays and collections in the states of a parameter that a step may change in place."""
    found, level = [], list(states.values())
    while level:
        found += [value for value in level if isinstance(value, torch.Tensor | np.ndarray | list | dict | deque)]
        collections = [value for value in level if type(value) in COLLECTIONS]
        level = [child for value in collections for child in (value.values() if type(value) is dict else value)]
    return found


def _find_numbered(optimizer: Any, entries: Mapping[Any, Any]) -> list[Any]:
    """Return the keys of entries that torch's ``state_dict()`` takes for the number of a parameter."""
    numbers = {*range(sum(len(group["params"]) for group in optimizer.param_groups))}
    return [key for key in entries if key in numbers]


def _find_stored(leaf: object) -> torch.Tensor | None:
    """Return a tensor or an array as a tensor, if it is stored apart from the values."""
    if isinstance(leaf, np.ndarray):
        with suppress(UnsupportedTensorError):  # the encoder refuses it, and names its place
            dtype_of_array(leaf)
            return torch.from_numpy(leaf.copy(order="C"))
        return None
    return leaf if isinstance(leaf, torch.Tensor) and leaf.nbytes > INLINE_BYTES else None


def merge_own(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of all parts and ranks, encoded, each once, in an order that does not depend on the ranks.

    If ranks keep different values for the same parameters, the lowest rank's values are stored, and marked.
    """
    merged: dict[str, dict[str, Any]] = {}
    for entry in entries:
        first = merged.setdefault("\0".join(entry["params"]), entry)
        if not are_same(_without_mark(first), _without_mark(entry)):
            warn_caller(
                "ranks keep different values in the state_dict() of an optimizer, besides its states: those of the "
                "lowest rank are saved, and a load calls the optimizer reconstructed"
            )
            merged["\0".join(entry["params"])] = {**first, "differed": True}
        elif entry.get("differed"):
            merged["\0".join(entry["params"])] = {**first, "differed": True}
    return [merged[key] for key in sorted(merged)]


def add_blank_entries(ranks: Sequence[Sequence[dict[str, Any]]], names: Sequence[set[str]]) -> list[dict[str, Any]]:
    """Return the entries of all ranks, and a blank one for each entry that a rank with all of its parameters lacks.

    A blank entry has no values.

    ``names`` has the names of each rank's parameters. So :func:`merge_own` finds that the ranks differ. An optimizer
    without parameters, as in an empty stage, belongs to one rank: others do not lack it. Nor do they lack the entry of
    a rank that steps some of the parameters that all ranks have, as under a ``ZeroRedundancyOptimizer``.
    """
    keys = {
        tuple(entry["params"]) for entries in ranks for entry in entries if entry["params"] and not entry.get(DIVIDED)
    }
    added = []
    for entries, of_rank in zip(ranks, names, strict=True):
        lacking = keys - {tuple(entry["params"]) for entry in entries}
        blank = [{"params": list(key)} for key in sorted(lacking) if of_rank.issuperset(key)]
        added += [*entries, *blank]
    return [{key: value for key, value in entry.items() if key != DIVIDED} for entry in added]


def _without_mark(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "differed"}


def find_entry(saved: Sequence[Mapping[str, Any]], names: Sequence[str], group_count: int) -> Mapping[str, Any] | None:
    """Return the saved entry for an optimizer with parameters of these ``names``; ``None`` if there is none.

    It is the entry of the same parameters in the same order. If there is none, it is one that all optimizers with some
    of the parameters agreed about, if nothing in it belongs to a parameter or a group by its number.
    """
    exact = next((entry for entry in saved if entry["params"] == list(names)), None)
    if exact is not None and len(exact.get("values", {}).get(GROUPS, ())) in {0, group_count}:
        return exact
    related = find_related(saved, names)
    related = [entry for entry in related if entry.keys() & {"values", "entries"}] or related
    if not related or any(_is_numbered(_values_of(entry)) for entry in related):
        return None
    return related[0] if all(_have_same_values(entry, related[0]) for entry in related[1:]) else None


def _values_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key in {"values", "entries"}}


def _have_same_values(entry: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two saved entries are known to have the same values. Arrays are not read yet: digests tell."""
    values, other_values = map(_describe_arrays, (_values_of(entry), _values_of(other)))
    has_arrays = any(isinstance(leaf, np.ndarray) for leaf in tree_leaves(_values_of(entry)))
    is_known = not has_arrays or "digests" in entry
    return is_known and entry.get("digests") == other.get("digests") and _are_equal(values, other_values)


def _describe_arrays(tree: Any) -> Any:
    return tree_map(lambda leaf: (leaf.dtype.str, leaf.shape) if isinstance(leaf, np.ndarray) else leaf, tree)


def find_related(saved: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the saved entries of optimizers with some of the parameters of these ``names``."""
    return [entry for entry in saved if not set(names).isdisjoint(entry["params"])]


def _is_numbered(tree: Any) -> bool:
    """Return whether some value may have an element for each parameter, or refers to one, by its number."""
    if isinstance(tree, Mapping):
        return bool(tree.keys() & {STATE, GROUPS, _REFERENCE}) or any(
            _may_be_number(key) or _is_numbered(value) for key, value in tree.items()
        )
    if isinstance(tree, torch.Tensor | np.ndarray):
        return tree.ndim > 0
    return isinstance(tree, Sequence) and not isinstance(tree, str | bytes)


def _may_be_number(key: Any) -> bool:
    return isinstance(key, Integral) or (isinstance(key, str) and key.isdecimal()) or _is_numbered(key)


def _are_equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor | np.ndarray) or isinstance(b, torch.Tensor | np.ndarray):
        return _are_equal_arrays(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_are_equal(a[key], b[key]) for key in a)
    if isinstance(a, Sequence) and type(a) is type(b) and not isinstance(a, str | bytes):
        return len(a) == len(b) and all(map(_are_equal, a, b))
    try:
        return bool(a == b)
    except Exception:  # noqa: BLE001 - code of a class of the user's
        return False


def _are_equal_arrays(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (a.dtype, a.device) == (b.dtype, b.device) and torch.equal(a, b)
    return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)


def put_own(optimizer: Any, saved: Mapping[str, Any]) -> bool:
    """Give an optimizer the values that :func:`own_entry` stored, after its states and settings are in place.

    Return whether its own code changed states of parameters, or settings, while it loaded them.
    """
    for key, value in saved.get("entries", {}).items():
        existing = optimizer.state.get(key)
        if _is_alike(existing, value):
            existing.copy_(value)
        else:
            optimizer.state[key] = value
    if not has_own_form(optimizer):
        return False
    is_changed = _load_own_form(optimizer, saved.get("values", {}))
    return is_changed or bool(_find_numbered(optimizer, saved.get("entries", {})))


def _load_own_form(optimizer: Any, further: Mapping[Any, Any]) -> bool:
    """Let an optimizer load its own state dict with the ``further`` saved values.

    Its states and settings have their values already. Values that torch's ``load_state_dict`` casts or replaces are put
    back. Return whether states or settings have other values afterwards.
    """
    from rankless.state.optimizer.load_changes import (  # noqa: PLC0415 - few optimizers have code of their own
        has_all,
        is_cast_of,
        is_unchanged,
        remember,
    )

    groups = list(optimizer.param_groups)
    parameters = [parameter for group in groups for parameter in group["params"]]
    state = getattr(optimizer, "state", {})
    exact = [dict(state.get(parameter, {})) for parameter in parameters]
    seen = [remember(states) for states in exact]
    replaced = further.get(GROUPS) or [{}] * len(groups)
    seen_settings = [
        remember({name: value for name, value in _settings_of(group).items() if name not in further_settings})
        for group, further_settings in zip(groups, replaced, strict=True)
    ]
    optimizer.load_state_dict(add_values(optimizer.state_dict(), resolve_references(dict(further), exact)))
    state = getattr(optimizer, "state", {})
    for parameter, states, seen_states in zip(parameters, exact, seen, strict=True):
        loaded = state.get(parameter, {})
        loaded |= {
            name: value
            for name, value in states.items()
            if (isinstance(value, torch.Tensor) or not is_unchanged(seen_states[name], loaded.get(name)))
            and is_cast_of(loaded.get(name), value)
        }
    _keep_groups(optimizer, groups)
    has_settings = all(map(has_all, seen_settings, groups))
    return not has_settings or not all(
        has_all(states, state.get(parameter, {})) for parameter, states in zip(parameters, seen, strict=True)
    )


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in {"params", "param_names"}}


def add_values(given: dict[Any, Any], further: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a state dict with the further saved values at the top, in its groups and in its states."""
    states = dict(given.get(STATE, {}))  # torch's state_dict() has the live states
    for number, added in further.get(STATE, {}).items():
        states[number] = {**states.get(number, {}), **added}
    for group, settings in zip(given.get(GROUPS, ()), further.get(GROUPS, ()), strict=False):
        group.update(settings)
    added_at_top = {key: value for key, value in further.items() if key not in {STATE, GROUPS}}
    return {**given, **({STATE: states} if states else {}), **added_at_top}


def _keep_groups(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    """Let an optimizer keep its ``groups``, and the tensors in them, with the settings that it has loaded."""
    for group, loaded in zip(groups, list(optimizer.param_groups), strict=True):
        if group is not loaded:
            tensors = {name: value for name, value in group.items() if isinstance(value, torch.Tensor)}
            group.update({**loaded, **tensors})
    optimizer.param_groups[:] = groups


def _is_alike(existing: Any, value: Any) -> bool:
    return (
        isinstance(existing, torch.Tensor)
        and isinstance(value, torch.Tensor)
        and (existing.shape, existing.dtype) == (value.shape, value.dtype)
    )
