"""Parsing the state dicts of optimizers into tensors by parameter and state, and parameter groups.

Parameters are identified by number (``Optimizer.state_dict``) or by name (``get_optimizer_state_dict``, which can also
be flattened).

:mod:`rankless.formats.tree.tree_contents` parses optimizers with it. The result of :meth:`ParsedOptimizer.to_values`
has the form of ``state.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rankless.errors import CorruptCheckpointError
from rankless.formats.stored_tensor import StoredTensor, is_tensor
from rankless.formats.tree.tree_traversal import check_keys
from rankless.formats.tree.unique_names import collision_error, index_by_name, index_by_text
from rankless.ondisk.hash_limits import has_safe_hash
from rankless.ondisk.read_budget import ReadBudget
from rankless.ondisk.value_files import BY_NUMBER, DIMENSION_ORDER, IN_STATE_DICT, ORDERED, OWN_STATE

#: The two parts of an optimizer's state dict, and the prefixes of the names in a flattened one.
STATE, GROUPS = "state", "param_groups"

#: The keys of a group that list its parameters; all other keys are settings.
_PARAMS, _NAMES = "params", "param_names"

#: The key of the name of the class in files of rankless.
_CLASS = "class"

#: Units of work for a parameter, or for a state or setting of one.
_PARAMETER = 4

#: A function that strips wrapper prefixes from the name of a parameter.
Clean = Callable[[str], str]


@dataclass(frozen=True)
class OptimizerGroup:
    """A parameter group. ``number`` is ``None`` if it was not saved which parameters were in one group."""

    number: int | None
    params: Sequence[str]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class ParsedOptimizer:
    """An optimizer: its parameter groups, and the states of its parameters by name.

    With ``by_number`` the parameters have no names, but are identified by their number, counted over all groups.
    ``kind`` is the name of its class, which only files of rankless have. ``own`` has the values that it keeps besides
    states and settings, in the form of ``state.json``.
    """

    groups: Sequence[OptimizerGroup]
    states: Mapping[str, Mapping[str, Any]]
    by_number: bool = False
    kind: str | None = None
    own: Sequence[Mapping[str, Any]] = ()

    @property
    def params(self) -> list[str]:
        """The names of its parameters."""
        return [name for group in self.groups for name in group.params]

    def iterate_tensors(self) -> Iterator[tuple[str, str, Any]]:
        """Yield the tensors in the states, each with its parameter and the name of the state."""
        for name, states in self.states.items():
            yield from ((name, state, value) for state, value in states.items() if is_tensor(value))

    def to_values(self) -> dict[str, Any]:
        """Return everything but the tensors, in the form of ``state.json``."""
        plain = {name: dict(_iterate_plain(states)) for name, states in self.states.items()}
        groups = [
            {
                "class": self.kind,
                "number": group.number,
                "params": list(group.params),
                ORDERED: group.number is not None,
                "settings": dict(group.settings),
                "state": {name: plain[name] for name in group.params if plain.get(name)},
            }
            for group in self.groups
        ]
        own = {OWN_STATE: list(self.own)} if self.own else {}
        return {"groups": groups, **own, **({BY_NUMBER: True} if self.by_number else {})}


def _iterate_plain(states: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a parameter's states that are no tensors: other values, and tensors' orders of dimensions."""
    for state, value in states.items():
        if not is_tensor(value):
            yield state, value
        elif isinstance(value, StoredTensor) and value.dimension_order is not None:
            yield state, {DIMENSION_ORDER: value.dimension_order}


def is_flattened(node: Mapping[Any, Any]) -> bool:
    """Return whether a dict has the keys of a flattened optimizer state dict."""
    prefixes = {key.partition(".")[0] if isinstance(key, str) and "." in key else None for key in node}
    return GROUPS in prefixes and prefixes <= {STATE, GROUPS}


def list_names(node: Mapping[Any, Any]) -> list[str]:
    """Return the names of parameters in a state dict of an optimizer that is not flattened."""
    groups = node.get(GROUPS, [])
    listed = [name for group in groups for key in (_PARAMS, _NAMES) for name in _get_list(group, key)]
    return [name for name in listed if isinstance(name, str)]


