"""The version that a follower goes to: the newest one, and never an older one than it has.

:mod:`rankless.weights.host_folders` calls it at each update, on rank 0 and on the rank that follows for a host;
``rankless follow`` at each look, in one process. So a look must be cheap.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from rankless.errors import CorruptCheckpointError, NoCheckpointError, StateError
from rankless.formats.weights.version_files import list_numbers, manifest_path, read_manifest
from rankless.ondisk.weight_versions import VersionKey
from rankless.storage.store import store_of
from rankless.weights.directory_check import check_weights_directory


def choose_version(directory: Path, own: VersionKey | None) -> int:
    """Return the number of the newest version; the ``own`` number if there is no newer one, 0 if there is none.

    A list of an object store may be late: the own version is asked for by its name. Raises ``StateError`` if the
    directory was made anew: it has another version of that number, or only lower ones: for example, the own version is
    12, and the newest one is 3. If the manifest of the own version is corrupt, a newer one need not be based on it:
    ``CorruptCheckpointError`` is raised without a newer one.
    """
    newest = max(list_numbers(directory), default=0)
    if own is None:
        if not newest:
            check_weights_directory(directory)
        return newest
    try:
        found = _find_key(directory, own.number)
    except CorruptCheckpointError:
        if newest > own.number:
            return newest
        raise
    if found == own or not newest or (found is None and newest > own.number):  # retention has removed the own one
        return max(newest, own.number)
    raise StateError(
        f"{directory} was made anew: it has version {newest}, and no longer the version {own} that was followed. To "
        "follow the new versions, begin with a new follower and an empty folder"
    )


def _find_key(directory: Path, number: int) -> VersionKey | None:
    path = manifest_path(directory, number)
    return _read_key(directory, number, store_of(path).file_version(path))


@lru_cache(maxsize=16)
def _read_key(directory: Path, number: int, file_version: str) -> VersionKey | None:
    """Return the key of a version; ``None`` if it is not there. A manifest is read once for each ``file_version``."""
    del file_version
    try:
        return read_manifest(directory, number).key
    except NoCheckpointError:
        return None
