"""The output of a DCP save in an object store: files with names of their own, and then one object that names them.

A store cannot rename a folder. But the metadata names the files, and it is one object, which a store replaces in one
step. So no two saves use the same names of files, and readers of DCP find the files of the old checkpoint or of the new
one. Each rank uploads its own files, so that ranks on several hosts need no shared file system.

Files that nothing names are left by a save that has failed or died, or that is stopped. A later save removes them if
they are a day old, or an hour if their checksums are there. A save that is stopped must not publish them after that. So
a save replaces only the metadata that was there when it began, by a conditional write, and one that removes leftovers
lists them, then replaces the metadata, and removes them at last. The removed files were listed before, so the condition
of the stopped save fails. A save with a failed condition tries again with the new metadata, unless it has taken so long
that its files may have been listed.

A save may so replace another one that has lost its reply, and tries again. So the files of a checkpoint that another
process has saved within the last hour are not removed at once, but by a later save: its checksums name them.

:class:`~rankless.dcp.storage_writer.FileSystemWriter` calls it in the steps of ``dcp.save``. The order must stay:
files, checksums, a list of files that may be removed, the metadata on a condition, then the removal.
"""

from __future__ import annotations

import errno
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from torch.distributed.checkpoint.storage import WriteResult

from rankless.dcp.reader import checksums_json
from rankless.dcp.reader.dcp_directory import METADATA, DcpDirectory
from rankless.dcp.write_results import WrittenItem
from rankless.engine.io.upload_files import upload_file
from rankless.errors import (
    CorruptCheckpointError,
    FormatError,
    RanklessError,
    RankMismatchError,
    StorageError,
    TagExistsError,
)
from rankless.formats.native import is_native
from rankless.run.catalog import is_run_directory
from rankless.run.lookup import resolve_checkpoint_path
from rankless.run.object_run import check_output_name
from rankless.run.owned_lock import ABANDONED_SECONDS
from rankless.run.unpublished_output import LocalOutput
from rankless.storage.object_path import ObjectPath
from rankless.storage.reader_pool import ReaderPool
from rankless.storage.store import ObjectInfo, map_requests, store_of

_CHECKSUMS_NAME = re.compile(r"checksums-[0-9a-f]{16}\.json")

#: The names that these saves give. Nothing else is removed as a leftover.
_OWN_NAMES = re.compile(rf"__\d+_\d+-[0-9a-f]{{16}}\.distcp|{_CHECKSUMS_NAME.pattern}")

#: The names of files that may belong to a checkpoint that is replaced, of rankless or of torch.
_DATA_NAMES = re.compile(rf"__\d+_\d+\.distcp|{re.escape(checksums_json.NAME)}|{_OWN_NAMES.pattern}")

#: After how many seconds the files that checksums name may be removed, if the metadata does not name them.
_REPEAT_SECONDS = 3600.0

#: The names of the checksums of the checkpoints that this process has saved: it repeats no request for them any more.
_saved_here: set[str] = set()


@dataclass(frozen=True)
class _Replaced:
    """The checkpoint that is there before a save: the names of its files, and its checksums' name, if it has some."""

    names: frozenset[str] = frozenset()
    checksums_name: str = ""


class _Found(NamedTuple):
    """The version of the metadata that a save finds, none if it is missing, and the files to remove after the save."""

    version: str | None
    removable: frozenset[str]


