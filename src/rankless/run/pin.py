"""Pins: as long as a process holds one, no process removes the checkpoint to save space.

A pin is a locked file ``.TAG.RUN.ID.pin`` in the run directory, with an id of its own. The lock ends with the process.

*No removal is missed*: who pins creates the pin first, and looks for locks of removals after that; if there is one, it
waits. Who removes takes such a lock first, and looks for pins after that; if there is one, it leaves the checkpoint. So
at least one of both sees the other. Both look by listing the directory that they have just changed. A client of a
network file system then asks the server, while it may remember single names wrongly if the times of the directory are
too coarse. If a lock cannot be made, because the disk is full, who removes looks again after its rename, and renames
the checkpoint back.

In an object store, pins and locks have the same names, and are leases: see :mod:`rankless.run.lease`.

``rankless.pin`` and the iterators over checkpoints hold pins, in the process of an evaluator; retention and ``rankless
prune`` look for them.
"""

from __future__ import annotations

import errno
import secrets
import time
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from rankless.errors import StorageError
from rankless.ondisk.hidden_names import HiddenName, parse_hidden_name
from rankless.run.lease import LOCK_SECONDS, held_lease, remove_if_over
from rankless.run.owned_lock import ABANDONED_SECONDS, OwnedLock, acquire_as_owner
from rankless.run.scan import CheckpointInfo
from rankless.storage.object_path import ObjectPath
from rankless.storage.posix import last_change_time, wrap_os_errors


@contextmanager
def held_pin(parent: Path, tag: str, run: str) -> Iterator[None]:
    """Hold a pin of the checkpoint ``tag`` of a run. Whether the checkpoint is still there is not checked.

    Raises ``StorageError`` if the pin cannot be created.
    """
    path = parent / HiddenName(tag, run, secrets.token_hex(8), "pin").name
    if isinstance(path, ObjectPath):
        with held_lease(path):
            yield
        return
    with closing(acquire_as_owner(path, lambda: OwnedLock(path))):
        yield


def is_pinned(info: CheckpointInfo, names: Collection[str]) -> bool:
    """Return whether a living process has pinned a checkpoint. Pins of dead processes are removed.

    ``names`` are those in the run directory.
    """
    pins = [
        pin
        for pin in map(parse_hidden_name, names)
        if pin and pin.tag in {info.tag, info.saved_as} and (pin.run, pin.state) == (info.run, "pin")
    ]
    return not all(remove_dead_pin(info.path.parent / pin.name) for pin in pins)


def is_being_removed(parent: Path, tag: str, run: str, names: Collection[str]) -> bool:
    """Return whether a process that may be alive has locked a checkpoint in order to remove it.

    ``names`` are those in the run directory ``parent``. The lock of a save has a directory of the same id.
    """
    hidden = [name for name in map(parse_hidden_name, names) if name and (name.tag, name.run) == (tag, run)]
    saves = {name.id for name in hidden if name.state == "partial"}
    locks = (name for name in hidden if name.state == "lock" and name.id not in saves)
    return not all(_is_lock_dead(parent / lock.name) for lock in locks)


def _is_lock_dead(path: Path) -> bool:
    """Return whether a lock is removed, or the process that took it is known to be dead."""
    if isinstance(path, ObjectPath):
        return remove_if_over(path, LOCK_SECONDS)
    try:
        with wrap_os_errors("lock", path), closing(OwnedLock(path, create=False)) as lock:
            return lock.proves_death()
    except StorageError as error:
        return error.errno == errno.ENOENT


def remove_dead_pin(path: Path) -> bool:
    """Remove a pin if its holder is known to be dead. Return whether it is removed, now or before."""
    if isinstance(path, ObjectPath):
        return remove_if_over(path)
    try:
        with wrap_os_errors("lock", path), closing(OwnedLock(path, create=False)) as lock:
            is_dead = lock.proves_death() or _is_abandoned(path)
            if is_dead:
                lock.remove()
            return is_dead
    except StorageError as error:
        return error.errno == errno.ENOENT or (error.errno != errno.EWOULDBLOCK and _is_abandoned(path))


def _is_abandoned(path: Path) -> bool:
    """Return whether a pin is a day old. This counts if its lock proves nothing, or belongs to another user."""
    with suppress(StorageError):
        return time.time() - last_change_time(path) > ABANDONED_SECONDS
    return False
