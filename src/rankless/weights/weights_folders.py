"""The folders and manifests of a weights directory, as publishers make and remove them, on a disk or in a store.

Rank 0 of a publisher calls it. It removes the files that a manifest names, after that manifest, and leftovers of a dead
publisher: files with our checksums in a folder that no manifest names. Nothing else is removed, so a folder with
another file stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rankless.errors import (
    CorruptCheckpointError,
    FormatError,
    InvalidArgumentError,
    NoCheckpointError,
    RanklessError,
    StorageError,
    WeightsConflictError,
)
from rankless.formats.safetensors import has_our_checksums
from rankless.formats.weights.version_files import list_numbers, manifest_path, read_manifest
from rankless.ondisk.weight_versions import VersionKey, VersionManifest, anchor_name, delta_name, encode_version
from rankless.storage.store import store_of
from rankless.weights.directory_check import check_weights_directory

_FOLDER_NAME = re.compile(r"(anchor|delta)-([0-9]+)-([0-9a-f]{16})")

#: Folders that no manifest names are left alone for so many seconds: another publisher may be about to commit them.
_ABANDONED_SECONDS = 3600.0

#: The small files that a save of a model writes next to its model files.
_SMALL = re.compile(r"[\w.-]+\.json")


@dataclass(frozen=True)
class WeightsDirectory:
    """A directory that versions are published into. See :class:`rankless.components.component_request.SavedTo`."""

    path: Path
    #: Whether this publisher has published into it.
    is_known: bool = False

    def check_replaceable(self) -> None:
        """Raise ``InvalidArgumentError`` if the path is a file, a bucket as a whole, or has checkpoints.

        For example, ``s3://bucket`` is refused, and ``s3://bucket/weights`` is not.
        """
        if store_of(self.path).is_bucket(self.path):
            raise InvalidArgumentError(f"{self.path} is a whole bucket: publish into a folder in it")
        if not self.is_known:
            check_weights_directory(self.path)


def commit_version(directory: Path, manifest: VersionManifest) -> str:
    """Create the manifest of a version: it is published. Return a text that changes with it.

    Raises ``WeightsConflictError`` if there is one, or a newer one: another publisher went on while this one did
    not run. Versions that can no longer be reached are removed again then.
    """
    path = manifest_path(directory, manifest.number)
    store = store_of(path)
    if not store.create_small(path, encode_version(manifest)):
        raise _conflict(directory, manifest.number)
    newest = max(list_numbers(directory), default=manifest.number)
    if newest > manifest.number:
        with suppress(StorageError):  # the other publisher may be removing it, too
            remove_version(directory, manifest)
        raise _conflict(directory, newest)
    return store.file_version(path)


def _conflict(directory: Path, number: int) -> WeightsConflictError:
    return WeightsConflictError(
        f"another publisher has published version {number} in {directory}: let only one job publish into a directory. "
        "The next publication of this job is a whole model"
    )


def is_committed(directory: Path, key: VersionKey) -> bool:
    """Return whether a version was published. Raises ``StorageError`` if that cannot be known."""
    with suppress(NoCheckpointError):
        return read_manifest(directory, key.number).key == key
    return False


def find_outdated(directory: Path, keep: int) -> list[VersionManifest]:
    """Return the versions that are older than the newest ``keep`` anchors, newest first.

    They must be removed in this order: a version must not outlive its base.
    """
    anchors = 0
    outdated: list[VersionManifest] = []
    for number in reversed(list_numbers(directory)):
        with suppress(RanklessError):  # one that cannot be read stays
            manifest = read_manifest(directory, number)
            if anchors >= keep:
                outdated.append(manifest)
            anchors += manifest.is_anchor
    return outdated


def remove_version(directory: Path, manifest: VersionManifest) -> None:
    """Remove a version: its manifest first, so that no reader begins with it, then the files that it names."""
    store_of(directory).remove_file(manifest_path(directory, manifest.number))
    remove_version_files(directory, manifest)


def remove_version_files(directory: Path, manifest: VersionManifest) -> None:
    """Remove the files that a version has written."""
    parts = [part.name for delta in manifest.deltas for part in delta.parts]
    if manifest.folder:
        _remove_files(directory / manifest.folder, parts)
    if manifest.is_anchor:
        names = [*(file.name for file in manifest.files), *(file.name for file in manifest.small_files)]
        _remove_files(directory / manifest.anchor.folder, names)


def remove_unpublished(directory: Path, key: VersionKey) -> None:
    """Remove the folders of a version that was not published, as far as their files are ours."""
    for name in (anchor_name(key), delta_name(key)):
        _remove_own_files(directory / name)


def remove_abandoned(directory: Path) -> None:
    """Remove the folders of dead publishers: no manifest names them, and nothing in them has changed for an hour.

    For example, ``anchor-12-0123456789abcdef`` of a publisher that was killed. Folders with the number of a manifest
    that cannot be read stay.
    """
    store = store_of(directory)
    names = [folder.name for folder in store.list_subdirectories(directory)]
    numbered = {name: int(match[2]) for name in names if (match := _FOLDER_NAME.fullmatch(name))}
    for number in sorted(set(numbered.values())):
        unnamed = {name for name, of_name in numbered.items() if of_name == number}
        try:
            unnamed -= _named_folders(directory, number)
        except (CorruptCheckpointError, FormatError):
            continue
        for name in unnamed:
            if store.seconds_unchanged(directory / name) > _ABANDONED_SECONDS:
                _remove_own_files(directory / name)


def _named_folders(directory: Path, number: int) -> set[str]:
    try:
        return set(read_manifest(directory, number).folders)
    except NoCheckpointError:
        return set()


def _remove_own_files(folder: Path) -> None:
    store = store_of(folder)
    names = store.list_names(folder)
    tensors = {name for name in names if name.endswith(".safetensors") and has_our_checksums(folder / name)}
    _remove_files(folder, [*tensors, *(name for name in names if _SMALL.fullmatch(name) and tensors)])


def _remove_files(folder: Path, names: Iterable[str]) -> None:
    """Remove files, and the folder if nothing else is in it."""
    store = store_of(folder)
    for name in names:
        with suppress(StorageError):  # another process has removed it
            store.remove_file(folder / name)
    store.remove_empty_folder(folder)
