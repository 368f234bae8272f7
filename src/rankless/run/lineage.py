"""The place of one checkpoint in the history of its run: the job that saved it, and the one that abandoned it.

``rankless show`` calls it, in one process.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from rankless.run.catalog import cached_checkpoints
from rankless.run.history_tree import Incarnation, build_trees
from rankless.run.stored_history import read_entries


class Lineage(msgspec.Struct, frozen=True):
    """The place of a checkpoint in the history of its run.

    ``abandoned_by`` is ``None`` if the checkpoint is current, or if it is unknown.
    """

    is_current: bool
    saved_by: Incarnation
    abandoned_by: Incarnation | None


def find_lineage(path: Path, checkpoint_id: str, incarnation: int) -> Lineage | None:
    """Return the lineage of the checkpoint at a path; ``None`` if it is in no run directory with a history.

    Raises ``StorageError`` if the history cannot be read now.
    """
    entries = read_entries(path.parent, {incarnation}).entries
    infos = cached_checkpoints(path.parent) if entries else []
    info = next((info for info in infos if (info.path.name, info.id) == (path.name, checkpoint_id)), None)
    if info is None:
        return None
    tree = next(tree for tree in build_trees(entries, infos) if tree.run == info.run)
    return Lineage(info.is_current, tree.by_number[info.incarnation], tree.find_abandoning(info))
