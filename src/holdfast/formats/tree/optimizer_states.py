"""The state of optimizers in the forms that torch gives it, taken apart: tensors by parameter and state, and groups.

Parameters are known by number (``ParsedOptimizer.state_dict``) or by name (``get_optimizer_state_dict``, also flattened).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.errors import CorruptCheckpointError
from holdfast.formats.stored_tensor import is_tensor
from holdfast.formats.tree.traversal import check_keys
from holdfast.formats.tree.unique_names import find_collision, index_by_name, index_by_text
from holdfast.ondisk.hash_limits import is_safe
from holdfast.ondisk.param_order import BY_NUMBER, ORDERED
from holdfast.ondisk.read_budget import ReadBudget

#: The two parts of an optimizer's state dict, and what the names of a flattened one begin with.
STATE, GROUPS = "state", "param_groups"

#: What a group says of its parameters; all else is a setting.
_PARAMS, _NAMES = "params", "param_names"

#: Steps for a parameter, or for a state or setting of one.
_PARAMETER = 4

#: Takes wrappers' parts off the name of a parameter.
Clean = Callable[[str], str]


@dataclass(frozen=True)
class OptimizerGroup:
    """Parameters that are trained alike; ``number`` is ``None`` where nobody kept which were in one group."""

    number: int | None
    params: Sequence[str]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class ParsedOptimizer:
    """One optimizer: its groups, and the states of its parameters by name.

    With ``by_number`` the parameters have no names: they are known by their number, counted over all groups. ``kind``
    is its class, where that was saved.
    """

    groups: Sequence[OptimizerGroup]
    states: Mapping[str, Mapping[str, Any]]
    by_number: bool = False
    kind: str | None = None

    @property
    def params(self) -> list[str]:
        """Its parameters."""
        return [name for group in self.groups for name in group.params]

    def tensors(self) -> Iterator[tuple[str, str, Any]]:
        """The tensors in the states, with parameter and state."""
        for name, states in self.states.items():
            yield from ((name, state, value) for state, value in states.items() if is_tensor(value))

    def values(self) -> dict[str, Any]:
        """All else, as ``state.json`` has it."""
        plain = {
            name: {state: value for state, value in states.items() if not is_tensor(value)}
            for name, states in self.states.items()
        }
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
        return {"groups": groups, BY_NUMBER: True} if self.by_number else {"groups": groups}


def is_flattened(node: Mapping[Any, Any]) -> bool:
    """Whether a dict has the names of a flattened state of an optimizer."""
    prefixes = {key.partition(".")[0] if isinstance(key, str) and "." in key else None for key in node}
    return GROUPS in prefixes and prefixes <= {STATE, GROUPS}


def parse_optimizer(node: Mapping[str, Any], clean: Clean, budget: ReadBudget) -> ParsedOptimizer:
    """Take the state of an optimizer apart. Raises ``CorruptCheckpointError`` where it contradicts itself.

    Raises ``FormatError`` where two parameters, or two states or settings of one, would get the same name.
    """
    found = _parse_flattened(node, clean, budget) if is_flattened(node) else _parse(node, clean, budget)
    params = set(found.params)
    if len(params) != len(found.params):
        raise CorruptCheckpointError("the optimizer has one parameter twice in its groups")
    beyond = next((name for name in found.states if name not in params), None)
    if beyond is not None:
        raise CorruptCheckpointError(f"the optimizer has a state of {beyond[:100]!r}, which is in none of its groups")
    return found


def _parse(node: Mapping[str, Any], clean: Clean, budget: ReadBudget) -> ParsedOptimizer:
    budget.spend(_PARAMETER * sum(len(_listed(group, _PARAMS)) + len(group) for group in node[GROUPS]))
    names, by_number = _names(node[GROUPS], clean)
    groups = [
        OptimizerGroup(number, [names[key] for key in _listed(group, _PARAMS)], _settings(group, (GROUPS, number)))
        for number, group in enumerate(node[GROUPS])
    ]
    texts = {str(key): name for key, name in names.items()}  # DCP makes text of numbers
    states: dict[str, dict[str, Any]] = {}
    keys: dict[str, Any] = {}
    for key, own in node.get(STATE, {}).items():
        if not isinstance(own, dict):
            raise CorruptCheckpointError(f"the optimizer's state of {str(key)[:100]!r} has no names")
        budget.spend(_PARAMETER * (1 + len(own)))
        name = texts.get(str(key), str(key))
        if name in states:
            raise find_collision(name, (STATE, keys[name]), (STATE, key))
        keys[name], states[name] = key, index_by_text(own, (STATE, key))
    kind = node.get("class")
    return ParsedOptimizer(groups, states, by_number, kind if isinstance(kind, str) else None)


def _settings(group: Mapping[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    return index_by_text({key: value for key, value in group.items() if key not in {_PARAMS, _NAMES}}, path)


def _names(groups: Sequence[Mapping[str, Any]], clean: Clean) -> tuple[dict[str | int, str], bool]:
    """What each parameter is called, by what the groups call it; and whether that is only a number."""
    keys = [key for group in groups for key in _listed(group, _PARAMS)]
    if not all(type(key) in {int, str} for key in keys):
        raise CorruptCheckpointError("the optimizer's groups list what is neither a name nor a number of a parameter")
    check_keys(keys)
    kept = [name for group in groups for name in _listed(group, _NAMES)]
    if len(kept) == len(keys) and all(isinstance(name, str) for name in kept):
        return {key: clean(name) for key, name in zip(keys, kept, strict=True)}, False
    if any(isinstance(key, str) for key in keys):
        return {key: clean(str(key)) for key in keys}, False
    return {key: str(number) for number, key in enumerate(keys)}, bool(keys)


def _listed(group: Mapping[str, Any], key: str) -> Sequence[Any]:
    found = group.get(key, [])
    if not isinstance(found, list | tuple):
        raise CorruptCheckpointError(f"a group of the optimizer has no list as its {key!r}")
    return found


def _parse_flattened(node: Mapping[str, Any], clean: Clean, budget: ReadBudget) -> ParsedOptimizer:
    """``state.FQN.name`` and ``param_groups.FQN.setting``: which parameters were in one group is not kept."""
    budget.spend(_PARAMETER * len(node))
    settings, states = (_cleaned(_below(node, part), clean, part) for part in (GROUPS, STATE))
    groups: dict[Any, list[tuple[dict[str, Any], list[str]]]] = {}
    for name, own in settings.items():
        alike = groups.setdefault(_likeness(own), [])
        budget.spend(len(own) * len(alike))
        params = next((params for other, params in alike if other == own), None)
        if params is None:
            alike.append((own, params := []))
        params.append(name)
    return ParsedOptimizer(
        [OptimizerGroup(None, params, own) for alike in groups.values() for own, params in alike], states
    )


def _cleaned(found: Iterator[tuple[str, dict[str, Any]]], clean: Clean, part: str) -> dict[str, dict[str, Any]]:
    """What is known of each parameter by its name without wrappers' parts."""
    return index_by_name((((part, name), own) for name, own in found), lambda path: clean(path[-1]))


