"""A run in an object store as a file system of fsspec. Each checkpoint is a path in it.

Lightning asks fsspec whether a checkpoint exists and when it was saved. In a store the keys of a checkpoint do not
begin with its path (see :mod:`rankless.run.object_run`), so other file systems of fsspec do not find it. This one has a
protocol of its own for each kind of store, such as ``rankless+s3``, and leaves other packages' protocols as they are.

Lightning's callbacks ask it, on each rank.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem

from rankless.errors import InvalidArgumentError
from rankless.run.catalog import list_checkpoints
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.lookup import resolve_checkpoint_path
from rankless.storage.location import RUN_PREFIX, parse_location
from rankless.storage.store import store_of


class RunFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Lists runs and finds checkpoints. Paths are whole URLs; nothing is opened through it."""

    protocol = tuple(RUN_PREFIX + scheme for scheme in ("s3", "gs", "az"))

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        """Return the URL itself: the protocol tells the kind of store."""
        return path.rstrip("/")

    def exists(self, path: str, **_: Any) -> bool:
        """Return whether there is a checkpoint of this path, or a run."""
        return _is_stored(path)

    def isdir(self, path: str) -> bool:
        """Return whether it exists: checkpoints and runs are folders."""
        return _is_stored(path)

    def isfile(self, path: str) -> bool:
        """Return false: see :meth:`isdir`."""
        del path
        return False

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """List the checkpoints of a run, oldest first."""
        infos = [info for info in list_checkpoints(parse_location(path)) if info.status == "complete"]
        entries = [_describe(f"{path.rstrip('/')}/{info.tag}", info) for info in infos]
        return entries if detail else [entry["name"] for entry in entries]

    def modified(self, path: str) -> datetime:
        """Return when a checkpoint was saved. Raises ``FileNotFoundError``."""
        run, _, tag = path.rstrip("/").rpartition("/")
        times = [info.time for info in list_checkpoints(parse_location(run)) if info.tag == tag]
        if not times:
            raise FileNotFoundError(path)
        return datetime.fromtimestamp(times[-1], UTC)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: a store has no directories."""

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        raise InvalidArgumentError(
            f"{path} cannot be opened in mode {mode!r}: pass the path of a local file, or use "
            "rankless.lightning.load_from_checkpoint"
        )


def _is_stored(url: str) -> bool:
    location = resolve_checkpoint_path(parse_location(url))
    return store_of(location).path_exists(location)


def _describe(name: str, info: CheckpointInfo) -> dict[str, Any]:
    return {"name": name, "size": info.nbytes, "type": "directory"}


for _protocol in RunFileSystem.protocol:
    fsspec.register_implementation(_protocol, RunFileSystem, clobber=True)
