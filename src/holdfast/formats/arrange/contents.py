"""A tree arranged: groups of tensors by name, and a tree of plain values, as a reader gives them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import DamagedError, FormatError
from holdfast.formats.arrange import roles
from holdfast.formats.arrange.given import Given
from holdfast.formats.arrange.naming import by_name
from holdfast.formats.arrange.optimizers import Optimizer, parse, together
from holdfast.formats.arrange.scales import weigh
from holdfast.formats.arrange.stored import Stored, Unread, Unreadable, is_tensor
from holdfast.formats.arrange.trees import LONGEST, Path, is_extra, join, leaves, name_of, rebuilt, show, visit
from holdfast.formats.reader import NotRead
from holdfast.layout.budget import Budget
from holdfast.layout.names import state_key, unwrapped
from holdfast.layout.values import ArrayCodec

#: The group of the tensors that are inside of values.
STATE = "state"

#: Steps for a scheduler, of which there are few.
_SCHEDULER = 32

#: What checkpoints of ours have beside models, optimizers and schedulers, and what is made of these keeps.
_OWN = frozenset({"stateful", "user_content"})

#: What DDP puts before all names of a model.
_DDP = "module."


@dataclass
class Contents:
    """What a checkpoint holds: tensors by group and name, further names of some, and values that may hold tensors.

    ``unread`` is what holdfast does not read of it. ``source`` is what it was read from, for
    messages; ``budget`` is spent while it is arranged.
    """

    source: str
    budget: Budget
    groups: dict[str, dict[str, Stored]] = field(default_factory=dict)
    tied: dict[str, dict[str, str]] = field(default_factory=dict)
    tree: dict[str, Any] = field(default_factory=dict)
    inside: dict[object, str] = field(default_factory=dict)
    unread: list[NotRead] = field(default_factory=list)
    _numbers: Counter[str] = field(default_factory=Counter)

    def values(self, codec: ArrayCodec) -> dict[str, Any]:
        """The values, with what ``codec`` makes of tensors and of torch's other objects."""
        with _blaming(self.source):
            return dict(rebuilt(self.tree, Given(codec, self.inside, Budget(self.budget.earned))))

    def note(self, path: Path, value: Any) -> None:
        """Take a tensor inside of values into a group of its own, once, by its path."""
        if isinstance(value, Unread | Unreadable):
            error = value.error if isinstance(value, Unread) else FormatError
            name = name_of(path[1:], self.budget)
            self.unread.append(NotRead(str(path[0]), name, value.why, is_value=True, error=error))
        elif isinstance(value, Stored) and value.identity not in self.inside:
            name = self._name(path)
            self.inside[value.identity] = name
            self.groups.setdefault(STATE, {})[name] = value

    def _name(self, path: Path) -> str:
        """A name that no other tensor inside of values has."""
        whole = name_of(path, self.budget)
        base = whole if len(whole) <= LONGEST else show(path)
        while True:
            self._numbers[base] += 1
            number = self._numbers[base]
            name = f"{base}#{number}" if number > 1 else base
            if name not in self.groups.get(STATE, {}):
                return name

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


def arrange(tree: Any, keys: Mapping[str, str], budget: Budget, source: str) -> Contents:
    """Put what is in a tree where it belongs; what is of no known kind is ``user_content``.

    ``budget`` is that of the checkpoint, which what the tree was read from has earned; ``source`` goes into messages.

    Raises ``InvalidArgumentError`` for a key that is not there, ``FormatError`` naming two things of one name,
    ``DamagedError`` for what contradicts itself.
    """
    with _blaming(source):
        weigh(tree, budget)
        return _arrange(tree, roles.find(tree, keys, budget), Contents(source, budget))


def kept(tree: Any, budget: Budget, source: str) -> Contents:
    """A tree in which no models and optimizers are looked for: all of it is ``user_content``."""
    contents = Contents(source, budget)
    contents.tree["user_content"] = tree
    with _blaming(source):
        weigh(tree, budget)
        visit(contents.tree, contents.note)
    return contents


