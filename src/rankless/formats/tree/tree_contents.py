"""The contents of a checkpoint that is a tree: groups of named tensors, and a tree of values, as readers need them.

Readers of files of torch, DCP, DeepSpeed, Megatron, NxD, ColossalAI and Accelerate make one each, on each rank or
process that opens such a checkpoint. Names of tensors must be equal on all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rankless.errors import CorruptCheckpointError, FormatError
from rankless.formats.reader import UnreadTensorNote
from rankless.formats.stored_tensor import StoredTensor, UnreadableTensor, UnreadTensor, is_tensor
from rankless.formats.tree import detect_components
from rankless.formats.tree.expanded_size import check_expanded_size
from rankless.formats.tree.leaf_decoder import LeafDecoder
from rankless.formats.tree.optimizer_states import ParsedOptimizer, list_names, merge_optimizers, parse_optimizer
from rankless.formats.tree.tree_traversal import (
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
from rankless.formats.tree.unique_names import index_by_name
from rankless.ondisk.read_budget import ReadBudget
from rankless.ondisk.validation import state_key
from rankless.ondisk.value_files import OWN_STATE
from rankless.ondisk.values import ORDER_SUFFIX, ArrayCodec
from rankless.ondisk.wrapper_prefixes import wrapper_cleaner

#: The group of the tensors inside of values.
STATE = "state"

#: Units of work for a scheduler. There are few of them.
_SCHEDULER = 32

#: The keys of rankless's own values beyond models, optimizers and schedulers; converted checkpoints keep them.
_RANKLESS_KEYS = frozenset({"stateful", "user_content"})

#: The prefix that DDP adds to all names of a model.
_DDP = "module."


@dataclass
class TreeContents:
    """The tensors and values of a checkpoint.

    Attributes:
        source: The name of the file or folder, for messages.
        budget: The budget that sorting the contents is charged to.
        groups: The tensors by group and name.
        tied: The further names of tied tensors by group: ``{tied name: stored name}``.
        tree: The values, which may hold tensors.
        names_in_state: The names in the group ``state`` of the tensors inside of values, by identity.
        unread: The tensors and values that rankless cannot read.
    """

    source: str
    budget: ReadBudget
    groups: dict[str, dict[str, StoredTensor]] = field(default_factory=dict)
    tied: dict[str, dict[str, str]] = field(default_factory=dict)
    tree: dict[str, Any] = field(default_factory=dict)
    names_in_state: dict[object, str] = field(default_factory=dict)
    unread: list[UnreadTensorNote] = field(default_factory=list)
    _numbers: Counter[str] = field(default_factory=Counter)

    def decode_values(self, codec: ArrayCodec) -> dict[str, Any]:
        """Return the values, with tensors and torch's other objects decoded by ``codec``."""
        with _prefix_errors(self.source):
            return dict(
                rebuild_tree(self.tree, LeafDecoder(codec, self.names_in_state, ReadBudget(self.budget.earned)))
            )

    def add_state_tensor(self, path: Path, value: Any) -> None:
        """Add a tensor inside of values to the group ``state``, once, with a name made of its path."""
        if isinstance(value, UnreadTensor | UnreadableTensor):
            error = value.error if isinstance(value, UnreadTensor) else FormatError
            name = path_name(path[1:], self.budget)
            self.unread.append(UnreadTensorNote(str(path[0]), name, value.why, is_value=True, error=error))
        elif isinstance(value, StoredTensor) and value.identity not in self.names_in_state:
            name = self._unique_name(path, _order_suffix(value) if str(path[0]).startswith("optimizer") else "")
            self.names_in_state[value.identity] = name
            self.groups.setdefault(STATE, {})[name] = value

    def add_user_content(self, added: Mapping[Any, Any]) -> None:
        """Add values to a dict of user content: those that a key of a component hides."""
        content = self.tree.get("user_content", {})
        if added and isinstance(content, dict):
            self.tree["user_content"] = {**content, **added}
            visit_tree({"user_content": dict(added)}, self.add_state_tensor)

    def _unique_name(self, path: Path, suffix: str) -> str:
        """Return a name, which ends with ``suffix``, that no other tensor inside of values has."""
        full_name = path_name(path, self.budget)
        base = full_name if len(full_name) <= LONGEST else show_path(path)
        while True:
            self._numbers[base] += 1
            number = self._numbers[base]
            name = (f"{base}#{number}" if number > 1 else base) + suffix
            if name not in self.groups.get(STATE, {}):
                return name

    def total_nbytes(self) -> int:
        """Return the size of all tensors in bytes."""
        return sum(stored.info.nbytes for tensors in self.groups.values() for stored in tensors.values())