def parse_optimizer(node: Mapping[str, Any], clean: Clean, budget: ReadBudget) -> ParsedOptimizer:
    """Parse the state dict of an optimizer.

    Raises ``CorruptCheckpointError`` if it contradicts itself, ``FormatError`` if two parameters, or two states or
    settings of a parameter, would get the same name.
    """
    optimizer = _parse_flattened(node, clean, budget) if is_flattened(node) else _parse_groups(node, clean, budget)
    params = set(optimizer.params)
    if len(params) != len(optimizer.params):
        raise CorruptCheckpointError("the optimizer's groups list the same parameter twice")
    unlisted = next((name for name in optimizer.states if name not in params), None)
    if unlisted is not None:
        raise CorruptCheckpointError(
            f"the optimizer has a state of parameter {unlisted[:100]!r}, which is in none of its groups"
        )
    return optimizer


def _parse_groups(node: Mapping[str, Any], clean: Clean, budget: ReadBudget) -> ParsedOptimizer:
    budget.spend(_PARAMETER * sum(len(_get_list(group, _PARAMS)) + len(group) for group in node[GROUPS]))
    names, by_number = _parameter_names(node[GROUPS], clean)
    groups = [
        OptimizerGroup(
            number, [names[key] for key in _get_list(group, _PARAMS)], _group_settings(group, (GROUPS, number))
        )
        for number, group in enumerate(node[GROUPS])
    ]
    texts = {str(key): name for key, name in names.items()}  # DCP converts the numbers to strings
    entries = _other_entries(node.get(STATE, {}), names)
    states: dict[str, dict[str, Any]] = {}
    keys: dict[str, Any] = {}
    for key, param_states in node.get(STATE, {}).items():
        if key in entries:
            continue
        if not isinstance(param_states, dict):
            raise CorruptCheckpointError(f"the optimizer's state of parameter {str(key)[:100]!r} is not a dict")
        budget.spend(_PARAMETER * (1 + len(param_states)))
        name = texts.get(str(key), str(key))
        if name in states:
            raise collision_error(name, (STATE, keys[name]), (STATE, key))
        keys[name], states[name] = key, index_by_text(param_states, (STATE, key))
    kind = node[_CLASS] if isinstance(node.get(_CLASS), str) else None
    known = {STATE, GROUPS} if kind is None else {STATE, GROUPS, _CLASS}
    further = {key: value for key, value in node.items() if key not in known}
    own = {name: value for name, value in (("values", further), ("entries", entries)) if value}
    params = [name for group in groups for name in group.params]
    is_listed = own or kind is not None
    return ParsedOptimizer(
        groups, states, by_number, kind, [{_PARAMS: params, **own, IN_STATE_DICT: True}] if is_listed else []
    )


def _other_entries(states: Mapping[Any, Any], names: Mapping[str | int, str]) -> dict[Any, Any]:
    """Return the entries of an optimizer's ``state`` that belong to no parameter, if parameters are numbers there."""
    if not names or not all(isinstance(key, int) for key in names):
        return {}
    return {key: value for key, value in states.items() if not isinstance(key, int) and not str(key).isdecimal()}


