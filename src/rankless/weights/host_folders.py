"""The folders of all hosts of some ranks, which one rank of each host keeps at a published version.

:class:`~rankless.weights.follower.WeightFollower` and the backend for vLLM have one on every rank. Which version it is,
rank 0 decides in the vote "looking for new weights". In the vote "following the weights" the first rank of each host
puts it into the folder of its host. After that vote all folders have the version, and every block was proven.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from rankless.engine.comm.process_group_argument import ProcessGroupArgument, current_process_group
from rankless.engine.comm.session import RankGroup, Session
from rankless.errors import CheckpointReplacedError, InvalidArgumentError, NoCheckpointError, StateError, StorageError
from rankless.formats.weights.version_files import read_manifest
from rankless.observe.warning import warn_caller
from rankless.ondisk.weight_versions import VersionKey, VersionManifest
from rankless.process.prepared_types import prepared
from rankless.storage.directory_trees import remove_tree
from rankless.storage.posix import directory_identity, host_id, is_directory, list_names
from rankless.weights.choose_version import choose_version
from rankless.weights.followed_folder import FollowedFolder, FollowedVersion, remove_if_abandoned

#: Where the folder of a host is, unless the caller passes one: in its memory, if it has such a file system.
_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder has a random name

_TEMPORARY = re.compile(r"rankless-weights-[0-9a-f]{16}")

#: The errors of a file system that cannot have the model.
_NO_MEMORY = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}

#: How often the newest version is looked for again if it was removed meanwhile, and a new folder is locked.
_ATTEMPTS = 5

#: The seconds until a new folder is locked again.
_PAUSE = 0.01


@prepared
class _Goal(msgspec.Struct, frozen=True, array_like=True):
    """The decision of rank 0: the version to follow, 0 for none, the folder of each host, and who follows into it.

    If ``is_doubted``, the folders may have it already, and are proven again.
    """

    number: int
    folder: str
    leaders: list[int]
    is_doubted: bool


@prepared
class _Here(msgspec.Struct, frozen=True, array_like=True):
    """The report of a rank before rank 0 decides: its host, and the number of the version that it has loaded.

    Ranks of one ``host`` see one folder: ranks in two containers with an ``/dev/shm`` of their own do not. A rank
    doubts a folder that it could not load from, or that has lost a file.
    """

    host: str
    loaded: int
    has_doubt: bool


class HostFolders:
    """The folder of this host, and the work of this rank for it.

    Without a ``place`` it is a new folder in the memory of each host, which :meth:`close` removes. If only one folder
    is wanted, ``is_single``, rank 0 follows alone, and the version before stays for readers. Otherwise the ranks have
    loaded it, and it would take the memory of another model.
    """

    def __init__(
        self, directory: Path, place: Path | None, group: ProcessGroupArgument, timeout: float, *, is_single: bool
    ) -> None:
        self._directory, self._is_single = directory, is_single
        self._is_temporary, self.place = place is None, place
        self._group, self._timeout, self._ranks = group, timeout, RankGroup(group)
        self._folder: FollowedFolder | None = None
        self._remove: weakref.finalize[[FollowedFolder, int], HostFolders] | None = None
        self._is_closed, self._has_warned, self._has_doubt = False, False, False
        self._process = os.getpid()
        #: The version that all hosts have, without the headers of its files.
        self.manifest: VersionManifest | None = None
        #: The version that this rank has put into the folder of its host.
        self.followed: FollowedVersion | None = None

    @property
    def version_folder(self) -> Path | None:
        """The folder of the version that all hosts have; ``None`` before the first one."""
        if self.place is None or self.manifest is None:
            return None
        return self.place / f"{self.manifest.number}-{self.manifest.id}"

    def doubt(self) -> None:
        """Let the next :meth:`go_to_newest` prove the folders again, on all ranks: this one could not load from one."""
        self._has_doubt = True

    def go_to_newest(self, loaded: int) -> Path | None:
        """Put the newest version into the folders of all hosts.

        Return where it is; ``None`` if all ranks have ``loaded`` it already, by its number, and their folder is there.

        All ranks call it. They all raise the same error: ``CorruptCheckpointError``, ``NoCheckpointError``,
        ``StorageError`` or ``StateError``. The old contents stay then.
        """
        if self._is_closed:
            raise StateError(f"the follower of {self._directory} is closed: make a new one")
        if os.getpid() != self._process:
            raise StateError(f"the follower of {self._directory} is of the parent process: make a new one in this one")
        if self._ranks.process_group is not current_process_group(self._group):
            self._ranks = RankGroup(self._group)
        for attempt in range(_ATTEMPTS):
            try:
                return self._go(loaded)
            except NoCheckpointError:  # a publisher has removed the base of this one
                if attempt == _ATTEMPTS - 1:
                    raise
        return None

    def _go(self, loaded: int) -> Path | None:
        session = self._ranks.open_session(self._timeout)

        def describe() -> _Here:
            if self._folder is not None:
                self._folder.hold()
            has_doubt = self._has_doubt or (self._folder is not None and self._folder.is_removed())
            return _Here(f"{host_id()} {_identify_nearest(self.place or _memory())}", loaded, has_doubt)

        _, raw = session.vote("looking for new weights", describe, msgspec.msgpack.encode, self._choose)
        goal = msgspec.msgpack.decode(raw, type=_Goal)
        if goal.number:
            self.place = Path(goal.folder)
            self.manifest = self._follow_together(session, goal)
            self._has_doubt = False
        session.leave()
        return self.version_folder if goal.number else None

    def _choose(self, posted: Sequence[bytes]) -> bytes:
        """Return the goal, on rank 0. ``posted`` has the reports of all ranks on their hosts."""
        ranks = [msgspec.msgpack.decode(raw, type=_Here) for raw in posted]
        hosts = [rank.host for rank in ranks]
        if self._folder is None and self.place is not None and not self._is_temporary:
            self._open_folder(self.place)
        newest = choose_version(self._directory, self._find_own())
        if not newest and not self._has_warned:
            self._has_warned = True
            warn_caller(f"there is no published version in {self._directory} yet")
        leaders = [rank for rank, host in enumerate(hosts) if host not in hosts[:rank]]
        is_doubted = any(rank.has_doubt for rank in ranks)
        goal = _Goal(
            newest if is_doubted or newest > min(rank.loaded for rank in ranks) else 0,
            str(self.place or _choose_folder()),
            leaders[:1] if self._is_single else leaders,
            is_doubted,
        )
        return msgspec.msgpack.encode(goal)

    def _find_own(self) -> VersionKey | None:
        """Return the version that the folder of this host has, or else that which all hosts had last."""
        if self._folder is not None and self._folder.current is not None:
            return self._folder.current
        return None if self.manifest is None else self.manifest.key

    def _follow_together(self, session: Session, goal: _Goal) -> VersionManifest:
        def follow() -> None:
            if session.rank in goal.leaders:
                with self._explaining_memory():
                    self._follow(goal)

        def describe(_: list[bytes]) -> bytes:
            followed = self.followed
            known = None if followed is None or followed.manifest.number != goal.number else followed.manifest
            manifest = known or read_manifest(self._directory, goal.number)
            return msgspec.msgpack.encode(
                replace(manifest, files=[replace(file, header="") for file in manifest.files])
            )

        _, raw = session.vote("following the weights", follow, lambda _: b"", describe)
        return msgspec.msgpack.decode(raw, type=VersionManifest)

    def _follow(self, goal: _Goal) -> None:
        """Put a version into the folder of this host.

        One that an earlier process has put there is proven once, and again after each doubt.
        """
        if goal.is_doubted:
            self.followed = None
        if self._folder is None:
            self._open_folder(Path(goal.folder))
        folder = self._folder
        if folder is None:
            return
        has_newer = folder.current is not None and folder.current.number >= goal.number
        if has_newer and choose_version(self._directory, folder.current) > goal.number:
            raise CheckpointReplacedError(f"there is a newer version than {goal.number} in {self._directory}")
        if self.followed is None or self.followed.manifest.number != goal.number:
            self.followed = folder.update(self._directory, goal.number)

    @contextmanager
    def _explaining_memory(self) -> Iterator[None]:
        """Give advice if the memory of this host cannot have the model: in containers it is often 64 MB."""
        try:
            yield
        except StorageError as error:
            if not self._is_temporary or error.errno not in _NO_MEMORY:
                raise
            raise StorageError(
                error.errno,
                f"{_memory()} has no room for two versions of the model: pass folder= with a folder on a disk, or let "
                f"this host or container have more of it: {error}",
            ) from error

    def _open_folder(self, place: Path) -> None:
        if self._is_temporary:
            _remove_of_dead_processes(place.parent)
            self._folder = folder = _open_new(place)
        else:
            self._folder = folder = FollowedFolder(place, keeps_previous=self._is_single)
        if self._is_temporary:
            if self._remove is not None:
                self._remove.detach()
            self._remove = weakref.finalize(self, _remove_temporary, folder, os.getpid())

    def close(self) -> None:
        """Let another follower have the folder. One in memory that this has made is removed. May be called again."""
        self._is_closed = True
        if self._remove is not None:
            self._remove()
        if self._folder is not None:
            self._folder.close()
            self._folder = None


def _remove_temporary(folder: FollowedFolder, process: int) -> None:
    """Remove a folder in memory, unless a forked process ends: it is its parent's."""
    if os.getpid() == process:
        folder.close()
        with suppress(StorageError):
            remove_tree(folder.path)


