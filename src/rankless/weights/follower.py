"""``WeightFollower``: keeps a folder, or a model in any layout, at the newest published version.

All ranks of a model call it. On each host one rank puts the version into a folder of the host, where every block is
proven. Then each rank loads its own bytes from there. So nothing of the model changes before the version is proven.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from msgspec.structs import replace

from rankless.components.component_calls import load_model
from rankless.engine.comm.collective_call import collective_call
from rankless.engine.comm.process_group_argument import ProcessGroupArgument, current_process_group
from rankless.engine.comm.session import RankGroup, Session
from rankless.errors import NoCheckpointError
from rankless.formats.weights.version_files import list_numbers, read_manifest
from rankless.ondisk.weight_versions import VersionManifest
from rankless.process.prepared_types import prepared
from rankless.storage.directory_trees import remove_tree
from rankless.storage.location import parse_location
from rankless.storage.posix import host_id, is_directory
from rankless.weights.followed_folder import FollowedFolder, FollowedVersion
from rankless.weights.publication import WeightVersion

#: Where the folder of a host is, unless the caller passes one: in its memory, if it has such a file system.
_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder has a random name

#: How often the newest version is looked for again if it was removed meanwhile.
_ATTEMPTS = 5


@prepared
class _Goal(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 has decided: the version to follow, 0 for none, the folder of each host, and who follows into it."""

    number: int
    folder: str
    leaders: list[int]


class WeightFollower:
    """Follows the versions that a :class:`rankless.WeightPublisher` publishes.

    ```python
    follower = rankless.WeightFollower("weights", into=model)
    while (version := follower.update()) is not None:
        evaluate(model, step=version.step)
    ```

    An update takes the cheapest way from the version that it has: over deltas, over a level, which is a delta over
    several versions, or from an anchor. Every block is proven by the CRCs of the version before anything becomes
    visible. A version never goes back to a lower number.

    Args:
        path: The weights directory, or its URL in an object store. It need not exist yet.
        into: A folder on this host, or a model. A folder gets the link ``current``, which leads to a folder with whole
            files of the newest version; the version before stays for readers that have it open. A model is a module in
            any layout, a state dict, or a list of the modules of one model; floating tensors are cast to its dtypes.
        folder: For a model, the folder of each host in which versions are put together. By default it is in memory, in
            ``/dev/shm``, and is removed by :meth:`close`. It takes the size of one model, and of two during an update.
        process_group: The ranks that follow together; ``"self"`` is this process alone.
        timeout: How many seconds ranks wait for each other before all of them fail.

    Raises:
        StateError: Another follower has the folder.
        InvalidArgumentError: The folder has something at ``current`` that no follower has made.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        into: Any,
        *,
        folder: str | PathLike[str] | None = None,
        process_group: ProcessGroupArgument = None,
        timeout: float = 600.0,
    ) -> None:
        self._path = parse_location(path)
        is_folder = isinstance(into, str | PathLike)
        self._model = None if is_folder else into
        self._place = parse_location(into) if is_folder else None if folder is None else parse_location(folder)
        self._is_temporary = self._place is None
        self._group, self._timeout, self._ranks = process_group, timeout, RankGroup(process_group)
        self._folder: FollowedFolder | None = None
        self._manifest: VersionManifest | None = None
        self._followed: FollowedVersion | None = None

    @property
    def version(self) -> WeightVersion | None:
        """The version that the folder or model has, as far as this follower knows it."""
        return None if self._manifest is None else WeightVersion.of(self._path, self._manifest)

    @property
    def folder(self) -> Path | None:
        """The folder of this host in which versions are put together, as soon as there is one."""
        return self._place

    @property
    def read_bytes(self) -> int:
        """The bytes of parts or files that the last update has read in this process from the weights directory."""
        return 0 if self._followed is None else self._followed.route.nbytes

    @property
    def verified_bytes(self) -> int:
        """The bytes that the last update has proven in this process: all of the model's files."""
        return 0 if self._followed is None else self._followed.verified_bytes

    def update(self) -> WeightVersion | None:
        """Go to the newest version. Every rank calls it.

        Returns:
            The version, or ``None`` if there is no newer one.

        Raises:
            CorruptCheckpointError: No way leads to the bytes of the version. What was there before stays.
            StorageError: The directory or the folder cannot be read or written. What was there before stays.
            MismatchError: The model has other tensors than the version. Nothing was changed.
        """
        with collective_call(self._group, self._timeout):
            self._join()
            for attempt in range(_ATTEMPTS):
                try:
                    goal = self._go_to_newest()
                except NoCheckpointError:  # a publisher has removed what this was based on
                    if attempt == _ATTEMPTS - 1:
                        raise
                    continue
                if goal is None:
                    return None
                break
            if self._model is not None and self._manifest is not None:
                folder = Path(goal.folder) / f"{self._manifest.number}-{self._manifest.id}"
                load_model(self._model, folder, process_group=self._group, timeout=self._timeout)
            return self.version

    def _join(self) -> None:
        if self._ranks.process_group is not current_process_group(self._group):
            self._ranks = RankGroup(self._group)

    def _go_to_newest(self) -> _Goal | None:
        """Put the newest version into the folders of all hosts. Return nothing if there is no newer one."""
        session = self._ranks.open_session(self._timeout)
        _, raw = session.vote("looking for new weights", host_id, str.encode, self._choose)
        goal = msgspec.msgpack.decode(raw, type=_Goal)
        if goal.number:
            self._place = Path(goal.folder)
            self._manifest = self._follow_together(session, goal)
        session.leave()
        return goal if goal.number else None

    def _choose(self, hosts: Sequence[bytes]) -> bytes:
        """Return the goal, on rank 0. ``hosts`` are the hosts of all ranks."""
        newest = max(list_numbers(self._path), default=0)
        own = 0 if self._manifest is None else self._manifest.number
        leaders = [rank for rank, host in enumerate(hosts) if host not in hosts[:rank]]
        if self._model is None:
            leaders = leaders[:1]
        goal = _Goal(newest if newest > own else 0, str(self._place or _choose_folder()), leaders)
        return msgspec.msgpack.encode(goal)

    def _follow_together(self, session: Session, goal: _Goal) -> VersionManifest:
        def follow() -> bytes:
            if session.rank in goal.leaders:
                self._follow(goal)
            return b""

        def describe(_: list[bytes]) -> bytes:
            manifest = read_manifest(self._path, goal.number) if self._followed is None else self._followed.manifest
            return msgspec.msgpack.encode(
                replace(manifest, files=[replace(file, header="") for file in manifest.files])
            )

        _, raw = session.vote("following the weights", follow, lambda done: done, describe)
        return msgspec.msgpack.decode(raw, type=VersionManifest)

    def _follow(self, goal: _Goal) -> None:
        """Put a version into the folder of this host, unless it is there already."""
        if self._folder is None:
            self._folder = FollowedFolder(Path(goal.folder))
        folder = self._folder
        if folder.current is None or folder.current.number < goal.number:
            self._followed = folder.update(self._path, goal.number)

    def close(self) -> None:
        """Let another follower have the folder. A folder in memory that this has made is removed."""
        if self._folder is not None:
            self._folder.close()
            if self._is_temporary:
                remove_tree(self._folder.path)
            self._folder = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _choose_folder() -> Path:
    """Return the path of a new folder in the memory of the hosts. Nothing is created."""
    parent = _MEMORY if is_directory(_MEMORY) else Path(tempfile.gettempdir())
    return parent / f"rankless-weights-{secrets.token_hex(8)}"
