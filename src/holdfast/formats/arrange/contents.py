"""A tree arranged: groups of tensors by name, and a tree of plain values, as a reader gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from holdfast.errors import DamagedError, FormatError
from holdfast.formats.arrange import roles
from holdfast.formats.arrange.optimizers import Optimizer, parse, together
from holdfast.formats.arrange.stored import Stored, Unreadable, is_tensor
from holdfast.formats.arrange.trees import Budget, Path, is_extra, join, leaves, rebuilt, show
from holdfast.formats.pickles import arrays
from holdfast.formats.torchfile.objects import Device, Dtype, Layout, Size
from holdfast.layout.names import state_key, unwrapped
from holdfast.layout.values import ArrayCodec

#: The group of the tensors that are inside of values.
STATE = "state"

#: Steps for each byte that a tree was read from, and at least: each value is walked past a few times.
_STEPS, _LEAST = 16, 100_000

#: What checkpoints of ours have beside models, optimizers and schedulers, and what is made of these keeps.
_OWN = frozenset({"stateful", "user_content"})

#: What DDP puts before all names of a model.
_DDP = "module."


@dataclass
class Contents:
    """What a checkpoint holds: tensors by group and name, further names of some, and values that may hold tensors.

    ``source`` is what it was read from, for messages; it takes at most ``steps`` to walk through the values.
    """

    source: str
    steps: int
    groups: dict[str, dict[str, Stored]] = field(default_factory=dict)
    tied: dict[str, dict[str, str]] = field(default_factory=dict)
    tree: dict[str, Any] = field(default_factory=dict)
    inside: dict[object, str] = field(default_factory=dict)

    def values(self, codec: ArrayCodec) -> dict[str, Any]:
        """The values, with what ``codec`` makes of tensors and of torch's other objects."""
        with _blaming(self.source):
            return dict(rebuilt(self.tree, partial(_given, codec, self.inside), Budget(self.steps)))

    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(stored.info.nbytes for tensors in self.groups.values() for stored in tensors.values())


@contextmanager
def _blaming(source: str) -> Iterator[None]:
    """Errors name the file."""
    try:
        yield
    except RecursionError as error:
        raise DamagedError(f"{source}: its values are nested too deeply") from error
    except (DamagedError, FormatError) as error:
        raise type(error)(f"{source}: {error}") from error


def arrange(tree: Any, keys: Mapping[str, str], nbytes: int, source: str) -> Contents:
    """Put what is in a tree where it belongs; what is of no known kind is ``user_content``.

    ``nbytes`` is what the tree was read from, and so how much there can be in it; ``source`` goes into messages.

    Raises ``InvalidArgumentError`` for a key that is not there, ``FormatError`` naming a tensor that cannot be read,
    ``DamagedError`` for what contradicts itself.
    """
    steps = _STEPS * nbytes + _LEAST
    budget = Budget(steps)
    with _blaming(source):
        return _arrange(tree, roles.find(tree, keys, budget), Contents(source, steps), budget)


def kept(tree: Any, nbytes: int, source: str) -> Contents:
    """A tree in which no models and optimizers are looked for: all of it is ``user_content``."""
    contents = Contents(source, _STEPS * nbytes + _LEAST)
    contents.tree["user_content"] = tree
    budget = Budget(contents.steps)
    with _blaming(source):
        rebuilt(contents.tree, partial(_note, contents, budget), budget)
    return contents


def assembled(slots: Mapping[str, Any], values: Mapping[str, Any], nbytes: int, source: str) -> Contents:
    """The same for parts whose slots are known: ``model``, ``optimizer``, ``scheduler``. ``values`` stay as such."""
    steps = _STEPS * nbytes + _LEAST
    budget, contents = Budget(steps), Contents(source, steps)
    with _blaming(source):
        _arrange(dict(slots), roles.Roles({slot: [(slot,)] for slot in slots}), contents, budget)
        contents.tree |= values
        rebuilt(dict(values), partial(_note, contents, budget), budget)
        return contents


