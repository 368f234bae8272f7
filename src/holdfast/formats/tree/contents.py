"""A tree arranged: groups of tensors by name, and a tree of plain values, as a reader gives them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import CorruptCheckpointError, FormatError
from holdfast.formats.reader import UnreadTensorNote
from holdfast.formats.stored_tensor import StoredTensor, UnreadableTensor, UnreadTensor, is_tensor
from holdfast.formats.tree import detect_components
from holdfast.formats.tree.expanded_size import check_expanded_size
from holdfast.formats.tree.live_tensors import LiveTensors
from holdfast.formats.tree.optimizer_states import ParsedOptimizer, merge_optimizers, parse_optimizer
from holdfast.formats.tree.traversal import (
    LONGEST,
    Path,
    is_extra,
    iterate_leaves,
    join_path,
    path_name,
    rebuild_tree,
    show_path,
    visit_tree,
)
from holdfast.formats.tree.unique_names import index_by_name
from holdfast.ondisk.read_budget import ReadBudget
from holdfast.ondisk.validation import state_key, strip_wrapper_prefixes
from holdfast.ondisk.values import ArrayCodec

#: The group of the tensors that are inside of values.
STATE = "state"

#: Steps for a scheduler, of which there are few.
_SCHEDULER = 32

#: What checkpoints of ours have beside models, optimizers and schedulers, and what is made of these keeps.
_OWN = frozenset({"stateful", "user_content"})

#: What DDP puts before all names of a model.
_DDP = "module."


@dataclass
class TreeContents:
    """What a checkpoint holds: tensors by group and name, further names of some, and values that may hold tensors.

    ``unread`` is what holdfast does not read of it. ``source`` is what it was read from, for
    messages; ``budget`` is spent while it is arranged.
    """

    source: str
    budget: ReadBudget
    groups: dict[str, dict[str, StoredTensor]] = field(default_factory=dict)
    tied: dict[str, dict[str, str]] = field(default_factory=dict)
    tree: dict[str, Any] = field(default_factory=dict)
    inside: dict[object, str] = field(default_factory=dict)
    unread: list[UnreadTensorNote] = field(default_factory=list)
    _numbers: Counter[str] = field(default_factory=Counter)

    def values(self, codec: ArrayCodec) -> dict[str, Any]:
        """The values, with what ``codec`` makes of tensors and of torch's other objects."""
        with _blaming(self.source):
            return dict(rebuild_tree(self.tree, LiveTensors(codec, self.inside, ReadBudget(self.budget.earned))))

    def note(self, path: Path, value: Any) -> None:
        """Take a tensor inside of values into a group of its own, once, by its path."""
        if isinstance(value, UnreadTensor | UnreadableTensor):
            error = value.error if isinstance(value, UnreadTensor) else FormatError
            name = path_name(path[1:], self.budget)
            self.unread.append(UnreadTensorNote(str(path[0]), name, value.why, is_value=True, error=error))
        elif isinstance(value, StoredTensor) and value.identity not in self.inside:
            name = self._name(path)
            self.inside[value.identity] = name
            self.groups.setdefault(STATE, {})[name] = value

    def _name(self, path: Path) -> str:
        """A name that no other tensor inside of values has."""
        whole = path_name(path, self.budget)
        base = whole if len(whole) <= LONGEST else show_path(path)
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
        raise CorruptCheckpointError(f"{source}: its values are nested too deeply") from error
    except (CorruptCheckpointError, FormatError) as error:
        raise type(error)(f"{source}: {error}") from error


def classify_tree(tree: Any, keys: Mapping[str, str], budget: ReadBudget, source: str) -> TreeContents:
    """Put what is in a tree where it belongs; what is of no known kind is ``user_content``.

    ``budget`` is that of the checkpoint, which what the tree was read from has earned; ``source`` goes into messages.

    Raises ``InvalidArgumentError`` for a key that is not there, ``FormatError`` naming two things of one name,
    ``CorruptCheckpointError`` for what contradicts itself.
    """
    with _blaming(source):
        check_expanded_size(tree, budget)
        return _arrange(tree, detect_components.detect_components(tree, keys, budget), TreeContents(source, budget))


def as_user_content(tree: Any, budget: ReadBudget, source: str) -> TreeContents:
    """A tree in which no models and optimizers are looked for: all of it is ``user_content``."""
    contents = TreeContents(source, budget)
    contents.tree["user_content"] = tree
    with _blaming(source):
        check_expanded_size(tree, budget)
        visit_tree(contents.tree, contents.note)
    return contents


