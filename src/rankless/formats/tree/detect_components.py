"""Detection of the models, optimizers and schedulers in a checkpoint's tree, by common key names and by structure.

:mod:`rankless.formats.tree.tree_contents` calls it when a checkpoint of another system is opened, on each rank. All
ranks must find the same components: the result depends on the tree and the keys alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rankless.errors import InvalidArgumentError
from rankless.formats.stored_tensor import is_tensor
from rankless.formats.tree.classify import TreeClassifier
from rankless.formats.tree.tree_traversal import Path, iterate_leaves
from rankless.formats.tree.unique_names import collision_error
from rankless.ondisk.read_budget import ReadBudget

#: Common keys of the state of a model, and of a scheduler.
_MODELS = frozenset({"model", "model_state", "model_state_dict", "module", "state_dict"})
_SCHEDULERS = frozenset(
    {
        *("lr_scheduler", "lr_schedulers", "sched", "scheduler", "schedulers"),
        *("lr_scheduler_state_dict", "scheduler_state", "scheduler_state_dict"),
    }
)

#: Keys of optimizers that belong together, as Lightning numbers them.
_NUMBERED = re.compile(r"optimizer_\d{1,4}")

#: How many levels down components are searched: ``{"app": {"model": …}}``.
_LEVELS = 3

_KINDS = ("model", "optimizer", "scheduler")


@dataclass
class ComponentPaths:
    """The paths of components in a tree, by slot: ``model``, ``model/ema``, ``optimizer``, ``scheduler``.

    A slot may have several paths: the optimizers of one model, or the tensors of a model among other values.
    ``duplicates`` are the paths of models that are in the tree a second time under another key; they have no slot.
    """

    slots: dict[str, list[Path]] = field(default_factory=dict)
    duplicates: set[Path] = field(default_factory=set)

    def has_kind(self, kind: str) -> bool:
        """Return whether there is a component of a kind."""
        return any(slot.partition("/")[0] == kind for slot in self.slots)

    def list_kind(self, kind: str) -> Iterator[tuple[str, list[Path]]]:
        """Return the slots of a kind, each with its paths."""
        return ((slot, paths) for slot, paths in self.slots.items() if slot.partition("/")[0] == kind)

    def assigned_paths(self) -> set[Path]:
        """Return the paths of all slots, and of the duplicates."""
        return self.duplicates | {path for paths in self.slots.values() for path in paths}


def value_at(tree: Any, path: Path) -> Any:
    """Return the value at a path."""
    for part in path:
        tree = tree[part]
    return tree


@dataclass(frozen=True)
class Schema:
    """The keys of a known system's components at the top of a tree, by kind.

    If a key's value has another structure than its kind requires, the key is no component. Of several models the first
    counts, and the others must be the same tensors; several optimizers belong to one model, in their order.
    """

    model: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()
    scheduler: tuple[str, ...] = ()


def detect_components(
    tree: Any, keys: Mapping[str, str], budget: ReadBudget, schema: Schema | None = None
) -> ComponentPaths:
    """Return the components of a tree. ``keys`` names some by slot: ``{"model": "app.net"}``.

    With a ``schema`` nothing else is searched for. Raises ``InvalidArgumentError`` if one of ``keys`` is not in the
    tree.
    """
    return _ComponentFinder(budget).find_components(tree, keys, schema)


def _resolve_key(tree: Any, key: str) -> Path | None:
    """Return the path of a key such as ``app.net``, or ``None``. Keys of the tree may themselves have dots."""
    if not key:
        return ()
    if not isinstance(tree, dict):
        return None
    if key in tree:
        return (key,)
    for dot in (match.start() for match in re.finditer(r"\.", key)):
        inner_path = _resolve_key(tree.get(key[:dot]), key[dot + 1 :])
        if inner_path:
            return (key[:dot], *inner_path)
    return None


class _ComponentFinder:
    """A search for components. The classifier caches its results, because dicts are examined several times."""

    def __init__(self, budget: ReadBudget) -> None:
        self._budget, self._classifier = budget, TreeClassifier(budget)

    def find_components(self, tree: Any, keys: Mapping[str, str], schema: Schema | None) -> ComponentPaths:
        """See :func:`detect_components`."""
        components = ComponentPaths({slot: self._find_by_key(tree, slot, key) for slot, key in keys.items()})
        if isinstance(tree, dict) and schema is not None:
            self._take_known(tree, schema, components)
        elif isinstance(tree, dict):
            self._search_node(tree, (), components)
        return components

    def _take_known(self, tree: dict[Any, Any], schema: Schema, components: ComponentPaths) -> None:
        """Add the components at the keys of a schema."""
        assigned = components.assigned_paths()
        values = {key: value for key, value in tree.items() if (key,) not in assigned}
        models = {key: [(key,)] for key in schema.model if isinstance(values.get(key), dict)}
        duplicates = [key for key in models if self._is_duplicate(key, models, values)]
        components.duplicates |= {(key,) for key in duplicates}
        models = {key: paths for key, paths in models.items() if key not in duplicates}
        optimizers = [
            path for key in schema.optimizer if key in values for path in self._list_optimizers(values[key], (key,))
        ]
        schedulers = {key: [(key,)] for key in schema.scheduler if _is_scheduler(key, values.get(key))}
        _add_slots(components, "model", dict([*models.items()][:1]))
        _add_slots(components, "optimizer", {"optimizer": optimizers} if optimizers else {})
        _add_slots(components, "scheduler", schedulers)

    def _find_by_key(self, tree: Any, slot: str, key: str) -> list[Path]:
        path = _resolve_key(tree, key)
        paths = [] if path is None else [path]
        if path is not None and slot.startswith("optimizer"):
            paths = self._list_optimizers(value_at(tree, path), path)
        if paths == [()]:
            paths = _list_tensors(tree, ()) if slot.startswith("model") else paths
        if not paths or slot.partition("/")[0] not in _KINDS:
            existing = ", ".join(str(key) for key in list(tree)[:20]) if isinstance(tree, dict) else "no keys at all"
            raise InvalidArgumentError(f"keys: there is no {slot} at {key!r}; the checkpoint has {existing}")
        return paths

    def _search_node(self, node: dict[Any, Any], path: Path, components: ComponentPaths) -> None:
        """Search a dict for components that ``keys`` did not name; if it has none, search the dict below it."""
        classifier = self._classifier
        if classifier.is_optimizer(node):
            components.slots.setdefault("optimizer", [path])
            return
        assigned = components.assigned_paths()
        remaining = {key: value for key, value in node.items() if (*path, key) not in assigned}
        optimizers = {
            key: paths for key, value in remaining.items() if (paths := self._list_optimizers(value, (*path, key)))
        }
        remaining = {key: value for key, value in remaining.items() if key not in optimizers}
        models = {
            key: [(*path, key)]
            for key, value in remaining.items()
            if key in _MODELS and classifier.count_tensors(value)
        }
        duplicates = [key for key in models if self._is_duplicate(key, models, remaining)]
        components.duplicates |= {(*path, key) for key in duplicates}
        models = {key: paths for key, paths in models.items() if key not in duplicates}
        remaining = {key: value for key, value in remaining.items() if key not in duplicates}
        schedulers = {key: [(*path, key)] for key, value in remaining.items() if _is_scheduler(key, value)}
        _add_slots(components, "scheduler", schedulers)
        if not optimizers and not models and len(path) < _LEVELS:
            inner_keys = [
                key
                for key, value in remaining.items()
                if isinstance(value, dict) and value and self._has_components(value)
            ]
            if len(inner_keys) == 1:
                self._search_node(remaining[inner_keys[0]], (*path, inner_keys[0]), components)
                return
        _add_slots(components, "optimizer", _group_numbered(optimizers))
        _add_slots(components, "model", models or self._find_unnamed_models(remaining, path))

    def _is_duplicate(self, key: Any, models: Mapping[Any, Any], node: Mapping[Any, Any]) -> bool:
        """Return whether a model is the same as an earlier one: some files have one model under two common keys."""
        earlier = list(models)[: list(models).index(key)]
        return any(self._leaf_identities(node[other]) == self._leaf_identities(node[key]) for other in earlier)

    def _leaf_identities(self, node: dict[Any, Any]) -> list[tuple[Path, Any]]:
        return [(path, getattr(leaf, "identity", leaf)) for path, leaf in iterate_leaves(node, self._budget)]

    def _has_components(self, node: Mapping[Any, Any]) -> bool:
        is_optimizer = self._classifier.is_optimizer
        return any(is_optimizer(value) or (key in _MODELS and isinstance(value, dict)) for key, value in node.items())

    def _list_optimizers(self, value: Any, path: Path) -> list[Path]:
        """Return the paths of the optimizers in a value that is an optimizer or a list of optimizers."""
        if self._classifier.is_optimizer(value):
            return [path]
        return [(*path, number) for number in range(len(value))] if self._classifier.are_optimizers(value) else []

    def _find_unnamed_models(self, node: Mapping[Any, Any], path: Path) -> dict[Any, list[Path]]:
        """Return models under other keys: the dict's own tensors, or its state dicts, whichever have more tensors."""
        classifier = self._classifier
        tensor_counts = {
            key: classifier.count_tensors(value)
            for key, value in node.items()
            if key not in _SCHEDULERS and classifier.count_tensors(value) and classifier.is_state(value)
        }
        own_tensors = _list_tensors(node, path)
        if len(own_tensors) > sum(tensor_counts.values()):
            return {"model": own_tensors}
        return {key: [(*path, key)] for key in tensor_counts}


