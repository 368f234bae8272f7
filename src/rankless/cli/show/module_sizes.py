"""The sizes of the modules of a model: a summary of thousands of tensors in a few rows.

:mod:`rankless.cli.show.show_command` calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rankless.inspection.folding import fold_names, name_pattern
from rankless.inspection.inspected_checkpoint import VALUE_GROUPS
from rankless.ondisk.data_files import TensorInfo

#: If a module has more than this share of its group, its submodules are shown instead …
_DOMINANT_SHARE = 0.9

#: … unless there are more of them than this.
_MAX_SUBMODULES = 12


@dataclass(frozen=True, slots=True)
class ModuleSummary:
    """The tensors of a group (``"model"``, ``"optimizer"``) in one module. An empty ``name`` is the whole group."""

    group: str
    name: str
    tensors: int
    nbytes: int


def summarize_modules(groups: Mapping[str, Mapping[str, TensorInfo]], depth: int | None = None) -> list[ModuleSummary]:
    """Summarize each group as a whole, followed by its modules, the largest first.

    Modules have names with ``depth`` components, or fewer; by default the top-level ones count, or the modules inside
    of one that has almost everything. For example, ``layers.0`` has two components.
    """
    summaries = []
    for group, infos in sorted(groups.items()):
        sizes = [(_module_path(group, name), info.nbytes) for name, info in infos.items()]
        modules = _split_modules(group, sizes, 1) if depth is None else _modules_at(group, sizes, depth)
        summaries.append(_summarize_tensors(group, "", sizes))
        if group not in VALUE_GROUPS:
            summaries += sorted(modules, key=lambda module: (-module.nbytes, module.name))
    return summaries


def fold_modules(modules: Sequence[ModuleSummary]) -> list[ModuleSummary]:
    """Replace modules of equal sizes, with names that differ only in numbers, by one that stands for all of them."""
    rows: dict[tuple[str, str, int, int], list[ModuleSummary]] = {}
    for module in modules:
        rows.setdefault((module.group, name_pattern(module.name), module.tensors, module.nbytes), []).append(module)
    folded = []
    for (group, _, tensors, nbytes), row in rows.items():
        name = fold_names([module.name for module in row])
        together = ModuleSummary(group, name or "", tensors * len(row), nbytes * len(row))
        folded += row if name is None else [together]
    return folded


def _module_path(group: str, name: str) -> tuple[str, ...]:
    """Return the module path of a tensor. Optimizer tensors are named ``parameter/state``.

    For example, ``layers.0.weight/exp_avg`` of an optimizer has the path of ``layers.0.weight``.
    """
    return tuple((name.rpartition("/")[0] if group.startswith("optimizer") else name).split("."))


def _modules_at(group: str, sizes: list[tuple[tuple[str, ...], int]], depth: int) -> list[ModuleSummary]:
    inside: dict[str, list[tuple[tuple[str, ...], int]]] = {}
    for path, nbytes in sizes if depth else []:
        inside.setdefault(".".join(path[:depth]), []).append((path, nbytes))
    return [_summarize_tensors(group, name, tensors) for name, tensors in inside.items()]


def _split_modules(group: str, sizes: list[tuple[tuple[str, ...], int]], depth: int) -> list[ModuleSummary]:
    below: dict[tuple[str, ...], list[tuple[tuple[str, ...], int]]] = {}
    for path, nbytes in sizes:
        below.setdefault(path[:depth], []).append((path, nbytes))
    summaries = []
    total = sum(nbytes for _, nbytes in sizes)
    for path, inside in below.items():
        whole = _summarize_tensors(group, ".".join(path), inside)
        deeper = []
        if whole.nbytes > _DOMINANT_SHARE * total and all(len(tensor_path) > depth + 1 for tensor_path, _ in inside):
            deeper = _split_modules(group, inside, depth + 1)
        summaries += deeper if 0 < len(deeper) <= _MAX_SUBMODULES else [whole]
    return summaries


def _summarize_tensors(group: str, name: str, sizes: Iterable[tuple[tuple[str, ...], int]]) -> ModuleSummary:
    sizes = list(sizes)
    return ModuleSummary(group, name, len(sizes), sum(nbytes for _, nbytes in sizes))
