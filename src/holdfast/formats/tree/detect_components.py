"""Which part of a checkpoint's tree is what: told by names that people use, and by what a part looks like."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import InvalidArgumentError
from holdfast.formats.stored_tensor import is_tensor
from holdfast.formats.tree.classify import TreeClassifier
from holdfast.formats.tree.traversal import Path, iterate_leaves
from holdfast.formats.tree.unique_names import find_collision
from holdfast.ondisk.read_budget import ReadBudget

#: What people call the state of a model, and that of a scheduler.
_MODELS = frozenset({"model", "model_state", "model_state_dict", "module", "state_dict"})
_SCHEDULERS = frozenset(
    {
        *("lr_scheduler", "lr_schedulers", "sched", "scheduler", "schedulers"),
        *("lr_scheduler_state_dict", "scheduler_state", "scheduler_state_dict"),
    }
)

#: Optimizers that are parts of one, by their numbers: as Lightning calls them.
_NUMBERED = re.compile(r"optimizer_\d{1,4}")

#: How many levels down an application's state is looked for: ``{"app": {"model": …}}``.
_LEVELS = 3

_KINDS = ("model", "optimizer", "scheduler")


@dataclass
class ComponentPaths:
    """Where the parts are in a tree, by the slot they are for: ``model``, ``model/ema``, ``optimizer``, ``scheduler``.

    A slot may have several parts: optimizers of one model, and the tensors of a model among other things. Parts that
    are there ``again`` have no slot.
    """

    slots: dict[str, list[Path]] = field(default_factory=dict)
    again: set[Path] = field(default_factory=set)

    def has(self, kind: str) -> bool:
        """Whether there is a part of a kind."""
        return any(slot.partition("/")[0] == kind for slot in self.slots)

    def of(self, kind: str) -> Iterator[tuple[str, list[Path]]]:
        """The parts of a kind by their slots."""
        return ((slot, paths) for slot, paths in self.slots.items() if slot.partition("/")[0] == kind)

    def taken(self) -> set[Path]:
        """All that has a slot, or is what has one."""
        return self.again | {path for paths in self.slots.values() for path in paths}


def value_at(tree: Any, path: Path) -> Any:
    """What is at a path."""
    for part in path:
        tree = tree[part]
    return tree


def detect_components(tree: Any, keys: Mapping[str, str], budget: ReadBudget) -> ComponentPaths:
    """The parts of a tree. ``keys`` names some by their slot: ``{"model": "app.net"}``.

    Raises ``InvalidArgumentError`` where there is nothing at such a key.
    """
    return _Finder(budget).find(tree, keys)


def _resolve(tree: Any, key: str) -> Path | None:
    """The path of a key such as ``app.net``; keys may have dots themselves."""
    if not key:
        return ()
    if not isinstance(tree, dict):
        return None
    if key in tree:
        return (key,)
    for dot in (match.start() for match in re.finditer(r"\.", key)):
        rest = _resolve(tree.get(key[:dot]), key[dot + 1 :])
        if rest:
            return (key[:dot], *rest)
    return None


class _Finder:
    """Looks for parts. What was seen of a dict is remembered, as others may look at it again."""

    def __init__(self, budget: ReadBudget) -> None:
        self._budget, self._looks = budget, TreeClassifier(budget)

    def find(self, tree: Any, keys: Mapping[str, str]) -> ComponentPaths:
        """See :func:`detect_components`."""
        found = ComponentPaths({slot: self._asked(tree, slot, key) for slot, key in keys.items()})
        if isinstance(tree, dict):
            self._look(tree, (), found)
        return found

    def _asked(self, tree: Any, slot: str, key: str) -> list[Path]:
        path = _resolve(tree, key)
        paths = [] if path is None else [path]
        if path is not None and slot.startswith("optimizer"):
            paths = self._optimizers(value_at(tree, path), path)
        if paths == [()]:
            paths = _direct(tree, ()) if slot.startswith("model") else paths
        if not paths or slot.partition("/")[0] not in _KINDS:
            there = ", ".join(str(one) for one in list(tree)[:20]) if isinstance(tree, dict) else "no keys at all"
            raise InvalidArgumentError(f"keys: there is no {slot} at {key!r}; the checkpoint has {there}")
        return paths

    def _look(self, node: dict[Any, Any], path: Path, found: ComponentPaths) -> None:
        """Look for what was not asked for by its key: here, and where there is nothing, further down."""
        looks = self._looks
        if looks.is_optimizer(node):
            found.slots.setdefault("optimizer", [path])
            return
        taken = found.taken()
        rest = {key: value for key, value in node.items() if (*path, key) not in taken}
        optimizers = {key: paths for key, value in rest.items() if (paths := self._optimizers(value, (*path, key)))}
        rest = {key: value for key, value in rest.items() if key not in optimizers}
        named = {key: [(*path, key)] for key, value in rest.items() if key in _MODELS and looks.tensors(value)}
        again = [key for key in named if self._is_again(key, named, rest)]
        found.again |= {(*path, key) for key in again}
        named, rest = ({key: one for key, one in table.items() if key not in again} for table in (named, rest))
        _fill(found, "scheduler", {key: [(*path, key)] for key, value in rest.items() if _is_scheduler(key, value)})
        below = [key for key, value in rest.items() if isinstance(value, dict) and value]
        if not optimizers and not named and len(path) < _LEVELS:
            inside = [key for key in below if self._has_parts(rest[key])]
            if len(inside) == 1:
                self._look(rest[inside[0]], (*path, inside[0]), found)
                return
        _fill(found, "optimizer", _joined(optimizers))
        _fill(found, "model", named or self._unnamed(rest, path))

    def _is_again(self, key: Any, named: Mapping[Any, Any], node: Mapping[Any, Any]) -> bool:
        """Whether a model is one that came before it, under a second name: for those who look for either."""
        before = list(named)[: list(named).index(key)]
        return any(self._identities(node[other]) == self._identities(node[key]) for other in before)

    def _identities(self, node: dict[Any, Any]) -> list[tuple[Path, Any]]:
        return [(path, getattr(leaf, "identity", leaf)) for path, leaf in iterate_leaves(node, self._budget)]

    def _has_parts(self, node: Mapping[Any, Any]) -> bool:
        is_optimizer = self._looks.is_optimizer
        return any(is_optimizer(value) or (key in _MODELS and isinstance(value, dict)) for key, value in node.items())

    def _optimizers(self, value: Any, path: Path) -> list[Path]:
        """The optimizers that a value is: one, or a list of some."""
        if self._looks.is_optimizer(value):
            return [path]
        return [(*path, number) for number in range(len(value))] if self._looks.are_optimizers(value) else []

    def _unnamed(self, rest: Mapping[Any, Any], path: Path) -> dict[Any, list[Path]]:
        """The tensors right here, or what looks like a model's state: whichever has more tensors."""
        looks = self._looks
        sizes = {
            key: looks.tensors(value)
            for key, value in rest.items()
            if key not in _SCHEDULERS and looks.tensors(value) and looks.is_state(value)
        }
        direct = _direct(rest, path)
        if len(direct) > sum(sizes.values()):
            return {"model": direct}
        return {key: [(*path, key)] for key in sizes}


