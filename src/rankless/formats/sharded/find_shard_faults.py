"""Finding all faults of a folder of files with an index: files that are missing, truncated, or left from earlier saves.

ColossalAI writes in place, and writes the index of an asynchronous save before its data. So a crash leaves folders that
look complete, and shards of earlier saves stay.

:mod:`rankless.inspection.inspected_checkpoint` runs it in one process.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rankless.errors import RanklessError
from rankless.formats.sharded.index import ShardIndex, read_index
from rankless.formats.sharded.model_files import MODEL, OPTIMIZER, ModelFile, folders_of, list_model_files
from rankless.formats.sharded.shard_files import merge_states, read_shard
from rankless.formats.stored_tensor import StoredTensor
from rankless.ondisk.read_budget import ReadBudget
from rankless.storage.store import store_of

_SHARD = re.compile(
    r"(pytorch_model|model|pytorch_optim|optimizer)(\.[^-]+)?(-stage-\d{5})?.*-\d{5}\.(bin|safetensors)"
)

#: The folder where pipeline stages write their indexes until these are merged.
_UNMERGED = "tmp_index_files"

_MIB = 2**20

#: How many of the names that are missing from their files are reported.
_SHOWN = 3

#: The identity and the size in bytes of each tensor, by file and name.
_Sizes = dict[str, dict[str, tuple[Hashable, int]]]


@dataclass(frozen=True)
class Inspection:
    """The result of an inspection: ``faults`` prevent loading the checkpoint or a variant of it, ``notes`` do not."""

    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def inspect_shards(path: Path) -> Inspection:
    """Inspect a folder. The result is empty if ``path`` is not a folder, or has no index."""
    folders = folders_of(path) if store_of(path).is_directory(path) else []
    indexes = [file for folder in folders for file in list_model_files(folder) if file.is_index]
    if not indexes:
        return Inspection()
    faults: list[str] = []
    named: set[Path] = set()
    for index_file in indexes:
        try:
            index = read_index(index_file.path, path)
        except RanklessError as error:
            faults.append(str(error))
            continue
        named.update(index_file.path.parent / name for name in index.list_files())
        faults += _find_faults(index_file, index, path)
    for unmerged in (folder / _UNMERGED for folder in folders):
        if store_of(unmerged).is_directory(unmerged):
            faults.append(f"{unmerged} was not removed: a pipeline stage did not finish its save")
    return Inspection(tuple(faults), tuple(note for folder in folders for note in _left_over(folder, named)))


def _left_over(folder: Path, named: set[Path]) -> Iterator[str]:
    for file in store_of(folder).list_files(folder):
        if _SHARD.fullmatch(file.name) and "-of-" not in file.name and file not in named:
            yield f"{file} is in no index: it was left by an earlier save"


def _find_faults(index_file: ModelFile, index: ShardIndex, root: Path) -> Iterator[str]:
    folder = index_file.path.parent
    missing = [name for name in index.list_files() if not store_of(folder).path_exists(folder / name)]
    for name in missing:
        yield f"{folder / name} is missing; {index_file.path.name} names it{_explain_fault(index_file, index)}"
    sizes: _Sizes = {}
    unreadable = False
    for name in dict.fromkeys(index.weight_map.values()):
        try:
            sizes[name] = {} if name in missing else _read_sizes(folder / name, index_file.kind, root)
        except RanklessError as error:
            unreadable = True
            yield f"{error}{_explain_fault(index_file, index)}"
    if not missing and not unreadable:
        yield from _compare_index(index_file, index, sizes)


def _compare_index(index_file: ModelFile, index: ShardIndex, sizes: _Sizes) -> Iterator[str]:
    """Yield differences between the index and the contents of the files, which then are from different saves."""
    absent = [name for name, file in index.weight_map.items() if name not in sizes[file]]
    for name in absent[:_SHOWN]:
        yield f"{index_file.path} says that {index.weight_map[name]} holds {name!r}, but it does not"
    if len(absent) > _SHOWN:
        yield f"and {len(absent) - _SHOWN} more of its names are not in the files that it says"
    total_mib = index.metadata.get("total_size")
    if index_file.kind == MODEL and isinstance(total_mib, float) and not absent:
        stored = [(file, *sizes[file][name]) for name, file in index.weight_map.items()]
        # Some of ColossalAI's plugins count tied weights once, others under each name.
        totals = [sum(nbytes for *_, nbytes in stored), sum(nbytes for *_, nbytes in dict.fromkeys(stored))]
        if all(abs(total_mib * _MIB - total) > 1 for total in totals):
            yield (
                f"{index_file.path} gives a total size of {total_mib:.3f} MiB, but its tensors have "
                f"{totals[0] / _MIB:.3f} MiB: index and files may be from different saves"
            )


def _read_sizes(path: Path, kind: str, root: Path) -> dict[str, tuple[Hashable, int]]:
    """Return the identity and size in bytes of each tensor in a file; of an optimizer, the number of each parameter."""
    tree = read_shard(path, root, ReadBudget()).tree
    if kind == OPTIMIZER:
        return {str(number): (number, 0) for number in merge_states({path: tree})}
    return {
        name: (value.identity, value.info.nbytes) for name, value in tree.items() if isinstance(value, StoredTensor)
    }


def _explain_fault(index_file: ModelFile, index: ShardIndex) -> str:
    is_async = index_file.form == "safetensors" and not any("-of-" in name for name in index.list_files())
    return ": an asynchronous save, which writes its index first, did not finish" if is_async else ""
