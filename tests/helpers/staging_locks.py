"""The locks of staging directories, by the path of the directory."""

from __future__ import annotations

from pathlib import Path

from rankless.ondisk.hidden_names import parse_hidden_name
from rankless.run.staging_lock import StagingLock


def lock_staging(folder: Path) -> StagingLock:
    """Take the lock of a staging directory. Raises ``BlockingIOError`` if another process or object has it."""
    name = parse_hidden_name(folder.name)
    assert name is not None
    return StagingLock(folder.parent, name)