def _group_settings(group: Mapping[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    return index_by_text({key: value for key, value in group.items() if key not in {_PARAMS, _NAMES}}, path)


def _parameter_names(groups: Sequence[Mapping[str, Any]], clean: Clean) -> tuple[dict[str | int, str], bool]:
    """Return the name of each parameter by its key in the groups, and whether the names are only numbers."""
    keys = [key for group in groups for key in _get_list(group, _PARAMS)]
    if not all(type(key) in {int, str} for key in keys):
        raise CorruptCheckpointError("the optimizer's groups must list parameters by name or number")
    check_keys(keys)
    saved_names = [name for group in groups for name in _get_list(group, _NAMES)]
    if len(saved_names) == len(keys) and all(isinstance(name, str) for name in saved_names):
        return {key: clean(name) for key, name in zip(keys, saved_names, strict=True)}, False
    if any(isinstance(key, str) for key in keys):
        return {key: clean(str(key)) for key in keys}, False
    return {key: str(number) for number, key in enumerate(keys)}, bool(keys)


def _get_list(group: Mapping[str, Any], key: str) -> Sequence[Any]:
    values = group.get(key, [])
    if not isinstance(values, list | tuple):
        raise CorruptCheckpointError(f"{key!r} in a group of the optimizer is not a list")
    return values


def _parse_flattened(node: Mapping[str, Any], clean: Clean, budget: ReadBudget) -> ParsedOptimizer:
    """Parse ``state.FQN.name`` and ``param_groups.FQN.setting``. Parameters with equal settings get into one group.

    For example, ``state.fc.weight.exp_avg`` is the state ``exp_avg`` of ``fc.weight``.
    """
    budget.spend(_PARAMETER * len(node))
    settings_by_param, states = (
        _clean_names(_iterate_parameters(node, section), clean, section) for section in (GROUPS, STATE)
    )
    groups: dict[Any, list[tuple[dict[str, Any], list[str]]]] = {}
    for name, settings in settings_by_param.items():
        candidates = groups.setdefault(_settings_key(settings), [])
        budget.spend(len(settings) * len(candidates))
        params = next((params for other, params in candidates if other == settings), None)
        if params is None:
            candidates.append((settings, params := []))
        params.append(name)
    return ParsedOptimizer(
        [OptimizerGroup(None, params, settings) for candidates in groups.values() for settings, params in candidates],
        states,
    )


def _clean_names(
    entries: Iterator[tuple[str, dict[str, Any]]], clean: Clean, section: str
) -> dict[str, dict[str, Any]]:
    """Return the states or settings of each parameter by its name without wrapper prefixes."""
    return index_by_name((((section, name), entry) for name, entry in entries), lambda path: clean(path[-1]))


def _settings_key(settings: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return a hashable key that is equal for equal settings, and rarely for others, so that few must be compared."""
    return tuple((name, value if has_safe_hash(value) else None) for name, value in sorted(settings.items()))


def _iterate_parameters(node: Mapping[str, Any], section: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each parameter in one section of a flattened state dict, with its states or settings."""
    entries: dict[str, dict[str, Any]] = {}
    for key, value in node.items():
        prefix, _, entry_name = key.rpartition(".")
        if key.startswith(f"{section}."):
            entries.setdefault(prefix.removeprefix(f"{section}."), {})[entry_name] = value
    yield from entries.items()


def merge_optimizers(optimizers: Sequence[ParsedOptimizer]) -> ParsedOptimizer | None:
    """Return several optimizers as one, or ``None`` if two of them have a parameter of the same name.

    If parameters are identified by number, the number of their optimizer is put before it: for example, ``1.0`` is the
    first parameter of the second optimizer.
    """
    if len(optimizers) == 1:
        return optimizers[0]
    by_number = any(optimizer.by_number for optimizer in optimizers)
    if by_number:
        optimizers = [_prefix_names(optimizer, f"{number}.") for number, optimizer in enumerate(optimizers)]
    params = [name for optimizer in optimizers for name in optimizer.params]
    if len(set(params)) != len(params):
        return None
    groups = [group for optimizer in optimizers for group in optimizer.groups]
    states = {name: states for optimizer in optimizers for name, states in optimizer.states.items()}
    own = [entry for optimizer in optimizers for entry in optimizer.own]
    return ParsedOptimizer(groups, states, by_number, own=own)


def _prefix_names(optimizer: ParsedOptimizer, prefix: str) -> ParsedOptimizer:
    groups = [replace(group, params=[prefix + name for name in group.params]) for group in optimizer.groups]
    states = {prefix + name: states for name, states in optimizer.states.items()}
    own = [{**entry, _PARAMS: [prefix + name for name in entry[_PARAMS]]} for entry in optimizer.own]
    return ParsedOptimizer(groups, states, by_number=True, own=own)
