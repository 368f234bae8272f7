"""Indexes: JSON files that say which tensor, or which optimizer state, lies in which file beside them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import CorruptCheckpointError, UnsafeNameError
from holdfast.formats.contained_paths import check_contained
from holdfast.ondisk.validation import check_relative_path
from holdfast.storage import posix


class ShardIndex(msgspec.Struct, frozen=True):
    """``weight_map`` gives the file of each name; ColossalAI's optimizers have a file of groups in ``metadata``."""

    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}

    @property
    def groups_file(self) -> str | None:
        """The file of an optimizer's parameter groups."""
        name = self.metadata.get("param_groups")
        return name if isinstance(name, str) else None

    def files(self) -> list[str]:
        """All files that it names."""
        groups = [] if self.groups_file is None else [self.groups_file]
        return [*dict.fromkeys(self.weight_map.values()), *groups]


def read_index(path: Path, root: Path) -> ShardIndex:
    """Read one. Raises ``CorruptCheckpointError``, or ``UnsafeNameError`` for a name that leads out of the folder.

    ``root`` is the folder that was opened, in which the index itself must be.
    """
    check_contained(path, root)
    try:
        index = msgspec.json.decode(posix.read_small(path), type=ShardIndex)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"{path} is no index of weights: {error}") from error
    for name in index.files():
        check_relative_path(name, str(path))
    return index


def files_named_by(folder: Path, names: Iterable[str]) -> set[str]:
    """Those of some names that are in a folder, and the files that they name where they are indexes."""
    found: set[str] = set()
    for name in names:
        if posix.is_file(folder / name):
            found.add(name)
            if name.endswith(".json"):
                found |= _files_of(folder / name)
    return found


def _files_of(path: Path) -> set[str]:
    try:
        return set(read_index(path, path.parent).files())
    except (CorruptCheckpointError, UnsafeNameError):
        return set()
