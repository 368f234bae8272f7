"""The pending directory of a DCP save, and the checks before an older checkpoint is replaced.

:mod:`rankless.dcp.save_output_folder` calls it: rank 0 creates, in torch's step "global plan", and all ranks look for
the directory when they write. The name must be the same at each save: planners keep it.
"""

from __future__ import annotations

import errno
from contextlib import closing
from pathlib import Path

from rankless.dcp.reader.dcp_directory import METADATA
from rankless.errors import InvalidArgumentError, StorageError, TagExistsError
from rankless.ondisk.block_crcs import crc64
from rankless.ondisk.hidden_names import HiddenName
from rankless.run.ownership import DCP_FOLDER
from rankless.run.pending_dir import PendingDirectory
from rankless.run.pending_lock import PendingLock
from rankless.run.run_store import run_store_of
from rankless.storage import posix
from rankless.storage.filesystem_kind import is_local


def pending_directory(final: Path) -> PendingDirectory:
    """Return the pending directory of saves to a path.

    Its name is the same on all ranks and at each save, because planners cache the result of the first save.
    """
    digest = f"{crc64(final.name.encode()):016x}"
    return PendingDirectory(final, HiddenName(final.name, digest, digest, "partial"))


def find_pending(final: Path) -> Path:
    """Return the path of the pending directory that rank 0 has created for this save.

    A client of a network file system may remember the name from an earlier save, which has become a checkpoint. It asks
    the server again if the parent directory is listed.

    Each rank calls it when it writes.
    """
    if not is_local(final.parent):
        posix.list_names(final.parent)
    return pending_directory(final).path


def create_pending(final: Path, *, overwrite: bool) -> PendingDirectory:
    """Create the pending directory (rank 0 only), and remove the leftovers of an interrupted save there.

    Raises ``TagExistsError`` if something is in the way, ``StorageError`` if a save is in progress.
    """
    pending = pending_directory(final)
    run_store_of(final.parent).repair_names()
    _check_destination(final, overwrite=overwrite)
    if posix.path_exists(pending.path):
        _remove_leftover(pending)
    pending.create()
    try:
        pending.remove_earlier_displaced()
    except BaseException:
        pending.discard()
        raise
    return pending


def _remove_leftover(pending: PendingDirectory) -> None:
    """Remove the pending directory of an interrupted save. Raises ``StorageError`` if its writer may be alive."""
    path = pending.path
    busy = StorageError(
        errno.EBUSY, f"{path} exists: another process saves to {pending.final}; if none does, remove it"
    )
    with posix.wrap_os_errors("lock", path):
        try:
            lock = PendingLock(path.parent, pending.name)
        except BlockingIOError as error:
            raise busy from error
    with closing(lock):
        if not lock.has_dead_owner(path) and _list_entries(path):
            raise busy
        pending.discard()
    if posix.path_exists(path):
        raise StorageError(
            errno.EBUSY,
            f"{path} was left by an interrupted save and cannot be removed: check the permissions of {path.parent}",
        )


def _check_destination(final: Path, *, overwrite: bool) -> None:
    if not posix.path_exists(final):
        return
    if not posix.is_directory(final):
        raise TagExistsError(f"{final} exists and is not a folder; choose another path")
    DCP_FOLDER.check(final)
    if not overwrite and posix.is_file(final / METADATA):
        raise TagExistsError(f"there is a checkpoint at {final}; choose another path, or pass overwrite=True")


def _list_entries(folder: Path) -> list[str]:
    return sorted(posix.list_names(folder))


def check_same_on_all_ranks(*, use_collectives: bool) -> None:
    """Raise ``InvalidArgumentError`` if ranks do not use collectives to agree that all is written."""
    if not use_collectives:
        raise InvalidArgumentError("an atomic checkpoint needs all ranks to agree: leave use_collectives=True")
