"""What is wrong with a folder of files with an index, all of it: what is missing, cut short, or left over.

ColossalAI writes in place, and an index of an asynchronous save before its data, so that a crash leaves folders that
look complete; and it leaves shards of earlier saves behind.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.formats.sharded.index import ShardIndex, read_index
from holdfast.formats.sharded.model_files import MODEL, OPTIMIZER, ModelFile, folders_of, list_model_files
from holdfast.formats.sharded.shards import read_shard, state_entries
from holdfast.formats.stored_tensor import StoredTensor
from holdfast.ondisk.read_budget import ReadBudget
from holdfast.storage import posix

_SHARD = re.compile(
    r"(pytorch_model|model|pytorch_optim|optimizer)(\.[^-]+)?(-stage-\d{5})?.*-\d{5}\.(bin|safetensors)"
)

#: Where stages of a pipeline keep their parts of an index until these are merged.
_UNMERGED = "tmp_index_files"

_MIB = 2**20

#: How many names are told that are not where an index says.
_SHOWN = 3

#: What each file holds.
_Sizes = dict[str, dict[str, tuple[Hashable, int]]]


@dataclass(frozen=True)
class Inspection:
    """``faults`` keep the checkpoint, or a variant of it, from being loaded; ``notes`` do not."""

    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def inspect_shards(path: Path) -> Inspection:
    """Look at a folder. Nothing is said of what is no folder, or has no index."""
    folders = folders_of(path) if posix.is_directory(path) else []
    indexes = [found for folder in folders for found in list_model_files(folder) if found.is_index]
    if not indexes:
        return Inspection()
    faults: list[str] = []
    named: set[Path] = set()
    for found in indexes:
        try:
            index = read_index(found.path, path)
        except HoldfastError as error:
            faults.append(str(error))
            continue
        named.update(found.path.parent / name for name in index.files())
        faults += _faults(found, index, path)
    for unmerged in (folder / _UNMERGED for folder in folders):
        if posix.is_directory(unmerged):
            faults.append(f"{unmerged} is left: stages of a pipeline did not finish their save")
    return Inspection(tuple(faults), tuple(note for folder in folders for note in _left_over(folder, named)))


def _left_over(folder: Path, named: set[Path]) -> Iterator[str]:
    for file in posix.list_files(folder):
        if _SHARD.fullmatch(file.name) and "-of-" not in file.name and file not in named:
            yield f"{file} is named by no index: an earlier save left it"


def _faults(found: ModelFile, index: ShardIndex, root: Path) -> Iterator[str]:
    folder = found.path.parent
    missing = [name for name in index.files() if not posix.path_exists(folder / name)]
    for name in missing:
        yield f"{folder / name} is missing; {found.path.name} names it{_why(found, index)}"
    sizes: _Sizes = {}
    unreadable = False
    for name in dict.fromkeys(index.weight_map.values()):
        try:
            sizes[name] = {} if name in missing else _sizes(folder / name, found.kind, root)
        except HoldfastError as error:
            unreadable = True
            yield f"{error}{_why(found, index)}"
    if not missing and not unreadable:
        yield from _differences(found, index, sizes)


def _differences(found: ModelFile, index: ShardIndex, sizes: _Sizes) -> Iterator[str]:
    """Where the index tells of other contents than the files have: they are of different saves."""
    absent = [name for name, file in index.weight_map.items() if name not in sizes[file]]
    for name in absent[:_SHOWN]:
        yield f"{found.path} says that {name!r} is in {index.weight_map[name]}, where it is not"
    if len(absent) > _SHOWN:
        yield f"and {len(absent) - _SHOWN} more of its names are not where it says"
    total = index.metadata.get("total_size")
    if found.kind == MODEL and isinstance(total, float) and not absent:
        held = [(file, *sizes[file][name]) for name, file in index.weight_map.items()]
        # Tied weights are counted once by some of its plugins, under each name by others.
        wholes = [sum(nbytes for *_, nbytes in held), sum(nbytes for *_, nbytes in dict.fromkeys(held))]
        if all(abs(total * _MIB - whole) > 1 for whole in wholes):
            yield (
                f"{found.path} tells of {total:.3f} MiB, its files hold {wholes[0] / _MIB:.3f} of what it names: they "
                "may be of different saves"
            )


def _sizes(path: Path, kind: str, root: Path) -> dict[str, tuple[Hashable, int]]:
    """What tells each tensor of a file from others, and its bytes; of an optimizer, each parameter's number."""
    tree = read_shard(path, root, ReadBudget()).tree
    if kind == OPTIMIZER:
        return {str(number): (number, 0) for number in state_entries([tree])}
    return {name: (one.identity, one.info.nbytes) for name, one in tree.items() if isinstance(one, StoredTensor)}


def _why(found: ModelFile, index: ShardIndex) -> str:
    asynchronous = found.form == "safetensors" and not any("-of-" in name for name in index.files())
    return ": an asynchronous save, which writes its index first, was cut short" if asynchronous else ""