def from_components(
    slots: Mapping[str, Any], values: Mapping[str, Any], budget: ReadBudget, source: str
) -> TreeContents:
    """The same for parts whose slots are known: ``model``, ``optimizer``, ``scheduler``. ``values`` stay as such."""
    contents = TreeContents(source, budget)
    with _blaming(source):
        check_expanded_size((dict(slots), dict(values)), budget)
        _arrange(dict(slots), detect_components.ComponentPaths({slot: [(slot,)] for slot in slots}), contents)
        contents.tree |= values
        visit_tree(dict(values), contents.note)
        return contents


def _arrange(tree: Any, found: detect_components.ComponentPaths, contents: TreeContents) -> TreeContents:
    cleaners: dict[str, Callable[[str], str]] = {}
    for slot, paths in found.of("model"):
        cleaners[slot] = _add_model(contents, slot, tree, paths)
    for slot, paths in found.of("optimizer"):
        clean = cleaners.get("model" + slot.removeprefix("optimizer"), strip_wrapper_prefixes)
        _add_optimizers(
            contents,
            slot,
            {path: parse_optimizer(detect_components.value_at(tree, path), clean, contents.budget) for path in paths},
        )
    for slot, paths in found.of("scheduler"):
        part = detect_components.value_at(tree, paths[0])
        states = part if isinstance(part, list) else [part]
        contents.budget.spend(_SCHEDULER * len(states))
        each = [{"class": None, "state": state} for state in states]
        contents.tree[slot] = each[0] if len(each) == 1 else each
    rest = dict(detect_components.without_paths(tree, found.taken())) if found.slots else tree
    contents.tree |= _beside(rest)
    _check_groups(contents)
    visit_tree(contents.tree, contents.note)
    return contents


def _check_groups(contents: TreeContents) -> None:
    """Raise ``FormatError`` where two tensors have one name with their group before it: ``model/ema/w``."""
    if any("/" in group for group in contents.groups):
        every = (((group, name), None) for group, names in contents.groups.items() for name in names)
        index_by_name(every, "/".join)


def _beside(rest: Any) -> dict[str, Any]:
    """What is neither a model, an optimizer nor a scheduler: by the names that we gave it, else all the user's."""
    if isinstance(rest, dict) and rest.keys() <= _OWN and isinstance(rest.get("stateful", {}), dict):
        return dict(rest)
    return {"user_content": rest}


def _add_model(contents: TreeContents, slot: str, tree: Any, paths: list[Path]) -> Callable[[str], str]:
    """Returns what takes wrappers' parts off the names of its parameters."""
    node = (
        detect_components.value_at(tree, paths[0])
        if len(paths) == 1
        else {path[-1]: detect_components.value_at(tree, path) for path in paths}
    )
    if is_tensor(node):
        node = {paths[0][-1]: node}
    named = index_by_name(iterate_leaves(node, contents.budget), lambda path: join_path(path, contents.budget))
    clean = _cleaner(name for name in named if is_tensor(named[name]))
    if len({clean(name) for name in named}) < len(named):
        clean = str
    tensors = contents.groups.setdefault(slot, {})
    known: dict[object, str] = {}
    for name, value in named.items():
        if not is_tensor(value) or is_extra(name):
            contents.tree.setdefault(slot, {})[clean(name)] = value
            continue
        if isinstance(value, UnreadableTensor):
            contents.unread.append(UnreadTensorNote(slot, clean(name), value.why))
            continue
        first = known.setdefault(value.identity, clean(name))
        if first != clean(name) and value.info.nbytes:
            contents.tied.setdefault(slot, {})[clean(name)] = first
        else:
            tensors[clean(name)] = value
    return clean


def _cleaner(names: Iterable[str]) -> Callable[[str], str]:
    if all(strip_wrapper_prefixes(name).startswith(_DDP) for name in names):
        return lambda name: strip_wrapper_prefixes(name).removeprefix(_DDP)
    return strip_wrapper_prefixes


def _add_optimizers(contents: TreeContents, slot: str, found: Mapping[Path, ParsedOptimizer]) -> None:
    for name, one in _parts(slot, found).items():
        tensors = contents.groups.setdefault(name, {})
        for parameter, state, value in one.tensors():
            key = join_path((state_key(parameter, state),), contents.budget)
            if isinstance(value, UnreadableTensor):
                contents.unread.append(UnreadTensorNote(name, key, value.why))
            else:
                tensors[key] = value
        contents.tree[name] = one.values()


def _parts(slot: str, found: Mapping[Path, ParsedOptimizer]) -> Mapping[str, ParsedOptimizer]:
    """Optimizers by their slots: all in one if their parameters have names of their own."""
    whole = merge_optimizers(list(found.values()))
    if whole is not None:
        return {slot: whole}
    return index_by_name(found.items(), lambda path: f"{slot}/{path[-1]}")
