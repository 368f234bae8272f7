"""Index files: JSON files that map tensors, or optimizer states, to the files next to them.

Readers of Hugging Face's layout and of ColossalAI read indexes so, on each rank that opens such a folder, and commands
look for faults in one process (:mod:`rankless.formats.sharded.find_shard_faults`). :func:`files_named_by` says which
files of an earlier save a save of components replaces, on rank 0, and which file of a model a reader opens,
Accelerate's too (:mod:`rankless.formats.sharded.model_files`). A name in an index must not lead out of the folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from rankless.errors import CorruptCheckpointError, FormatError, UnsafeNameError
from rankless.formats.contained_paths import check_contained
from rankless.ondisk.validation import check_relative_path
from rankless.process.prepared_types import prepared
from rankless.storage.store import store_of


@prepared
class ShardIndex(msgspec.Struct, frozen=True):
    """The contents of an index.

    ``weight_map`` maps each name to its file. In indexes of ColossalAI's optimizers, ``metadata`` also names the file
    of the parameter groups. The names of the attributes are keys in the file, which other systems write.
    """

    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}

    @property
    def groups_file(self) -> str | None:
        """The file of an optimizer's parameter groups, or ``None``."""
        name = self.metadata.get("param_groups")
        return name if isinstance(name, str) else None

    def list_files(self) -> list[str]:
        """Return the names of all files in the index."""
        groups = [] if self.groups_file is None else [self.groups_file]
        return [*dict.fromkeys(self.weight_map.values()), *groups]


def read_index(path: Path, root: Path) -> ShardIndex:
    """Read an index, which must be inside ``root``, the folder that was opened.

    Raises ``CorruptCheckpointError``, or ``UnsafeNameError`` if a name leads out of the folder.
    """
    check_contained(path, root)
    try:
        index = msgspec.json.decode(store_of(path).read_small(path), type=ShardIndex)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"{path} is not a valid index of tensor files: {error}") from error
    for name in index.list_files():
        check_relative_path(name, str(path))
    return index


def two_saves_error(index: Path, single: Path) -> FormatError:
    """Return an error for a folder with an index and a file of all tensors.

    transformers leaves the one when it writes the other, and then loads the single file, which may be the older one.
    """
    return FormatError(
        f"{single} and {index.name} are of two saves, and either may be the older one: remove that one, of an index "
        "also the files that it names"
    )


def files_named_by(folder: Path, names: Iterable[str]) -> set[str]:
    """Return the ``names`` that are in a folder, and the files that the indexes among them name."""
    files: set[str] = set()
    for name in names:
        if store_of(folder).is_file(folder / name):
            files.add(name)
            if name.endswith(".json"):
                files |= _files_in_index(folder / name)
    return files


def _files_in_index(path: Path) -> set[str]:
    try:
        return set(read_index(path, path.parent).list_files())
    except (CorruptCheckpointError, UnsafeNameError):
        return set()
