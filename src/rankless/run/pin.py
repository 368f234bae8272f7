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

import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from rankless.ondisk.hidden_names import HiddenName, parse_hidden_name
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.run_store import run_store_of


@contextmanager
def held_pin(parent: Path, tag: str, run: str) -> Iterator[None]:
    """Hold a pin of the checkpoint ``tag`` of a run. Whether the checkpoint is still there is not checked.

    Raises ``StorageError`` if the pin cannot be created.
    """
    path = parent / HiddenName(tag, run, secrets.token_hex(8), "pin").name
    with run_store_of(parent).held_pin(path):
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
    parent = info.path.parent
    return not all(run_store_of(parent).is_pin_over(parent / pin.name) for pin in pins)


def is_being_removed(parent: Path, tag: str, run: str, names: Collection[str]) -> bool:
    """Return whether a process that may be alive has locked a checkpoint in order to remove it.

    ``names`` are those in the run directory ``parent``. The lock of a save has a directory of the same id.
    """
    hidden = [name for name in map(parse_hidden_name, names) if name and (name.tag, name.run) == (tag, run)]
    saves = {name.id for name in hidden if name.state == "partial"}
    locks = (name for name in hidden if name.state == "lock" and name.id not in saves)
    return not all(run_store_of(parent).is_lock_over(parent / lock.name) for lock in locks)