def _fill(found: ComponentPaths, kind: str, parts: Mapping[Any, list[Path]]) -> None:
    """Several are told apart by their names; one is just what it is."""
    if found.has(kind):
        return
    slots: dict[str, list[Path]] = {}
    for key, paths in parts.items():
        slot = f"{kind}/{key}" if len(parts) > 1 else kind
        if slot in slots:
            raise find_collision(slot, slots[slot][0], paths[0])
        slots[slot] = paths
    found.slots.update(slots)


def _joined(optimizers: dict[Any, list[Path]]) -> dict[Any, list[Path]]:
    """Those that are called by numbers together, in their order."""
    if len(optimizers) > 1 and all(isinstance(key, str) and _NUMBERED.fullmatch(key) for key in optimizers):
        ordered = sorted(optimizers, key=lambda key: int(key.rpartition("_")[2]))
        return {"optimizer": [path for key in ordered for path in optimizers[key]]}
    return optimizers


def _is_scheduler(key: Any, value: Any) -> bool:
    if key not in _SCHEDULERS or not value:
        return False
    return isinstance(value, dict) or (isinstance(value, list) and all(isinstance(one, dict) for one in value))


def _direct(node: Any, path: Path) -> list[Path]:
    """The tensors right in a dict."""
    return [(*path, key) for key, value in node.items() if is_tensor(value)] if isinstance(node, dict) else []


def without_paths(tree: Mapping[Any, Any], taken: set[Path], path: Path = ()) -> Iterator[tuple[Any, Any]]:
    """What is left of a dict, by key, when some parts of it are taken out."""
    above = {part[: len(path) + 1] for part in taken if part[: len(path)] == path}
    for key, value in tree.items():
        here = (*path, key)
        if here not in above:
            yield key, value
        elif here not in taken and isinstance(value, dict) and (rest := dict(without_paths(value, taken, here))):
            yield key, rest
