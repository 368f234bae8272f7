"""The versions of a weights directory: listing them, and reading their manifests.

Publishers and followers, the reader of a version and the commands call it, each process for itself. A manifest never
changes. It may be removed at any time, before the files that it names.
"""

from __future__ import annotations

from pathlib import Path

from rankless.errors import CorruptCheckpointError, InvalidArgumentError, NoCheckpointError, StorageError
from rankless.ondisk.data_files import WEIGHT_VERSIONS
from rankless.ondisk.weight_versions import (
    LARGEST_MANIFEST,
    VersionManifest,
    decode_version,
    manifest_name,
    number_of_name,
)
from rankless.storage.store import store_of


def manifest_path(directory: Path, number: int) -> Path:
    """Return the path of the manifest of a version. This path opens this version, and no other."""
    return directory / WEIGHT_VERSIONS / manifest_name(number)


def list_numbers(directory: Path) -> list[int]:
    """Return the numbers of the versions of a weights directory, ascending; none if it is another directory."""
    numbers = map(number_of_name, store_of(directory).list_names(directory / WEIGHT_VERSIONS))
    return sorted(number for number in numbers if number is not None)


def version_path(directory: Path, name: str) -> Path:
    """Return the path of the manifest of the version that a user names by its number.

    Raises ``NoCheckpointError``, which names the versions that are there.
    """
    numbers = {str(number): number for number in list_numbers(directory)}
    if name in numbers:
        return manifest_path(directory, numbers[name])
    raise NoCheckpointError(f"there is no version {name!r} in {directory}: it has {', '.join(numbers) or 'none'}")


def check_no_versions(path: Path) -> None:
    """Raise ``InvalidArgumentError`` if a directory has published weights: nothing else must be saved into it.

    A follower calls it for its folder, and the first save of a job on rank 0 for an empty run directory.
    """
    if list_numbers(path):
        raise InvalidArgumentError(f"{path} has published weights: pass another directory")


def find_newest(path: Path) -> Path | None:
    """Return the manifest of the newest version if ``path`` is a weights directory with versions, else ``None``."""
    if not store_of(path).is_directory(path / WEIGHT_VERSIONS):
        return None
    numbers = list_numbers(path)
    return manifest_path(path, numbers[-1]) if numbers else None


def is_version(path: Path) -> bool:
    """Return whether ``path`` is the manifest of a version, or a weights directory with versions."""
    if number_of_name(path.name) is not None:
        return path.parent.name == WEIGHT_VERSIONS and store_of(path).is_file(path)
    return find_newest(path) is not None


def read_manifest(directory: Path, number: int) -> VersionManifest:
    """Return the manifest of a version.

    Raises ``NoCheckpointError`` if it is not there, or was removed; ``CorruptCheckpointError``.
    """
    path = manifest_path(directory, number)
    store = store_of(path)
    try:
        raw = store.read_small(path, LARGEST_MANIFEST)
    except StorageError as error:
        if store.file_exists(path):
            raise
        raise NoCheckpointError(f"there is no version {number} in {directory}, or it was removed") from error
    if not raw and not store.file_exists(path):  # read from a bucket that does not have it
        raise NoCheckpointError(f"there is no version {number} in {directory}, or it was removed")
    manifest = decode_version(raw, str(path))
    if manifest.number != number:
        raise CorruptCheckpointError(f"{path} is the manifest of version {manifest.number}: it is corrupt")
    return manifest