def _arrange(tree: Any, found: roles.Roles, contents: Contents, budget: Budget) -> Contents:
    cleaners: dict[str, Callable[[str], str]] = {}
    for slot, paths in found.of("model"):
        cleaners[slot] = _add_model(contents, slot, tree, paths, budget)
    for slot, paths in found.of("optimizer"):
        clean = cleaners.get("model" + slot.removeprefix("optimizer"), unwrapped)
        _add_optimizers(contents, slot, {path: parse(roles.at(tree, path), clean) for path in paths}, budget)
    for slot, paths in found.of("scheduler"):
        states = roles.at(tree, paths[0])
        each = [{"class": None, "state": state} for state in (states if isinstance(states, list) else [states])]
        contents.tree[slot] = each[0] if len(each) == 1 else each
    rest = dict(roles.without(tree, found.taken())) if found.slots else tree
    contents.tree |= _beside(rest)
    rebuilt(contents.tree, partial(_note, contents, budget), budget)
    return contents


def _beside(rest: Any) -> dict[str, Any]:
    """What is neither a model, an optimizer nor a scheduler: by the names that we gave it, else all the user's."""
    if isinstance(rest, dict) and rest.keys() <= _OWN and isinstance(rest.get("stateful", {}), dict):
        return dict(rest)
    return {"user_content": rest}


def _add_model(contents: Contents, slot: str, tree: Any, paths: list[Path], budget: Budget) -> Callable[[str], str]:
    """Returns what takes wrappers' parts off the names of its parameters."""
    node = roles.at(tree, paths[0]) if len(paths) == 1 else {path[-1]: roles.at(tree, path) for path in paths}
    if is_tensor(node):
        node = {paths[0][-1]: node}
    named = {join(path, budget): value for path, value in leaves(node, budget)}
    clean = _cleaner(name for name in named if is_tensor(named[name]))
    if len({clean(name) for name in named}) < len(named):
        clean = str
    tensors = contents.groups.setdefault(slot, {})
    known: dict[object, str] = {}
    for name, value in named.items():
        if not is_tensor(value) or is_extra(name):
            contents.tree.setdefault(slot, {})[clean(name)] = value
            continue
        stored = _readable(value, name)
        first = known.setdefault(stored.identity, clean(name))
        if first != clean(name) and stored.info.nbytes:
            contents.tied.setdefault(slot, {})[clean(name)] = first
        else:
            tensors[clean(name)] = stored
    return clean


def _cleaner(names: Iterable[str]) -> Callable[[str], str]:
    if all(unwrapped(name).startswith(_DDP) for name in names):
        return lambda name: unwrapped(name).removeprefix(_DDP)
    return unwrapped


def _add_optimizers(contents: Contents, slot: str, found: Mapping[Path, Optimizer], budget: Budget) -> None:
    whole = together(list(found.values()))
    parts = {slot: whole} if whole is not None else {f"{slot}/{path[-1]}": one for path, one in found.items()}
    for name, one in parts.items():
        tensors = contents.groups.setdefault(name, {})
        for parameter, state, value in one.tensors():
            key = join((state_key(parameter, state),), budget)
            tensors[key] = _readable(value, key)
        contents.tree[name] = one.values()


def _readable(value: Any, name: str) -> Stored:
    if isinstance(value, Unreadable):
        raise FormatError(f"tensor {name!r} {value.why}")
    if not isinstance(value, Stored):
        raise DamagedError(f"{name!r} is no tensor")
    return value


def _note(contents: Contents, budget: Budget, path: Path, value: Any) -> None:
    """Take the tensors inside of values into a group of their own, each once, by their paths."""
    if not is_tensor(value):
        return
    stored = _readable(value, show(path))
    if stored.identity in contents.inside:
        return
    group = contents.groups.setdefault(STATE, {})
    name = base = show(path)
    budget.spend(len(path))
    number = 1
    while name in group:
        number += 1
        name = f"{base}#{number}"
    contents.inside[stored.identity] = name
    group[name] = stored


def _given(codec: ArrayCodec, inside: Mapping[object, str], path: Path, value: Any) -> Any:
    """What a value becomes that is neither plain nor a container."""
    if isinstance(value, Stored):
        return codec.decode("$tensor", inside[value.identity])
    if isinstance(value, Size):
        return codec.decode("$size", list(value))
    if isinstance(value, Dtype):
        return codec.decode("$dtype", value.name)
    if isinstance(value, Device):
        return codec.decode("$device", value.text)
    if isinstance(value, Layout):
        return value.text
    try:
        if arrays.is_array(value):
            return arrays.make(value)
    except (TypeError, ValueError) as error:
        raise FormatError(f"{show(path)} is {error}") from error
    raise FormatError(f"{show(path)} holds {getattr(value, 'name', type(value).__name__)}, which is no plain value")