def _add_slots(components: ComponentPaths, kind: str, paths_by_key: Mapping[Any, list[Path]]) -> None:
    """Add the slots of a kind, if it has none yet: ``model``, or ``model/<key>`` if there are several."""
    if components.has_kind(kind):
        return
    slots: dict[str, list[Path]] = {}
    for key, paths in paths_by_key.items():
        slot = f"{kind}/{key}" if len(paths_by_key) > 1 else kind
        if slot in slots:
            raise collision_error(slot, slots[slot][0], paths[0])
        slots[slot] = paths
    components.slots.update(slots)


def _group_numbered(optimizers: dict[Any, list[Path]]) -> dict[Any, list[Path]]:
    """Return the optimizers with numbered keys as one, in the order of their numbers; others as they are."""
    if len(optimizers) > 1 and all(isinstance(key, str) and _NUMBERED.fullmatch(key) for key in optimizers):
        ordered = sorted(optimizers, key=lambda key: int(key.rpartition("_")[2]))
        return {"optimizer": [path for key in ordered for path in optimizers[key]]}
    return optimizers


def _is_scheduler(key: Any, value: Any) -> bool:
    if key not in _SCHEDULERS or not value:
        return False
    return isinstance(value, dict) or (isinstance(value, list) and all(isinstance(state, dict) for state in value))


def _list_tensors(node: Any, path: Path) -> list[Path]:
    """Return the paths of the tensors that are entries of a dict."""
    return [(*path, key) for key, value in node.items() if is_tensor(value)] if isinstance(node, dict) else []


def without_paths(tree: Mapping[Any, Any], removed: set[Path], path: Path = ()) -> Iterator[tuple[Any, Any]]:
    """Yield the entries of a dict without the values at the paths ``removed``. ``path`` is the path of the dict."""
    if path in removed:  # the whole tree is one component
        return
    prefixes = {removed_path[: len(path) + 1] for removed_path in removed if removed_path[: len(path)] == path}
    for key, value in tree.items():
        here = (*path, key)
        if here not in prefixes:
            yield key, value
        elif here not in removed and isinstance(value, dict) and (kept := dict(without_paths(value, removed, here))):
            yield key, kept
