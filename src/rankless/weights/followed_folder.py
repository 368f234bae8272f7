"""A folder that follows published weights: whole model files of one version, under the link ``current``.

```
FOLDER/current -> 120-9f2c…        the version that readers open; a rename replaces the link
FOLDER/120-9f2c…/                  byte for byte what save_model would have written for version 120
FOLDER/119-03ab…/                  the version before, for readers that have it open
```

:class:`~rankless.weights.follower.WeightFollower` has one in one process of a host, and so has ``rankless follow``.
The order must stay: every block of a new version is written and proven, everything is synced, the folder gets its name,
then the link changes. A killed process leaves the old version or the new one. Files of others in the folder stay.
"""

from __future__ import annotations

import errno
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from rankless.errors import (
    CheckpointReplacedError,
    CorruptCheckpointError,
    InvalidArgumentError,
    NoCheckpointError,
    StateError,
    StorageError,
)
from rankless.formats.weights.routes import Route, find_route, remember_manifests
from rankless.formats.weights.version_files import check_no_versions, list_numbers, read_manifest
from rankless.formats.weights.version_reader import WeightsReader
from rankless.ondisk.block_crcs import BLOCK_BYTES, crc64
from rankless.ondisk.weight_versions import VersionFile, VersionKey, VersionManifest, decode_model_header
from rankless.process.worker_threads import count_threads, run_in_threads
from rankless.storage import posix
from rankless.storage.atomic_rename import exchange_directories, rename_path
from rankless.storage.closing import ClosingMixin
from rankless.storage.direct_io import BufferedWriter
from rankless.storage.directory_trees import remove_tree
from rankless.storage.exact_reader import ExactReaderFactory
from rankless.storage.file_lock import FileLock
from rankless.storage.links_and_clones import Sharing, identify_file
from rankless.storage.reader_pool import ReaderPool
from rankless.storage.store import store_of

#: The link to the current version.
CURRENT = "current"

_VERSION = re.compile(r"([1-9][0-9]*)-([0-9a-f]{16})")

#: Leftovers of a process that was killed.
_PENDING = re.compile(r"\.(pending|current)-[0-9a-f]{16}")

_LOCK = ".rankless-follow.lock"

#: The most ways to a version that are looked for with and without the current one.
_WAYS = 10

#: Errors of the folder that is written, and not of the directory that is read.
_OF_THE_FOLDER = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


class FollowedVersion(NamedTuple):
    """A version that was put into the folder, and how: the bytes that were read for it, and those that were proven."""

    manifest: VersionManifest
    folder: Path
    route: Route
    verified_bytes: int


