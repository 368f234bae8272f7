"""The pending directory: whatever appears at a path in one step is built in a hidden directory next to it.

A directory with its final name is therefore complete: it gets the name by one rename, after everything in it is
durable. A lock (:mod:`rankless.run.pending_lock`) shows other processes that its writer is alive. If the writer dies,
the next process that finds the directory without a locked lock file removes it: see :mod:`rankless.run.cleanup`.

Checkpoints, components, conversions, DCP folders and Lightning's files all go through :class:`PendingDirectory`, so
there is one place where two jobs that write to one path meet.

Rank 0 creates the directory in the vote on the preparation, and publishes it in the decision of the vote on the
writing, in the thread of the save. The order must stay: take the lock, create the directory, write and sync everything,
rename, release the lock. In :meth:`PendingDirectory.replace`, the displaced path is checked after the exchange, and not
only before it.
"""

from __future__ import annotations

import errno
import secrets
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rankless.engine.comm.process_group_argument import describe_unjoined_ranks
from rankless.errors import InvalidArgumentError, StorageError, TagExistsError
from rankless.formats.native import is_native
from rankless.observe.warning import warn_caller
from rankless.ondisk.block_crcs import crc64
from rankless.ondisk.hidden_names import HiddenName
from rankless.run.catalog import is_run_directory
from rankless.run.checkpoint_info import read_info
from rankless.run.displaced_checkpoints import restore_displaced
from rankless.run.folder_removal import give_back
from rankless.run.history import KnownCheckpoint
from rankless.run.pending_lock import PendingLock, acquire_lock
from rankless.run.run_store import run_store_of
from rankless.storage import atomic_rename, directory_trees, posix
from rankless.storage.filesystem_kind import find_bucket_mount
from rankless.storage.store import store_of

#: The directories that this process has warned of, because they are in a mounted bucket.
_known_mounts: set[Path] = set()

#: The most attempts to replace a path while other processes change it.
_ATTEMPTS = 100


def hidden_name(final: Path) -> HiddenName:
    """Return a new random name of a pending directory for ``final``."""
    return HiddenName(final.name, secrets.token_hex(8), secrets.token_hex(8), "partial")


