"""Checkpoints that a load found corrupt. They are hidden when the run that continued without them saves again.

No save removes them: ``rankless prune --leftovers`` does. In an object store, a checkpoint without a pointer is hidden.

:mod:`rankless.load.selection` records on rank 0 the checkpoints that a load found corrupt, and all ranks get the
records with its decision. The next saves of the process pass them on, and :mod:`rankless.save.folder_output` and
:mod:`rankless.save.object_publication` use them on rank 0, in the commit and after it. A checkpoint that has changed
since the record must keep its name.

A checkpoint whose tag the save takes is hidden in the same step as the commit: otherwise a tag could stay taken
forever. Nothing is removed, because perhaps only one bit is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from rankless.run.run_store import run_store_of


class CorruptRecord(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint that was found corrupt: its tag, and the state of all its files at that time.

    If a file has changed since, the checkpoint may have been repaired or replaced. In an object store no file changes:
    the state is the checkpoint's id, or "" if that cannot be read.
    """

    tag: str
    state: str

    @classmethod
    def of(cls, run: Path, tag: str, identity: str) -> CorruptRecord:
        """Record the present state of the checkpoint with a tag and an id in a run directory."""
        return cls(tag, run_store_of(run).find_state(tag, identity))

    def is_in(self, folder: Path) -> bool:
        """Return whether a directory holds this checkpoint, unchanged; in an object store, whether the tag does."""
        return run_store_of(folder.parent).has_state(folder, self.state)


def find_corrupt(records: Iterable[CorruptRecord], path: Path, tag: str) -> CorruptRecord | None:
    """Return the record of the checkpoint that has the tag in a run directory, or ``None``."""
    return next((record for record in records if record.tag == tag and record.is_in(path / tag)), None)


def set_aside_corrupt(records: Iterable[CorruptRecord], path: Path, run: str) -> Iterator[Path]:
    """Hide the recorded checkpoints that ``run`` has saved, so that their tags are free. Yield the hidden paths.

    A checkpoint that was renamed, copied or repaired since is left unchanged.

    Rank 0 calls it after the commit of a save.
    """
    store = run_store_of(path)
    for record in records:
        if (hidden := store.set_aside(record.tag, record.state, run)) is not None:
            yield hidden