def _likeness(settings: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Equal for equal settings, and for few others: so that not all have to be compared."""
    return tuple((name, value if is_safe(value) else None) for name, value in sorted(settings.items()))


def _below(node: Mapping[str, Any], part: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is known of each parameter in one part of a flattened state."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in node.items():
        whole, _, what = key.rpartition(".")
        if key.startswith(f"{part}."):
            found.setdefault(whole.removeprefix(f"{part}."), {})[what] = value
    yield from found.items()


def merge_optimizers(found: Sequence[ParsedOptimizer]) -> ParsedOptimizer | None:
    """Several optimizers as parts of one; ``None`` where two have parameters of one name.

    Numbers of parameters get the number of their optimizer before them: ``1.0``.
    """
    if len(found) == 1:
        return found[0]
    by_number = any(one.by_number for one in found)
    parts = [_numbered(one, f"{number}.") for number, one in enumerate(found)] if by_number else found
    params = [name for one in parts for name in one.params]
    if len(set(params)) != len(params):
        return None
    groups = [group for one in parts for group in one.groups]
    return ParsedOptimizer(groups, {name: states for one in parts for name, states in one.states.items()}, by_number)


def _numbered(one: ParsedOptimizer, prefix: str) -> ParsedOptimizer:
    groups = [replace(group, params=[prefix + name for name in group.params]) for group in one.groups]
    return ParsedOptimizer(groups, {prefix + name: states for name, states in one.states.items()}, by_number=True)