def _order_suffix(tensor: StoredTensor) -> str:
    """Return the suffix of the name of a tensor in the values of an optimizer, with its order of dimensions."""
    order = tensor.dimension_order
    return "" if order is None else "-".join([ORDER_SUFFIX, *map(str, order)])


@contextmanager
def _prefix_errors(source: str) -> Iterator[None]:
    """Prefix the messages of errors with the name of the file."""
    try:
        yield
    except RecursionError as error:
        raise CorruptCheckpointError(f"{source}: its values are nested too deeply") from error
    except (CorruptCheckpointError, FormatError) as error:
        raise type(error)(f"{source}: {error}") from error


def classify_tree(
    tree: Any, keys: Mapping[str, str], budget: ReadBudget, source: str, schema: detect_components.Schema | None = None
) -> TreeContents:
    """Sort a tree into models, optimizers and schedulers; everything else is ``user_content``.

    Args:
        tree: The tree.
        keys: Components that are not detected, by slot, for example ``{"model": "app.net"}``.
        budget: The budget of the checkpoint. It has the size of the tree's file already.
        source: The name of the file, for messages.
        schema: Where the components of a known system are. No others are searched for then.

    Raises:
        InvalidArgumentError: if one of ``keys`` is not in the tree.
        FormatError: if two tensors or values would get the same name.
        CorruptCheckpointError: if the tree contradicts itself.
    """
    with _prefix_errors(source):
        check_expanded_size(tree, budget)
        return _collect_components(
            tree, detect_components.detect_components(tree, keys, budget, schema), TreeContents(source, budget)
        )


def as_user_content(tree: Any, budget: ReadBudget, source: str) -> TreeContents:
    """Return the contents of a tree as ``user_content``, without detecting models and optimizers in it."""
    contents = TreeContents(source, budget)
    contents.tree["user_content"] = tree
    with _prefix_errors(source):
        check_expanded_size(tree, budget)
        visit_tree(contents.tree, contents.add_state_tensor)
    return contents


def from_components(
    slots: Mapping[str, Any], values: Mapping[str, Any], budget: ReadBudget, source: str
) -> TreeContents:
    """Return the contents of components with known slots, such as ``model``, ``optimizer`` and ``scheduler``.

    ``values`` are added to the tree of values as they are.
    """
    contents = TreeContents(source, budget)
    with _prefix_errors(source):
        check_expanded_size((dict(slots), dict(values)), budget)
        _collect_components(
            dict(slots), detect_components.ComponentPaths({slot: [(slot,)] for slot in slots}), contents
        )
        contents.tree |= values
        visit_tree(dict(values), contents.add_state_tensor)
        return contents


def _collect_components(
    tree: Any, components: detect_components.ComponentPaths, contents: TreeContents
) -> TreeContents:
    cleaners: dict[str, Callable[[str], str]] = {}
    for slot, paths in components.list_kind("model"):
        cleaners[slot] = _add_model(contents, slot, tree, paths)
    for slot, paths in components.list_kind("optimizer"):
        nodes = {path: detect_components.value_at(tree, path) for path in paths}
        model = "model" + slot.removeprefix("optimizer")
        known = {*contents.groups.get(model, ()), *contents.tied.get(model, ())}
        _add_optimizers(
            contents,
            slot,
            {
                path: parse_optimizer(node, _choose_names(node, cleaners.get(model), known), contents.budget)
                for path, node in nodes.items()
            },
        )
    for slot, paths in components.list_kind("scheduler"):
        value = detect_components.value_at(tree, paths[0])
        states = value if isinstance(value, list) else [value]
        contents.budget.spend(_SCHEDULER * len(states))
        schedulers = [{"class": None, "state": state} for state in states]
        contents.tree[slot] = schedulers[0] if len(schedulers) == 1 else schedulers
    remaining = dict(detect_components.without_paths(tree, components.assigned_paths())) if components.slots else tree
    contents.tree |= _remaining_values(remaining)
    _check_groups(contents)
    visit_tree(contents.tree, contents.add_state_tensor)
    return contents


