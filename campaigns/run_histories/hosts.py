"""The hosts of a history: where the processes of its jobs are, and the folders of its tiers."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Protocol

from campaigns.run_histories.places import Place, read_folder
from campaigns.run_histories.processes import ForkedProcess, JobProcess
from campaigns.run_histories.trainer import Trainer

#: The seconds after which a job counts as hanging.
_SECONDS = 60.0


class Hosts(Protocol):
    """The hosts, which have names. The name ``""`` means any of them."""

    def start(self, number: int, place: Place, tier: Path | None, host: str, drain_every: int) -> JobProcess:
        """Start the process of a job."""

    def read_files(self, host: str, folder: Path) -> dict[str, bytes]:
        """Return the contents of all files in a folder of a host, by their paths in it."""

    def remove(self, host: str, folder: Path) -> None:
        """Remove a folder of a host."""

    def flush(self) -> None:
        """Write what the hosts have in their caches, so that the places have all that jobs have written."""


class OneMachine:
    """:class:`Hosts` that are names on this machine, which the jobs take for boot ids."""

    def start(self, number: int, place: Place, tier: Path | None, host: str, drain_every: int) -> JobProcess:
        """See :class:`Hosts`."""
        return ForkedProcess(number, partial(Trainer, place, tier, host or "a", drain_every), _SECONDS)

    def read_files(self, host: str, folder: Path) -> dict[str, bytes]:  # noqa: ARG002 - all have one file system
        """See :class:`Hosts`."""
        return read_folder(folder)

    def remove(self, host: str, folder: Path) -> None:  # noqa: ARG002 - all have one file system
        """See :class:`Hosts`."""
        shutil.rmtree(folder, ignore_errors=True)

    def flush(self) -> None:
        """Do nothing: all processes share one cache."""
