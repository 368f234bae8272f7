"""The memory of a job: its loads from and saves into run directories. Its next saves there continue them.

Each :class:`~rankless.run_directory.RunDirectory` has one in each process; the functions of :mod:`rankless.api` share
one. Claims and bases in it are used on rank 0, in the votes of a save. Links to a folder must lead to one memory: a job
claims once in each folder.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from rankless.run.claims import JobHistory, numbering_of
from rankless.run.corruption import CorruptRecord
from rankless.save.base_checkpoint import KnownRun


class DirectoryMemory(msgspec.Struct, frozen=True):
    """The history of a job in one run directory, and the knowledge of its saves about that."""

    history: JobHistory
    known: KnownRun


class JobMemory:
    """The memory that objects of one job share. A ``RunDirectory`` that no other one shares with has its own.

    Attributes:
        runs: The ids of the runs that the job has saved or loaded, in any directory.
        corrupt: The checkpoints that loads found corrupt. A save may take their tags.
    """

    def __init__(self) -> None:
        self.runs: set[str] = set()
        self.corrupt: set[CorruptRecord] = set()
        self._directories: dict[Path, DirectoryMemory] = {}

    def of(self, run: Path) -> DirectoryMemory:
        """Return the knowledge about a run directory. Links to it lead to the same object."""
        if run not in self._directories:
            real = run.resolve()
            new = DirectoryMemory(JobHistory(runs=self.runs, numbering=numbering_of(real)), KnownRun())
            self._directories[run] = self._directories.setdefault(real, new)
        return self._directories[run]
