"""The locks of pending directories, by the path of the directory."""

from __future__ import annotations

from pathlib import Path

from rankless.ondisk.hidden_names import parse_hidden_name
from rankless.run.pending_lock import PendingLock


def lock_pending(folder: Path) -> PendingLock:
    """Take the lock of a pending directory. Raises ``BlockingIOError`` if another process or object has it."""
    name = parse_hidden_name(folder.name)
    assert name is not None
    return PendingLock(folder.parent, name)