def _choose_folder() -> Path:
    """Return the path of a new folder in the memory of the hosts. Nothing is created.

    For example, ``/dev/shm/rankless-weights-0123456789abcdef``.
    """
    return _memory() / f"rankless-weights-{secrets.token_hex(8)}"


def _memory() -> Path:
    """Return the folder in the memory of this host, or else the folder of temporary files."""
    return _MEMORY if is_directory(_MEMORY) else Path(tempfile.gettempdir())


def _open_new(place: Path) -> FollowedFolder:
    """Open a new folder in memory. For a moment another follower may lock it, to see whether its process is dead."""
    for _ in range(_ATTEMPTS - 1):
        with suppress(StateError, StorageError):
            return FollowedFolder(place, keeps_previous=False)
        time.sleep(_PAUSE)
    return FollowedFolder(place, keeps_previous=False)


def _identify_nearest(path: Path) -> str:
    """Return the identity of a directory, or of the nearest one above it that exists."""
    return directory_identity(next(folder for folder in (path, *path.parents) if is_directory(folder)))


def _remove_of_dead_processes(parent: Path) -> None:
    """Remove the temporary folders of followers that were killed: each takes the memory of a whole model."""
    for name in list_names(parent):
        if _TEMPORARY.fullmatch(name):
            with suppress(StorageError, StateError, InvalidArgumentError, OSError):
                remove_if_abandoned(parent / name)
