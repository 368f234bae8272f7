"""The lock of a pending directory.

No process may remove the pending directory of a living save, and each may remove the directory of a dead save. The
owner locks ``.TAG.RUN.ID.lock``, next to the directory and older than it (:class:`~rankless.run.owned_lock.OwnedLock`).

Rank 0 takes it through :class:`~rankless.run.pending_dir.PendingDirectory`, and clean-ups of any job try to take it
(:mod:`rankless.run.cleanup`). The lock file must exist before the directory, and until after it.

After an overwrite the owner holds the lock until the old checkpoint is deleted. Retention and ``rankless prune`` hold
one while they delete.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from pathlib import Path

from rankless.errors import StorageError
from rankless.ondisk.hidden_names import HiddenName, parse_hidden_name
from rankless.run import owned_lock
from rankless.run.owned_lock import OwnedLock, acquire_as_owner
from rankless.storage.posix import last_change_time, path_exists

_log = logging.getLogger("rankless")


class PendingLock:
    """The lock of the pending directory ``name`` in ``parent``, held by its owner, or by a process that cleans up."""

    def __init__(self, parent: Path, name: HiddenName) -> None:
        """Take the lock. Raises ``BlockingIOError`` if another process has it, and other errors as ``OSError``."""
        self._partial = parent / name.with_state("partial").name
        self._lock = OwnedLock(lock_path(parent, name))

    def become_owner(self) -> None:
        """Write into the file that this process creates the pending directory."""
        self._lock.become_owner()

    def has_dead_owner(self, folder: Path, seconds: float = 0.0) -> bool:
        """Return whether the owner is dead, and nothing in ``folder`` has changed for at least ``seconds``.

        Raises ``StorageError`` if the directory is missing.
        """
        return self._lock.has_dead_owner(partial(last_change_time, folder), seconds)

    def close(self) -> None:
        """Release the lock. The owner, or a process that has removed the pending directory, removes the lock file.

        Later calls do nothing.
        """
        with suppress(StorageError):  # if the directory cannot be looked at, the file stays
            if self._lock.is_owner or not path_exists(self._partial):
                self._lock.remove()
        self._lock.close()


def lock_path(parent: Path, name: HiddenName) -> Path:
    """Return the path of a pending directory's lock file."""
    return parent / name.with_state("lock").name


def acquire_lock(parent: Path, name: HiddenName) -> PendingLock:
    """Take the lock of a pending directory that does not exist yet.

    Raises ``StorageError`` if other processes take the lock again and again.
    """
    return acquire_as_owner(lock_path(parent, name), lambda: PendingLock(parent, name))


def confirm_lock(folder: Path) -> None:
    """Record that this host sees the lock of a pending directory, if its owner is on another host.

    All that write into a folder of several hosts call it: saves, drains, components, conversions, DCP and Lightning. If
    the lock is not seen, leftovers of killed jobs stay for a day, which is logged. No failure matters to the save.
    """
    name = parse_hidden_name(folder.name)
    if name is not None and not owned_lock.confirm_lock(lock_path(folder.parent, name)):
        _log.warning(
            "hosts do not see each other's locks in %s: leftovers of killed jobs stay for a day", folder.parent
        )