class ObjectOutput:
    """The objects of one save. See :class:`rankless.dcp.save_output.SaveOutput`."""

    def __init__(self, path: ObjectPath) -> None:
        check_output_name(path)
        self._path, self._store = path, path.store
        self._is_begun, self._overwrite = False, True
        #: When the save began, the version of the metadata that was there, and the files of all ranks.
        self._began, self._names = 0.0, frozenset[str]()
        self._version: str | None = None
        #: Whether the metadata may have been written, or a request for it may still arrive.
        self._may_be_published = False

    @property
    def is_begun(self) -> bool:
        """True on rank 0 between :meth:`begin` and :meth:`publish` or :meth:`discard`."""
        return self._is_begun

    def begin(self, *, overwrite: bool) -> None:
        """Check the destination."""
        if store_of(self._path).is_file(self._path):
            raise TagExistsError(f"{self._path} exists and is not a folder; choose another path")
        if is_run_directory(self._path) or resolve_checkpoint_path(self._path) != self._path or is_native(self._path):
            raise TagExistsError(f"{self._path} is a run or a checkpoint of rankless; choose another path")
        if not overwrite and store_of(self._path).is_file(self._path / METADATA):
            raise TagExistsError(f"there is a checkpoint at {self._path}; choose another path, or pass overwrite=True")
        self._began, self._version = time.time(), self._store.find_version(self._path / METADATA)
        self._is_begun, self._overwrite = True, overwrite

    @contextmanager
    def open_folder(self, nbytes: int) -> Iterator[Path]:
        """Give a temporary directory of this host, which is removed afterwards."""
        pending = LocalOutput(self._path)
        pending.create(nbytes)
        try:
            yield pending.path
        finally:
            pending.discard()

    def keep_files(self, folder: Path, results: Sequence[WriteResult]) -> list[WriteResult]:
        """Upload the files of this rank. If that fails, remove those that have arrived."""
        token = secrets.token_hex(8)
        names = {result.storage_data.info.relative_path for result in results}
        final = {name: f"{Path(name).stem}-{token}{Path(name).suffix}" for name in names}
        try:
            for name in sorted(names):
                upload_file(self._path / final[name], folder / name)
        except BaseException:
            self._remove(final.values())
            raise
        return [_rename_file(result, final[result.storage_data.info.relative_path]) for result in results]

    def check_files(self, written: Sequence[WrittenItem]) -> None:
        """Raise ``RankMismatchError`` if a rank has uploaded to another store."""
        self._names = frozenset(item.info.relative_path for item in written)
        for name in self._find_missing():
            raise RankMismatchError(
                f"{self._path} does not have {name}, which a rank has uploaded: all ranks need the same settings of "
                "the store"
            )

    def _find_missing(self) -> list[str]:
        missing = sorted(self._names - self._store.list_names(self._path))
        return [name for name in missing if not store_of(self._path).is_file(self._path / name)]  # a list may lag

    def publish(self, metadata: bytes, encoded_checksums: bytes) -> None:
        """Write the checksums, and then the metadata. Remove files that are not needed any more."""
        name = checksums_json.name_checksums(metadata)
        written = time.time()  # before the request: the process may be stopped in it
        self._store.replace_small(self._path / name, encoded_checksums)
        found = self._look_around(self._version)
        while not self._commit(metadata, found.version):
            # In this order: if this process is stopped in between, the version is outdated, or the check fails.
            version = self._store.find_version(self._path / METADATA)
            self._check_may_retry(name, written)
            found = self._look_around(version)
        _saved_here.add(name)
        self._is_begun = False
        self._check_intact(metadata)
        self._remove(found.removable - self._names - {name})
        with suppress(RanklessError):  # a save does not fail because of leftovers of another one
            self._abort_uploads()

    def _check_intact(self, metadata: bytes) -> None:
        """Raise ``StorageError`` if the metadata names files that are missing: some stores ignore its condition."""
        missing = self._find_missing()
        if missing and self._store.read_small(self._path / METADATA) == metadata:
            raise StorageError(errno.ENOENT, f"another process has removed {self._path / missing[0]}: save again")

    def _look_around(self, version: str | None) -> _Found:
        """Return the state before the metadata is replaced. Unreadable metadata is replaced, and its files stay."""
        removable = set[str]()
        with suppress(RanklessError):
            replaced = self._read_current()
            if not self._may_be_repeated(replaced):
                removable |= replaced.names
            removable |= self._find_leftovers(replaced)
        return _Found(version, frozenset(removable))

    def _commit(self, metadata: bytes, version: str | None) -> bool:
        """Write the metadata in place of a version. Return false if another process has changed it."""
        path, self._may_be_published = self._path / METADATA, True
        if version is None or not self._overwrite:
            is_written = self._store.create_object(path, metadata)
        else:
            is_written = self._store.replace_version(path, version, metadata)
        self._may_be_published = is_written
        return is_written

    def _check_may_retry(self, name: str, written: float) -> None:
        """Raise an error if the save must not replace the checkpoint that another process has saved meanwhile."""
        now = time.time()
        if not self._overwrite:
            self._remove([name])
            raise TagExistsError(f"another process has saved to {self._path} meanwhile; its checkpoint was left")
        # Clocks may differ, so half of the time that must pass until another process may have listed the files.
        if now - self._began > ABANDONED_SECONDS / 2 or now - written > _REPEAT_SECONDS / 2:
            self._remove([name])
            raise StorageError(
                errno.ESTALE,
                f"another process has saved to {self._path} while this save was stopped, and may have removed its "
                "files: save again",
            )

    def _may_be_repeated(self, replaced: _Replaced) -> bool:
        """Return whether another process may write the metadata of a checkpoint once more."""
        name = replaced.checksums_name
        if not _CHECKSUMS_NAME.fullmatch(name) or name in _saved_here:
            return False
        return any(info.path.name == name and not _is_old(info, _REPEAT_SECONDS) for info in self._list_files())

    def discard(self, results: Sequence[WriteResult] = ()) -> None:
        """Remove the files that the ranks have uploaded, unless the metadata may name them."""
        self._is_begun = False
        if not self._may_be_published:
            written = (result.storage_data for result in results)
            self._remove({item.info.relative_path for item in written if isinstance(item, WrittenItem)})

    def _remove(self, names: Iterable[str]) -> None:
        """Remove files. Those that cannot be removed are leftovers."""

        def remove_quietly(name: str) -> None:
            with suppress(RanklessError):
                self._store.remove_file(self._path / name)

        map_requests(remove_quietly, sorted(names))

    def _read_current(self) -> _Replaced:
        if not store_of(self._path).is_file(self._path / METADATA):
            return _Replaced()
        metadata, raw = DcpDirectory(self._path, ReaderPool()).read_metadata()
        locations = [*metadata.values.values()]
        locations += [location for tensor in metadata.tensors.values() for location in tensor.chunks.values()]
        file = checksums_json.find_checksums(self._path, raw)
        names = {location.file for location in locations} | ({file.name} if file is not None else set())
        return _Replaced(frozenset(filter(_DATA_NAMES.fullmatch, names)), "" if file is None else file.name)

    def _list_files(self) -> list[ObjectInfo]:
        return [info for info in self._store.list_objects(self._path) if info.path.parent == self._path]

    def _find_leftovers(self, current: _Replaced) -> set[str]:
        """Return the files of saves that have failed, died, or were replaced by another process."""
        infos = [info for info in self._list_files() if _OWN_NAMES.fullmatch(info.path.name)]
        names = {info.path.name for info in infos if _is_old(info, ABANDONED_SECONDS)}
        for info in infos:
            name = info.path.name
            if _CHECKSUMS_NAME.fullmatch(name) and name != current.checksums_name and _is_old(info, _REPEAT_SECONDS):
                with suppress(CorruptCheckpointError, FormatError):  # its files are removed when they are old
                    names |= {name} | {*checksums_json.decode_checksums(info.path).files}
        return {name for name in names - current.names if _OWN_NAMES.fullmatch(name)}

    def _abort_uploads(self) -> None:
        """Abort uploads that seem to be dead. A save that is only stopped fails."""
        for upload, began in self._store.list_uploads(self._path):
            if time.time() - began > ABANDONED_SECONDS and _OWN_NAMES.fullmatch(upload.path.name):
                self._store.abort_upload(upload)


def _is_old(info: ObjectInfo, seconds: float) -> bool:
    return time.time() - info.time > seconds


def _rename_file(result: WriteResult, name: str) -> WriteResult:
    """Return the result of a record after its file has got another name."""
    item: WrittenItem = result.storage_data
    return replace(result, storage_data=replace(item, info=replace(item.info, relative_path=name)))
