"""Which modules of a model take how much: a summary of thousands of tensors in a few rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from holdfast.ondisk.files import TensorInfo

#: Groups of tensors that lie inside values.
INSIDE = frozenset({"state", "ranks"})

#: A module that holds more than this share of its group says nothing; its parts are shown instead …
_TELLING = 0.9

#: … if they are not more than this.
_MOST = 12


@dataclass(frozen=True, slots=True)
class ModuleSummary:
    """Tensors of one group (``"model"``, ``"optimizer"``) below one module; the whole group where ``name`` is empty."""

    group: str
    name: str
    tensors: int
    nbytes: int


def summarize_modules(groups: Mapping[str, Mapping[str, TensorInfo]]) -> list[ModuleSummary]:
    """Each group as a whole, then its top-level modules, the largest first."""
    found = []
    for group, infos in sorted(groups.items()):
        sizes = [(_module_path(group, name), info.nbytes) for name, info in infos.items()]
        parts = _parts(group, sizes, 1)
        found.append(_total(group, "", sizes))
        found += sorted(parts, key=lambda part: (-part.nbytes, part.name)) if group not in INSIDE else []
    return found


def _module_path(group: str, name: str) -> tuple[str, ...]:
    """An optimizer's tensors are named by their parameter, a slash and the state."""
    return tuple((name.rpartition("/")[0] if group.startswith("optimizer") else name).split("."))


def _parts(group: str, sizes: list[tuple[tuple[str, ...], int]], depth: int) -> list[ModuleSummary]:
    below: dict[tuple[str, ...], list[tuple[tuple[str, ...], int]]] = {}
    for path, nbytes in sizes:
        below.setdefault(path[:depth], []).append((path, nbytes))
    found = []
    everything = sum(nbytes for _, nbytes in sizes)
    for path, inside in below.items():
        whole = _total(group, ".".join(path), inside)
        deeper = []
        if whole.nbytes > _TELLING * everything and all(len(own) > depth + 1 for own, _ in inside):
            deeper = _parts(group, inside, depth + 1)
        found += deeper if 0 < len(deeper) <= _MOST else [whole]
    return found


def _total(group: str, name: str, sizes: Iterable[tuple[tuple[str, ...], int]]) -> ModuleSummary:
    sizes = list(sizes)
    return ModuleSummary(group, name, len(sizes), sum(nbytes for _, nbytes in sizes))