def _check_groups(contents: TreeContents) -> None:
    """Raise ``FormatError`` if two tensors have the same name with their group as prefix.

    For example, ``ema/w`` in the group ``model`` and ``w`` in the group ``model/ema`` are both ``model/ema/w``.
    """
    if any("/" in group for group in contents.groups):
        entries = (((group, name), None) for group, names in contents.groups.items() for name in names)
        index_by_name(entries, "/".join)


def _remaining_values(remaining: Any) -> dict[str, Any]:
    """Return the values outside of all components, as user content unless they have rankless's own keys."""
    has_own_keys = isinstance(remaining, dict) and remaining.keys() <= _RANKLESS_KEYS
    if has_own_keys and isinstance(remaining.get("stateful", {}), dict):
        return dict(remaining)
    return {"user_content": remaining}


def _add_model(contents: TreeContents, slot: str, tree: Any, paths: list[Path]) -> Callable[[str], str]:
    """Add a model, and return the function that strips wrapper prefixes from the names of its parameters."""
    node = (
        detect_components.value_at(tree, paths[0])
        if len(paths) == 1
        else {path[-1]: detect_components.value_at(tree, path) for path in paths}
    )
    if is_tensor(node):
        node = {paths[0][-1]: node}
    named = index_by_name(iterate_leaves(node, contents.budget), lambda path: join_path(path, contents.budget))
    clean = _choose_cleaner(named, [name for name in named if is_tensor(named[name])])
    if len({clean(name) for name in named}) < len(named):
        clean = str
    tensors = contents.groups.setdefault(slot, {})
    name_by_identity: dict[object, str] = {}
    for name, value in named.items():
        if not is_tensor(value) or is_extra(name):
            contents.tree.setdefault(slot, {})[clean(name)] = value
            continue
        if isinstance(value, UnreadableTensor):
            contents.unread.append(UnreadTensorNote(slot, clean(name), value.why))
            continue
        stored_name = name_by_identity.setdefault(value.identity, clean(name))
        if stored_name != clean(name) and value.info.nbytes:
            contents.tied.setdefault(slot, {})[clean(name)] = stored_name
        else:
            tensors[clean(name)] = value
    return clean


def _choose_cleaner(names: Collection[str], tensor_names: Iterable[str]) -> Callable[[str], str]:
    clean = wrapper_cleaner(names)
    if all(clean(name).startswith(_DDP) for name in tensor_names):
        return lambda name: clean(name).removeprefix(_DDP)
    return clean


def _choose_names(
    node: Mapping[Any, Any], of_model: Callable[[str], str] | None, known: Collection[str]
) -> Callable[[str], str]:
    """Return the function that strips wrapper prefixes from the names of an optimizer's parameters.

    An optimizer may have been made before its model was wrapped. So its own names tell more than the model's, if they
    become ``known`` ones. With the parameters that are not trained they may tell less.
    """
    names = list_names(node)
    own = wrapper_cleaner(names)
    return own if of_model is None or (names and all(own(name) in known for name in names)) else of_model


def _add_optimizers(contents: TreeContents, slot: str, optimizers: Mapping[Path, ParsedOptimizer]) -> None:
    for name, optimizer in _optimizers_by_slot(slot, optimizers).items():
        tensors = contents.groups.setdefault(name, {})
        for parameter, state, value in optimizer.iterate_tensors():
            key = join_path((state_key(parameter, state),), contents.budget)
            if isinstance(value, UnreadableTensor):
                contents.unread.append(UnreadTensorNote(name, key, value.why))
            else:
                tensors[key] = value
        contents.tree[name] = optimizer.to_values()
        visit_tree({name: {OWN_STATE: list(optimizer.own)}}, contents.add_state_tensor)


def _optimizers_by_slot(slot: str, optimizers: Mapping[Path, ParsedOptimizer]) -> Mapping[str, ParsedOptimizer]:
    """Return optimizers by slot: merged into one, unless two of them have a parameter of the same name."""
    merged = merge_optimizers(list(optimizers.values()))
    if merged is not None:
        return {slot: merged}
    return index_by_name(optimizers.items(), lambda path: f"{slot}/{path[-1]}")