class PendingDirectory:
    """A hidden directory. Its contents get the path ``final`` in one step.

    One process, rank 0, creates, publishes and removes it. The other ranks know its path, and write files into it.
    """

    def __init__(self, final: Path, name: HiddenName | None = None) -> None:
        """Describe the directory; nothing is created. ``name``: its hidden name, by default a random one."""
        self.final, self.name = final, name or hidden_name(final)
        self._lock: PendingLock | None = None
        self._claim: PendingLock | None = None

    @property
    def path(self) -> Path:
        """The path of the pending directory."""
        return self.final.parent / self.name.name

    @property
    def displaced_path(self) -> Path:
        """The hidden path of the old contents of the final path, after :meth:`replace`."""
        return self.final.parent / self.name.with_state("replaced").name

    @property
    def removal_path(self) -> Path:
        """The hidden path of the replaced contents while they are being deleted."""
        return self.final.parent / self.name.with_state("removed").name

    @property
    def is_locked(self) -> bool:
        """True if this process has created the directory, and has not published or removed it."""
        return self._lock is not None

    def create(self, nbytes: int = 0) -> None:
        """Create and lock the directory for a write of ``nbytes`` bytes. A failure leaves nothing behind.

        Raises ``StorageError`` if the file system has not enough space, or if another process uses the name.
        """
        posix.make_durable_directory(self.final.parent)
        _warn_of_bucket_mount(self.final.parent)
        posix.check_space(self.final.parent, nbytes)
        lock = self._lock = acquire_lock(self.final.parent, self.name)
        weakref.finalize(self, lock.close)
        try:
            posix.make_empty_directory(self.path)
        except BaseException:
            self.release()
            raise

    def create_new(self, nbytes: int = 0) -> None:
        """Create the directory as :meth:`create` does, and hold the final path. Nothing may be there."""
        posix.make_durable_directory(self.final.parent)
        claim = self._claim = claim_output(self.final)
        weakref.finalize(self, claim.close)
        try:
            self.create(nbytes)
        except BaseException:
            self.release()
            raise

    def publish(self, entry: str = "") -> None:
        """Rename the directory, or one entry of it, to the final path. Raises ``TagExistsError`` if that exists."""
        atomic_rename.rename_noreplace(self.path / entry, self.final)
        if entry:  # the rest of the directory is still there
            self.discard()
        else:
            self.release()

    def publish_tag(self, saved: KnownCheckpoint) -> None:
        """Publish a checkpoint, after an abandoned one of its run, or an interrupted copy, has lost the tag.

        Raises ``TagExistsError`` if anything else has it.
        """
        try:
            self.publish()
        except TagExistsError:
            if not self._free_tag(saved):
                raise
            self.publish()

    def replace_tag(self, saved: KnownCheckpoint, check_replaceable: Callable[[Path], None]) -> None:
        """Publish a checkpoint in place of the one with the tag, as :meth:`replace` does.

        An abandoned one of its run is not replaced, but gets another tag: an overwrite is meant for a tag that the run
        saves over and over again, such as ``last``. An interrupted copy is hidden.
        """
        self._free_tag(saved)
        self.replace(check_replaceable)

    def _free_tag(self, saved: KnownCheckpoint) -> bool:
        """Give an abandoned checkpoint of the same run, or an interrupted copy, another name.

        Return whether there was one. Called on rank 0. Few runs go back or are copied, so the imports wait for it.
        """
        from rankless.run.abandoned_tags import name_abandoned  # noqa: PLC0415
        from rankless.run.interrupted_copy import hide_interrupted_copy  # noqa: PLC0415

        names = directory_trees.list_tree(self.path)
        return name_abandoned(self.final, saved) or hide_interrupted_copy(self.final, saved.run, names)

    def replace(self, check_replaceable: Callable[[Path], None], entry: str = "") -> None:
        """Rename the directory, or one entry of it, to the final path, in place of its old contents.

        The old contents are then at ``displaced_path``. The directory stays locked until :meth:`remove_displaced` has
        deleted it. ``check_replaceable`` is called with the final path, and after an exchange with ``displaced_path``:
        it raises ``TagExistsError`` if the output at a path is not ours, or must keep its name. Other processes may
        replace or remove the final path meanwhile.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                check_replaceable(self.final)
            except StorageError as error:  # another process may replace the path meanwhile
                if error.errno != errno.ENOENT or attempt == _ATTEMPTS:
                    raise
                continue
            try:
                self._replace_once(self.path / entry, check_replaceable)
            except (TagExistsError, StorageError) as error:
                is_changed = isinstance(error, TagExistsError) or error.errno == errno.ENOENT
                if not is_changed or attempt == _ATTEMPTS:
                    raise
                self._drop_displaced(check_replaceable)
            else:
                break

    def _replace_once(self, output: Path, check_replaceable: Callable[[Path], None]) -> None:
        if not posix.path_exists(self.final):
            atomic_rename.rename_noreplace(output, self.final)
        else:
            exchange = atomic_rename.exchange_directories
            if posix.is_file(output) and posix.is_file(self.final):
                exchange = atomic_rename.exchange_files
            exchange(output, self.final, self.displaced_path)
            self._undo_replace(output, check_replaceable)

    def _undo_replace(self, output: Path, check_replaceable: Callable[[Path], None]) -> None:
        """Swap back if a checkpoint that must keep the name took it after the check.

        Then that one has its name again, and the output is in the pending directory again.
        """
        # After an exchange, a disk may fail to rename the replaced output: then it is where the new one was.
        replaced = self.displaced_path if posix.path_exists(self.displaced_path) else output
        try:
            check_replaceable(replaced)
        except TagExistsError:
            atomic_rename.exchange_directories(replaced, self.final, output)
            raise
        except StorageError:
            return  # the output has the name by now, and the replaced one was checked before

    def _drop_displaced(self, check_replaceable: Callable[[Path], None]) -> None:
        """Delete the displaced checkpoint, but only if another has its name by now; otherwise it is the only copy.

        An output that is not ours gets its name back, or one next to it.
        """
        with suppress(StorageError):
            if not posix.path_exists(self.displaced_path):
                return
            try:
                check_replaceable(self.displaced_path)
            except TagExistsError:
                give_back(self.displaced_path, self.final)
                return
            if posix.path_exists(self.final):
                directory_trees.remove_directory(self.displaced_path, self.removal_path)

    def remove_displaced(self) -> None:
        """Delete the output that :meth:`replace` displaced, and the rest of the directory. Then release the lock."""
        try:
            with suppress(StorageError):  # there may be none
                directory_trees.remove_directory(self.displaced_path, self.removal_path)
            for path in (self.displaced_path, self.path, self.removal_path):
                directory_trees.remove_tree(path)
        finally:
            self.release()

    def remove_earlier_displaced(self) -> None:
        """Delete the path that an interrupted save of the same name displaced, unless it is the only copy."""
        if restore_displaced(self.final.parent, self.name):
            for path in (self.displaced_path, self.removal_path):
                directory_trees.remove_tree(path)

    def release(self) -> None:
        """Release the lock and the claim. Later calls do nothing."""
        for lock in (self._lock, self._claim):
            if lock is not None:
                lock.close()
        self._lock = self._claim = None

    def discard(self) -> None:
        """Remove the directory and release the lock, after a failure. Files that cannot be removed stay hidden.

        The directory stays if it marks a displaced checkpoint that could not get its name back.
        """
        with suppress(StorageError):
            if restore_displaced(self.final.parent, self.name):
                directory_trees.remove_tree(self.path)
        self.release()


def _warn_of_bucket_mount(folder: Path) -> None:
    """Warn once in a process if a directory is in a bucket that is mounted through FUSE."""
    mount = find_bucket_mount(folder)
    if mount is not None and folder not in _known_mounts:
        _known_mounts.add(folder)
        url = f"pass its URL instead, such as {mount.scheme}://bucket/{folder.name}" if mount.scheme else "pass its URL"
        warn_caller(
            f"{folder} is in a bucket that {mount.program} has mounted. Such mounts may copy files instead of renaming "
            f"them, so a crash can leave a mixed checkpoint, and a save may fail: {url}"
        )


def claim_output(final: Path) -> PendingLock:
    """Hold a new path while this process writes the output for it; :meth:`PendingLock.close` lets it go.

    Conversions, exports and merges call it, so that several processes do not do the same work for one path. A process
    need not be in a process group for that: one of several ranks may convert. Raises ``TagExistsError`` if another
    process holds the path.
    """
    digest = f"{crc64(final.name.encode()):016x}"
    try:
        return acquire_lock(final.parent, HiddenName(final.name, f"{0:016x}", digest, "partial"))
    except StorageError as error:
        if error.errno != errno.EBUSY:
            raise
    ranks = describe_unjoined_ranks()
    hint = "choose another path, or wait for it"
    if ranks:
        hint = (
            f"{ranks}. Let one rank make this call, or call torch.distributed.init_process_group() before it, so that "
            "the ranks share the work"
        )
    raise TagExistsError(f"another process is writing {final} now: {hint}")


def check_destination(final: Path) -> None:
    """Check that something new can be written to a path.

    Raises ``TagExistsError`` if the path exists, and ``InvalidArgumentError`` if it is a bucket, or inside a rankless
    checkpoint: its manifest lists all files in it.
    """
    if store_of(final).is_bucket(final):
        raise InvalidArgumentError(f"{final} is a bucket: choose a path in it")
    run, store = run_store_of(final.parent), store_of(final)
    run.check_output_name(final.name)
    is_link = not store.is_remote and posix.is_link(final)  # perhaps one that leads nowhere
    if run.has_tag(final.name) or is_link or store.path_exists(final):
        raise TagExistsError(f"{final} exists already; choose another path, or remove it first")
    for folder in final.resolve().parents:
        if store_of(folder).is_bucket(folder):  # it is no checkpoint
            break
        info = read_info(folder, folder.name) if is_native(folder) else None
        if info is not None and info.status == "complete" and not is_run_directory(folder):
            raise InvalidArgumentError(f"{final} is inside the checkpoint {folder}: choose a path outside of it")
