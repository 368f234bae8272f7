"""Unpublished outputs: a hidden directory that is renamed, or a local one that is uploaded to an object store.

A store cannot rename, so the files of a folder appear there one after another. The files that name others, such as
indexes and manifests, are the last ones: without them no reader takes a part of a folder for the whole.

A conversion has one on each rank, and uses rank 0's, in its votes; exports, merges and drains of tiers use it in one
process. In an object store the order of :func:`upload_order` must stay: the files that name other files come last, for
example ``model.safetensors.index.json``.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Protocol

from rankless.engine.io.upload_files import upload_file
from rankless.errors import RanklessError, StorageError, TagExistsError
from rankless.ondisk import manifest
from rankless.ondisk.block_crcs import crc64
from rankless.run.cleanup import clean_up
from rankless.run.pending_dir import PendingDirectory, check_destination, claim_output
from rankless.storage.object_path import ObjectPath
from rankless.storage.posix import is_directory, make_durable_directory, make_private_directory, walk_files
from rankless.storage.store import map_requests, store_of

#: The ends of the names of files that name other files, in the order of their upload.
_LAST = (".index.json", "adapter_config.json", "config.json", ".metadata", manifest.NAME)

#: The files that mark a checkpoint of NxD as begun and as complete.
_MARKERS = ("checkpoint", "done")


class PendingOutput(Protocol):
    """A local directory for an output that is built in it. One process, rank 0, creates, publishes and removes it."""

    @property
    def path(self) -> Path:
        """The path of the directory."""

    @property
    def is_locked(self) -> bool:
        """True if this process has created the directory, and has not published or removed it."""

    def create(self, nbytes: int = 0) -> None:
        """Create the directory, for ``nbytes`` bytes that will be written there. A failure leaves nothing behind."""

    def create_new(self, nbytes: int = 0) -> None:
        """Create the directory, and hold the final path. Raises ``TagExistsError`` if another process holds it."""

    def publish(self, entry: str = "") -> None:
        """Give the directory, or one entry of it, its final path. Raises ``TagExistsError`` if that exists."""

    def discard(self) -> None:
        """Remove the directory after a failure."""


class LocalOutput:
    """A directory for temporary files of this host. Its contents are uploaded to a path in an object store.

    For example, ``/tmp/rankless-1000`` has one for each upload of the user 1000.
    """

    def __init__(self, final: ObjectPath) -> None:
        self._final = final

    @cached_property
    def _local(self) -> PendingDirectory:
        try:
            folder = Path(tempfile.gettempdir()) / f"rankless-{os.getuid()}"
        except FileNotFoundError as error:
            raise StorageError(errno.ENOENT, f"there is no directory for temporary files: {error.strerror}") from error
        return PendingDirectory(folder / f"{self._final.name[:100]}-{crc64(str(self._final).encode()):016x}")

    @property
    def path(self) -> Path:
        """See :class:`PendingOutput`."""
        return self._local.path

    @property
    def is_locked(self) -> bool:
        """See :class:`PendingOutput`."""
        return "_local" in self.__dict__ and self._local.is_locked

    def create(self, nbytes: int = 0) -> None:
        """See :class:`PendingOutput`. Leftovers of dead processes on this host are removed first."""
        self._prepare_folder()
        self._local.create(nbytes)

    def create_new(self, nbytes: int = 0) -> None:
        """See :class:`PendingOutput`. Only processes of this host learn that the path is held."""
        self._prepare_folder()
        self._local.create_new(nbytes)

    def _prepare_folder(self) -> None:
        folder = self._local.final.parent
        make_private_directory(folder)
        clean_up(folder)

    def publish(self, entry: str = "") -> None:
        """See :class:`PendingOutput`. If it fails, nothing is left of it."""
        if self._final.store.path_exists(self._final):
            raise TagExistsError(f"{self._final} exists already; choose another path, or remove it first")
        written: list[ObjectPath] = []
        try:
            for path, source in self._list_sources(entry).items():
                upload_file(path, source)
                written.append(path)
        except BaseException:
            with suppress(RanklessError):
                map_requests(self._final.store.remove_file, written)
            raise
        self.discard()

    def replace(self, entry: str = "") -> None:
        """See :class:`PendingOutput`. Other objects below the path stay."""
        for path, source in self._list_sources(entry).items():
            upload_file(path, source)

    def remove_displaced(self) -> None:
        """See :class:`PendingOutput`."""
        self.discard()

    def discard(self) -> None:
        """See :class:`PendingOutput`."""
        self._local.discard()

    def _list_sources(self, entry: str) -> dict[ObjectPath, Path]:
        """Return the files by their final paths, in the order of their upload."""
        output = self.path / entry
        if not is_directory(output):
            return {self._final: output}
        names = [str(file.relative_to(output)) for file in walk_files(output)]
        names.sort(key=upload_order)
        return {self._final / name: output / name for name in names}


def upload_order(name: str) -> int:
    """Return a number to sort files by, so that files that name others are uploaded last.

    For example, ``config.json`` comes after ``model.safetensors``.
    """
    if name in _MARKERS:
        return len(_LAST) + 1 + _MARKERS.index(name)
    return max((rank for rank, end in enumerate(_LAST, 1) if name.endswith(end)), default=0)


def make_output(final: Path) -> PendingOutput:
    """Return an unpublished output; nothing is created."""
    return LocalOutput(final) if isinstance(final, ObjectPath) else PendingDirectory(final)


@contextmanager
def pending_directory(final: Path) -> Iterator[Path]:
    """Create a pending directory for a new path, and publish it at the end of the ``with`` block.

    On failure the directory is removed. Raises ``TagExistsError`` if ``final`` was created meanwhile.
    """
    if not store_of(final).is_remote:
        clean_up(final.parent, tag=final.name)
    pending = make_output(final)
    pending.create_new()
    try:
        yield pending.path
        pending.publish()
    except BaseException:
        pending.discard()
        raise


@contextmanager
def hold_output(final: Path) -> Iterator[None]:
    """Hold a new path while another function writes it, which would replace an output there.

    Raises ``TagExistsError`` if another process holds it, and the errors of :func:`check_destination`. In an object
    store a path cannot be held.

    Merges and exports call it, in one process.
    """
    check_destination(final)
    if store_of(final).is_remote:
        yield
        return
    make_durable_directory(final.parent)
    with closing(claim_output(final)):
        check_destination(final)  # another process may just have written it
        yield
