"""The folders of all hosts of some ranks, which one rank of each host keeps at a published version.

:class:`~rankless.weights.follower.WeightFollower` and the backend for vLLM have one on every rank. Which version it is,
rank 0 decides in the vote "looking for new weights". In the vote "following the weights" the first rank of each host
puts it into the folder of its host. After that vote all folders have the version, and every block was proven.
"""

from __future__ import annotations

import re
import secrets
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from rankless.engine.comm.process_group_argument import ProcessGroupArgument, current_process_group
from rankless.engine.comm.session import RankGroup, Session
from rankless.errors import InvalidArgumentError, NoCheckpointError, StateError, StorageError
from rankless.formats.weights.version_files import list_numbers, read_manifest
from rankless.ondisk.weight_versions import VersionManifest
from rankless.process.prepared_types import prepared
from rankless.storage.directory_trees import remove_tree
from rankless.storage.posix import host_id, is_directory, list_names
from rankless.weights.followed_folder import FollowedFolder, FollowedVersion, remove_if_abandoned

#: Where the folder of a host is, unless the caller passes one: in its memory, if it has such a file system.
_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder has a random name

_TEMPORARY = re.compile(r"rankless-weights-[0-9a-f]{16}")

#: How often the newest version is looked for again if it was removed meanwhile.
_ATTEMPTS = 5


@prepared
class _Goal(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 has decided: the version to follow, 0 for none, the folder of each host, and who follows into it."""

    number: int
    folder: str
    leaders: list[int]


class HostFolders:
    """The folder of this host, and what this rank does for it.

    Without a ``place`` it is a new folder in the memory of each host, which :meth:`close` removes. If only one folder
    is wanted, ``is_single``, rank 0 follows alone.
    """

    def __init__(
        self, directory: Path, place: Path | None, group: ProcessGroupArgument, timeout: float, *, is_single: bool
    ) -> None:
        self._directory, self._is_single = directory, is_single
        self._is_temporary, self.place = place is None, place
        self._group, self._timeout, self._ranks = group, timeout, RankGroup(group)
        self._folder: FollowedFolder | None = None
        #: The version that all hosts have, without the headers of its files.
        self.manifest: VersionManifest | None = None
        #: What this rank has put into the folder of its host.
        self.followed: FollowedVersion | None = None

    @property
    def version_folder(self) -> Path | None:
        """The folder of the version that all hosts have; ``None`` before the first one."""
        if self.place is None or self.manifest is None:
            return None
        return self.place / f"{self.manifest.number}-{self.manifest.id}"

    def go_to_newest(self) -> Path | None:
        """Put the newest version into the folders of all hosts. Return where it is; ``None`` if there is no newer one.

        All ranks call it. They all raise the same error: ``CorruptCheckpointError``, ``NoCheckpointError``,
        ``StorageError`` or ``StateError``. What was there before stays then.
        """
        if self._ranks.process_group is not current_process_group(self._group):
            self._ranks = RankGroup(self._group)
        for attempt in range(_ATTEMPTS):
            try:
                return self._go()
            except NoCheckpointError:  # a publisher has removed what this was based on
                if attempt == _ATTEMPTS - 1:
                    raise
        return None

    def _go(self) -> Path | None:
        session = self._ranks.open_session(self._timeout)
        _, raw = session.vote("looking for new weights", host_id, str.encode, self._choose)
        goal = msgspec.msgpack.decode(raw, type=_Goal)
        if goal.number:
            self.place = Path(goal.folder)
            self.manifest = self._follow_together(session, goal)
        session.leave()
        return self.version_folder if goal.number else None

    def _choose(self, hosts: Sequence[bytes]) -> bytes:
        """Return the goal, on rank 0. ``hosts`` are the hosts of all ranks."""
        newest = max(list_numbers(self._directory), default=0)
        own = 0 if self.manifest is None else self.manifest.number
        leaders = [rank for rank, host in enumerate(hosts) if host not in hosts[:rank]]
        goal = _Goal(
            newest if newest > own else 0,
            str(self.place or _choose_folder()),
            leaders[:1] if self._is_single else leaders,
        )
        return msgspec.msgpack.encode(goal)

    def _follow_together(self, session: Session, goal: _Goal) -> VersionManifest:
        def follow() -> None:
            if session.rank in goal.leaders:
                self._follow(goal)

        def describe(_: list[bytes]) -> bytes:
            manifest = read_manifest(self._directory, goal.number) if self.followed is None else self.followed.manifest
            return msgspec.msgpack.encode(
                replace(manifest, files=[replace(file, header="") for file in manifest.files])
            )

        _, raw = session.vote("following the weights", follow, lambda _: b"", describe)
        return msgspec.msgpack.decode(raw, type=VersionManifest)

    def _follow(self, goal: _Goal) -> None:
        """Put a version into the folder of this host, unless it is there already."""
        if self._folder is None:
            if self._is_temporary:
                _remove_of_dead_processes(Path(goal.folder).parent)
            self._folder = FollowedFolder(Path(goal.folder))
        folder = self._folder
        if folder.current is None or folder.current.number < goal.number:
            self.followed = folder.update(self._directory, goal.number)

    def close(self) -> None:
        """Let another follower have the folder. One in memory that this has made is removed. May be called again."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()
            if self._is_temporary:
                remove_tree(folder.path)


def _choose_folder() -> Path:
    """Return the path of a new folder in the memory of the hosts. Nothing is created."""
    parent = _MEMORY if is_directory(_MEMORY) else Path(tempfile.gettempdir())
    return parent / f"rankless-weights-{secrets.token_hex(8)}"


def _remove_of_dead_processes(parent: Path) -> None:
    """Remove the temporary folders of followers that were killed: each takes the memory of a whole model."""
    for name in list_names(parent):
        if _TEMPORARY.fullmatch(name):
            with suppress(StorageError, StateError, InvalidArgumentError, OSError):
                remove_if_abandoned(parent / name)