class FollowedFolder(ClosingMixin):
    """The folder of one follower. Raises ``StateError`` if another follower has it.

    The version before stays if the folder is for readers, ``keeps_previous``.
    """

    def __init__(self, path: Path, *, keeps_previous: bool = True) -> None:
        self.current: VersionKey | None = None
        self._keeps_previous = keeps_previous
        if store_of(path).is_remote:
            raise InvalidArgumentError(f"{path} is in an object store: weights are followed into a folder of this host")
        self.path = path
        check_no_versions(path)
        self._open()

    def _open(self) -> None:
        """Create the folder if it is missing, lock it, and look at its contents."""
        posix.make_directory(self.path)
        with posix.wrap_os_errors("lock", self.path / _LOCK):
            try:
                self._lock = FileLock(self.path / _LOCK)
            except BlockingIOError:
                raise StateError(
                    f"another follower has {self.path}: let only one follow into a folder, or pass another one"
                ) from None
        try:
            self.current = self._read_current() or self.current
            self._remove_leftovers()
        except BaseException:
            self.close()
            raise

    def hold(self) -> None:
        """Lock the folder again if somebody has removed it. Raises ``StateError`` if another follower has it since."""
        with posix.wrap_os_errors("inspect", self._lock.path):
            is_lost = self._lock.is_lost
        if is_lost:
            self._lock.close()
            self._open()

    def _read_current(self) -> VersionKey | None:
        """Return the version that the link leads to. Raises ``InvalidArgumentError`` if something else is there."""
        link = self.path / CURRENT
        if not posix.is_link(link):
            if posix.path_exists(link):
                raise InvalidArgumentError(f"{link} is not a link that a follower has made: pass another folder")
            return None
        with posix.wrap_os_errors("read", link):
            match = _VERSION.fullmatch(str(link.readlink()))
        if match is None:
            raise InvalidArgumentError(f"{link} leads to something that a follower has not made: pass another folder")
        return VersionKey(int(match[1]), match[2]) if posix.is_directory(self.path / match[0]) else None

    def _remove_leftovers(self) -> None:
        for name in posix.list_names(self.path):
            if _PENDING.fullmatch(name):
                remove_tree(self.path / name)

    def folder_of(self, key: VersionKey) -> Path:
        """Return the folder of a version. For example, ``12-0123456789abcdef``."""
        return self.path / f"{key.number}-{key.id}"

    def is_removed(self) -> bool:
        """Return whether somebody else has removed the files of the current version, or the link to them."""
        return self.current is not None and self._read_current() != self.current

    def update(self, directory: Path, number: int) -> FollowedVersion:
        """Put a version into the folder, and make it the current one. If it is that already, all of it is proven.

        Of all ways to it the cheapest is taken; if something on it is missing or corrupt, another one.

        Raises ``NoCheckpointError`` if the version, or all ways to it, were removed, ``CheckpointReplacedError`` if
        there are newer ones then; ``CorruptCheckpointError`` or ``StorageError`` if no way leads to the bytes that its
        manifest proves. The current version stays then.
        """
        try:
            return self._try_routes(directory, read_manifest(directory, number))
        except (CorruptCheckpointError, NoCheckpointError, StorageError) as error:
            if _is_of_folder(error) or max(list_numbers(directory), default=0) <= number:
                raise
            raise CheckpointReplacedError(
                f"version {number} of {directory} was removed: there are newer ones"
            ) from error

    def _try_routes(self, directory: Path, manifest: VersionManifest) -> FollowedVersion:
        read = remember_manifests(lambda older: read_manifest(directory, older), {manifest.number: manifest})
        first: Exception | None = None
        for route in self._iterate_routes(directory, manifest, read):
            try:
                return self._follow(directory, manifest, route)
            except (CorruptCheckpointError, NoCheckpointError, StorageError) as error:
                if _is_of_folder(error):
                    raise
                first = first or error
        raise first or NoCheckpointError(f"no way leads to version {manifest.number} of {directory}")

    def _iterate_routes(
        self, directory: Path, manifest: VersionManifest, read: Callable[[int], VersionManifest]
    ) -> Iterator[Route]:
        """Yield ways to a version: the cheapest, then ways that avoid its parts, or its anchor, and so on.

        At first they may begin at the current version, then they must not. Raises ``NoCheckpointError`` without a way.
        """
        tried = list[Route]()
        for have in ([] if self.current is None else [self.current], []):
            to_avoid = deque([frozenset[str]()])
            for _ in range(_WAYS):
                if not to_avoid:
                    break
                avoided = to_avoid.popleft()
                try:
                    route = find_route(directory, manifest, read, have, avoided)
                except NoCheckpointError:
                    continue
                if route not in tried:
                    tried.append(route)
                    yield route
                parts = {step.folder for step in route.steps} - {manifest.folder}
                to_avoid += [avoided | suspects for suspects in (parts, {route.anchor} - {""}) if suspects - avoided]
        if not tried:
            find_route(directory, manifest, read)  # raises the error

    def _follow(self, directory: Path, manifest: VersionManifest, route: Route) -> FollowedVersion:
        is_own = not route.anchor
        base = self.folder_of(route.start) if is_own else directory / route.anchor
        reader = WeightsReader(directory, manifest, base, route)
        verified_bytes = sum(file.size for file in manifest.files)
        if is_own and not route.steps and self._has_whole(directory, reader):
            self._make_current(manifest.key)
            return FollowedVersion(manifest, base, route, verified_bytes)
        pending = self.path / f".pending-{secrets.token_hex(8)}"
        posix.make_directory(pending)
        try:
            for name, data in _read_small_files(directory, manifest):
                posix.make_parents(pending, name)
                posix.write_small(pending / name, data)
            for file in manifest.files:
                self._write_model_file(reader, file, base if is_own else None, pending)
            posix.sync_tree(pending)
            folder = self._publish(pending, manifest.key)
        except BaseException:
            with suppress(StorageError):
                remove_tree(pending)
            raise
        return FollowedVersion(manifest, folder, route, verified_bytes)

    def _has_whole(self, directory: Path, reader: WeightsReader) -> bool:
        """Prove the version that the folder has, and return whether it stays. Files that somebody has added stay, too.

        Raises ``CorruptCheckpointError`` or ``StorageError`` if its bytes are others.
        """
        manifest, folder = reader.manifest, self.folder_of(reader.manifest.key)
        store = store_of(folder)
        for name, data in _read_small_files(directory, manifest):
            if store.read_small(folder / name, len(data) + 1) != data:
                return False
        if not all(_has_header(folder / file.name, file) for file in manifest.files):
            return False
        for file in manifest.files:
            _write_blocks(reader, file, None)
        return True

    def _write_model_file(self, reader: WeightsReader, file: VersionFile, base: Path | None, pending: Path) -> None:
        """Write a model file and prove each block, or link the file of the base if its bytes are the same."""
        target = pending / file.name
        posix.make_parents(pending, file.name)
        is_linked = (
            base is not None and file.name not in reader.changed_files() and _link(base / file.name, target, file)
        )
        if not is_linked:
            posix.allocate_space(target, file.size)
        _write_blocks(reader, file, None if is_linked else target)

    def _publish(self, pending: Path, key: VersionKey) -> Path:
        folder = self.folder_of(key)
        if posix.path_exists(folder):  # the current one, or of a follower that was killed before it changed the link
            displaced = self.path / f".pending-{secrets.token_hex(8)}"
            exchange_directories(pending, folder, displaced)
            remove_tree(displaced)
        else:
            rename_path(pending, folder)
        self._make_current(key)
        if key == self.current:
            return folder
        previous, self.current = self.current, key
        kept = {folder.name}
        if previous is not None and self._keeps_previous:
            kept.add(self.folder_of(previous).name)
        with suppress(StorageError):  # the next update removes the rest
            for name in posix.list_names(self.path):
                if _VERSION.fullmatch(name) and name not in kept:
                    remove_tree(self.path / name)
        return folder

    def _make_current(self, key: VersionKey) -> None:
        """Let the link lead to a version, unless it does."""
        if self._read_current() == key:
            return
        link = self.path / f".current-{secrets.token_hex(8)}"
        with posix.wrap_os_errors("link", link):
            link.symlink_to(self.folder_of(key).name)
        rename_path(link, self.path / CURRENT)

    def close(self) -> None:
        """Let another process follow into the folder."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self


def _is_of_folder(error: Exception) -> bool:
    return isinstance(error, StorageError) and error.errno in _OF_THE_FOLDER


def remove_if_abandoned(path: Path) -> None:
    """Remove the folder of a follower that is dead: it does not hold the lock. Raises ``OSError`` if it lives."""
    lock = FileLock(path / _LOCK, create=False)
    try:
        if lock.held:
            remove_tree(path)
    finally:
        lock.close()


def _read_small_files(directory: Path, manifest: VersionManifest) -> Iterator[tuple[str, bytes]]:
    """Yield the names and bytes of the small files of a version. Raises ``CorruptCheckpointError``."""
    anchor = directory / manifest.anchor.folder
    for small in manifest.small_files:
        data = store_of(anchor).read_small(anchor / small.name, small.size + 1)
        if (len(data), f"{crc64(data):016x}") != (small.size, small.crc64nvme):
            raise CorruptCheckpointError(f"{anchor / small.name} is not the file that its manifest names")
        yield small.name, data


def _link(source: Path, target: Path, file: VersionFile) -> bool:
    """Link a model file that has the bytes of tensors and the header of a version. Return whether it is linked."""
    identity = identify_file(source)
    return identity is not None and _has_header(source, file) and Sharing().link_file(source, target, identity)


def _has_header(path: Path, file: VersionFile) -> bool:
    """Return whether a model file has the size and the header of a version."""
    identity = identify_file(path)
    if identity is None or identity.size != file.size:
        return False
    with store_of(path).open_reader(path) as opened:
        header = bytearray(file.data_start)
        opened.read(0, memoryview(header))
    return bytes(header) == file.header_bytes


class _Block(NamedTuple):
    """A block of a tensor: its bytes, their CRC, and where they are in the file."""

    tensor: str
    start: int
    stop: int
    offset: int
    crc: int


def _list_blocks(reader: WeightsReader, file: VersionFile) -> Iterator[_Block]:
    """Yield the blocks of a model file in order."""
    header = decode_model_header(file, str(reader.path))
    for name, entry in sorted(header.entries.items(), key=lambda item: (item[1].data_offsets, item[0])):
        at = file.data_start + entry.data_offsets[0]
        crcs: Sequence[int] = reader.stored_crcs(name)
        for number, crc in enumerate(crcs):
            start, stop = number * BLOCK_BYTES, min(entry.nbytes, (number + 1) * BLOCK_BYTES)
            yield _Block(name, start, stop, at + start, crc)


def _write_blocks(reader: WeightsReader, file: VersionFile, target: Path | None) -> None:
    """Read and prove all blocks of a model file, and write them with its header, unless it is there already.

    Raises ``CorruptCheckpointError``, which names the tensor and the block.
    """
    readers = ReaderPool(ExactReaderFactory())
    writer = None if target is None else BufferedWriter(target)

    def move(block: _Block) -> None:
        data = np.empty(block.stop - block.start, np.uint8)
        reader.read_stored(block.tensor, block.start, data.data, readers)
        if crc64(data) != block.crc:
            raise CorruptCheckpointError(
                f"block {block.start // BLOCK_BYTES} of {block.tensor!r} in {file.name} is not that of version "
                f"{reader.manifest.number}: something on the way to it is corrupt"
            )
        if writer is not None:
            writer.write(block.offset, data.data)

    try:
        run_in_threads(move, _list_blocks(reader, file), count_threads(file.size))
        if writer is not None:
            writer.write(0, memoryview(file.header_bytes))
            writer.sync()
    finally:
        readers.close()
        if writer is not None:
            writer.close()
