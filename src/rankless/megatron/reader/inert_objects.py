"""Objects of Megatron's classes in pickles, which are never made: they become plain text or dicts.

The readers of iterations pass the allow-list when they open pickles, on each rank. No class of Megatron may be
imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rankless.formats.pickles.builtin_types import BYTES_IO, plain_record
from rankless.formats.pickles.numpy_arrays import is_array
from rankless.formats.pickles.unpickler import AllowedCallable, OpaqueObject
from rankless.formats.torchfile.allowed_globals import NAMES
from rankless.formats.tree.expanded_size import check_expanded_size
from rankless.formats.tree.tree_traversal import rebuild_tree
from rankless.ondisk.read_budget import ReadBudget

#: The packages with classes and functions that stand for themselves: they are named, and never imported or called.
_PACKAGES = ("megatron.", "nemo.", "signal.", "transformer_engine.")

#: Attributes of a namespace of the standard library.
_SIMPLE = "types.SimpleNamespace"

#: Types of arguments that are written as text.
_SCALARS = (str, int, float, bool, type(None))


class MegatronGlobals(Mapping[str, object]):
    """The allow-list of Megatron's files: the one of torch's files, and all names of a few packages as inert ones."""

    def __getitem__(self, name: str) -> object:
        if name in NAMES:
            return NAMES[name]
        if not self._is_inert(name):
            raise KeyError(name)
        return AllowedCallable(name, plain_record(name))

    def __contains__(self, name: object) -> bool:
        return name in NAMES or self._is_inert(name)

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)

    @staticmethod
    def _is_inert(name: object) -> bool:
        return isinstance(name, str) and (name.startswith(_PACKAGES) or name == _SIMPLE)


#: The allow-list of Megatron's files.
MEGATRON_NAMES: Mapping[str, object] = MegatronGlobals()


def make_plain(tree: Any, budget: ReadBudget) -> Any:
    """Return a tree with plain values for Megatron's objects: texts for members of enumerations, else dicts."""
    check_expanded_size(tree, budget)
    return rebuild_tree(tree, lambda _, leaf: _make_leaf_plain(leaf))


def _make_leaf_plain(leaf: Any) -> Any:
    if isinstance(leaf, AllowedCallable):
        return leaf.name
    if not isinstance(leaf, OpaqueObject) or is_array(leaf) or leaf.name == BYTES_IO:
        return leaf
    if leaf.state is None and all(isinstance(value, _SCALARS) for value in leaf.args):
        return f"{leaf.name}({', '.join(map(repr, leaf.args))})"
    args = rebuild_tree(list(leaf.args), lambda _, inner: _make_leaf_plain(inner))
    state = rebuild_tree(leaf.state, lambda _, inner: _make_leaf_plain(inner))
    return {"class": leaf.name, "args": args, "state": state}