def assembled(slots: Mapping[str, Any], values: Mapping[str, Any], budget: Budget, source: str) -> Contents:
    """The same for parts whose slots are known: ``model``, ``optimizer``, ``scheduler``. ``values`` stay as such."""
    contents = Contents(source, budget)
    with _blaming(source):
        weigh((dict(slots), dict(values)), budget)
        _arrange(dict(slots), roles.Roles({slot: [(slot,)] for slot in slots}), contents)
        contents.tree |= values
        visit(dict(values), contents.note)
        return contents


def _arrange(tree: Any, found: roles.Roles, contents: Contents) -> Contents:
    cleaners: dict[str, Callable[[str], str]] = {}
    for slot, paths in found.of("model"):
        cleaners[slot] = _add_model(contents, slot, tree, paths)
    for slot, paths in found.of("optimizer"):
        clean = cleaners.get("model" + slot.removeprefix("optimizer"), unwrapped)
        _add_optimizers(contents, slot, {path: parse(roles.at(tree, path), clean, contents.budget) for path in paths})
    for slot, paths in found.of("scheduler"):
        part = roles.at(tree, paths[0])
        states = part if isinstance(part, list) else [part]
        contents.budget.spend(_SCHEDULER * len(states))
        each = [{"class": None, "state": state} for state in states]
        contents.tree[slot] = each[0] if len(each) == 1 else each
    rest = dict(roles.without(tree, found.taken())) if found.slots else tree
    contents.tree |= _beside(rest)
    _check_groups(contents)
    visit(contents.tree, contents.note)
    return contents


def _check_groups(contents: Contents) -> None:
    """Raise ``FormatError`` where two tensors have one name with their group before it: ``model/ema/w``."""
    if any("/" in group for group in contents.groups):
        every = (((group, name), None) for group, names in contents.groups.items() for name in names)
        by_name(every, "/".join)


def _beside(rest: Any) -> dict[str, Any]:
    """What is neither a model, an optimizer nor a scheduler: by the names that we gave it, else all the user's."""
    if isinstance(rest, dict) and rest.keys() <= _OWN and isinstance(rest.get("stateful", {}), dict):
        return dict(rest)
    return {"user_content": rest}


def _add_model(contents: Contents, slot: str, tree: Any, paths: list[Path]) -> Callable[[str], str]:
    """Returns what takes wrappers' parts off the names of its parameters."""
    node = roles.at(tree, paths[0]) if len(paths) == 1 else {path[-1]: roles.at(tree, path) for path in paths}
    if is_tensor(node):
        node = {paths[0][-1]: node}
    named = by_name(leaves(node, contents.budget), lambda path: join(path, contents.budget))
    clean = _cleaner(name for name in named if is_tensor(named[name]))
    if len({clean(name) for name in named}) < len(named):
        clean = str
    tensors = contents.groups.setdefault(slot, {})
    known: dict[object, str] = {}
    for name, value in named.items():
        if not is_tensor(value) or is_extra(name):
            contents.tree.setdefault(slot, {})[clean(name)] = value
            continue
        if isinstance(value, Unreadable):
            contents.unread.append(NotRead(slot, clean(name), value.why))
            continue
        first = known.setdefault(value.identity, clean(name))
        if first != clean(name) and value.info.nbytes:
            contents.tied.setdefault(slot, {})[clean(name)] = first
        else:
            tensors[clean(name)] = value
    return clean


def _cleaner(names: Iterable[str]) -> Callable[[str], str]:
    if all(unwrapped(name).startswith(_DDP) for name in names):
        return lambda name: unwrapped(name).removeprefix(_DDP)
    return unwrapped


def _add_optimizers(contents: Contents, slot: str, found: Mapping[Path, Optimizer]) -> None:
    for name, one in _parts(slot, found).items():
        tensors = contents.groups.setdefault(name, {})
        for parameter, state, value in one.tensors():
            key = join((state_key(parameter, state),), contents.budget)
            if isinstance(value, Unreadable):
                contents.unread.append(NotRead(name, key, value.why))
            else:
                tensors[key] = value
        contents.tree[name] = one.values()


def _parts(slot: str, found: Mapping[Path, Optimizer]) -> Mapping[str, Optimizer]:
    """Optimizers by their slots: all in one if their parameters have names of their own."""
    whole = together(list(found.values()))
    if whole is not None:
        return {slot: whole}
    return by_name(found.items(), lambda path: f"{slot}/{path[-1]}")
