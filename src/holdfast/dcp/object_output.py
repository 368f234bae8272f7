"""The output of a DCP save in an object store: files with names of their own, and then one object that names them.

A store cannot rename a folder. But the metadata names the files, and it is one object, which a store replaces in one
step. So no two saves use the same names of files, and readers of DCP find the files of the old checkpoint or those of
the new one. Each rank uploads its own files, so that ranks on several hosts need no shared file system.

A request for the metadata whose reply was lost may be repeated after another process has replaced the checkpoint. So
the files of a checkpoint that another process has saved within the last hour are not removed at once, but by a later
save: its checksums name them. Files that nothing names are left by a save that has failed or died. A later save removes
them if they are a day old.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torch.distributed.checkpoint.storage import WriteResult

from holdfast.dcp.write_results import WrittenItem
from holdfast.engine.io.upload_files import upload_file
from holdfast.errors import HoldfastError, RankMismatchError, TagExistsError
from holdfast.formats.dcp import checksums
from holdfast.formats.dcp.folder import METADATA, DcpDirectory
from holdfast.formats.native import is_native
from holdfast.run.catalog import is_run_directory
from holdfast.run.lookup import resolve_checkpoint_path
from holdfast.run.object_run import check_output_name
from holdfast.run.owned_lock import ABANDONED_SECONDS
from holdfast.run.upload_staging import UploadStaging
from holdfast.storage.object_path import ObjectPath
from holdfast.storage.reader_pool import ReaderPool
from holdfast.storage.store import ObjectInfo, map_requests, store_of

_CHECKSUMS_NAME = re.compile(r"checksums-[0-9a-f]{16}\.json")

#: The names that these saves give. Nothing else is removed as a leftover.
_OWN_NAMES = re.compile(rf"__\d+_\d+-[0-9a-f]{{16}}\.distcp|{_CHECKSUMS_NAME.pattern}")

#: The names of files that may belong to a checkpoint that is replaced, of holdfast or of torch.
_DATA_NAMES = re.compile(rf"__\d+_\d+\.distcp|{re.escape(checksums.NAME)}|{_OWN_NAMES.pattern}")

#: For how many seconds a process may repeat a request.
_REPEAT_SECONDS = 3600.0

#: The names of the checksums of the checkpoints that this process has saved: it repeats no request for them any more.
_saved_here: set[str] = set()


@dataclass(frozen=True)
class _Replaced:
    """The checkpoint that is there before a save: the names of its files, and that of its checksums, if it has some."""

    names: frozenset[str] = frozenset()
    checksums_name: str = ""


class ObjectOutput:
    """The objects of one save. See :class:`holdfast.dcp.output.SaveOutput`."""

    def __init__(self, path: ObjectPath) -> None:
        check_output_name(path)
        self._path, self._store = path, path.store
        self._is_begun, self._overwrite = False, True
        #: Whether the metadata may have been written, or a request for it may still arrive.
        self._may_be_published = False

    @property
    def is_begun(self) -> bool:
        """True on rank 0 between :meth:`begin` and :meth:`publish` or :meth:`discard`."""
        return self._is_begun

    def begin(self, *, overwrite: bool) -> None:
        """Check the destination, and remove what dead saves have left."""
        if store_of(self._path).is_file(self._path):
            raise TagExistsError(f"{self._path} exists and is not a folder; choose another path")
        if is_run_directory(self._path) or resolve_checkpoint_path(self._path) != self._path or is_native(self._path):
            raise TagExistsError(f"{self._path} is a run or a checkpoint of holdfast; choose another path")
        if not overwrite and store_of(self._path).is_file(self._path / METADATA):
            raise TagExistsError(f"there is a checkpoint at {self._path}; choose another path, or pass overwrite=True")
        self._is_begun, self._overwrite = True, overwrite
        with suppress(HoldfastError):  # a save does not fail because of what another one has left
            self._remove_leftovers()

    @contextmanager
    def open_folder(self, nbytes: int) -> Iterator[Path]:
        """Give a temporary directory of this host, which is removed afterwards."""
        staging = UploadStaging(self._path)
        staging.create(nbytes)
        try:
            yield staging.path
        finally:
            staging.discard()

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
        missing = {item.info.relative_path for item in written} - self._store.list_names(self._path)
        for name in sorted(missing):
            if not store_of(self._path).is_file(self._path / name):  # a list may lag
                raise RankMismatchError(
                    f"{self._path} does not have {name}, which a rank has uploaded: all ranks need the same settings "
                    "of the store"
                )

    def publish(self, metadata: bytes, encoded_checksums: bytes) -> None:
        """Write the checksums, and then the metadata. Remove the files of the checkpoint that was replaced."""
        replaced, name = _Replaced(), checksums.name_checksums(metadata)
        with suppress(HoldfastError):  # what cannot be read is replaced, and its files stay
            replaced = self._read_current()
        may_be_repeated = self._may_be_repeated(replaced)
        self._store.replace_small(self._path / name, encoded_checksums)
        self._commit(metadata, name)
        _saved_here.add(name)
        self._is_begun = False
        if not may_be_repeated:
            self._remove(replaced.names - {name})

    def _may_be_repeated(self, replaced: _Replaced) -> bool:
        """Return whether another process may write the metadata of a checkpoint once more."""
        name = replaced.checksums_name
        if not _CHECKSUMS_NAME.fullmatch(name) or name in _saved_here:
            return False
        return any(info.path.name == name and not _is_old(info, _REPEAT_SECONDS) for info in self._list_files())

    def _commit(self, metadata: bytes, checksums_name: str) -> None:
        path, self._may_be_published = self._path / METADATA, True
        if self._overwrite:
            self._store.replace_small(path, metadata)
        elif not self._store.create_object(path, metadata):
            self._may_be_published = False
            self._remove([checksums_name])
            raise TagExistsError(f"another process has saved to {self._path} meanwhile; its checkpoint was left")

    def discard(self, results: Sequence[WriteResult] = ()) -> None:
        """Remove the files that the ranks have uploaded, unless the metadata may name them."""
        self._is_begun = False
        if not self._may_be_published:
            written = (result.storage_data for result in results)
            self._remove({item.info.relative_path for item in written if isinstance(item, WrittenItem)})

    def _remove(self, names: Iterable[str]) -> None:
        """Remove files. Those that cannot be removed are leftovers."""

        def remove_quietly(name: str) -> None:
            with suppress(HoldfastError):
                self._store.remove_file(self._path / name)

        map_requests(remove_quietly, sorted(names))

    def _read_current(self) -> _Replaced:
        if not store_of(self._path).is_file(self._path / METADATA):
            return _Replaced()
        metadata, raw = DcpDirectory(self._path, ReaderPool()).read_metadata()
        locations = [*metadata.values.values()]
        locations += [location for tensor in metadata.tensors.values() for location in tensor.chunks.values()]
        file = checksums.find_checksums(self._path, raw)
        names = {location.file for location in locations} | ({file.name} if file is not None else set())
        return _Replaced(frozenset(filter(_DATA_NAMES.fullmatch, names)), "" if file is None else file.name)

    def _list_files(self) -> list[ObjectInfo]:
        return [info for info in self._store.list_objects(self._path) if info.path.parent == self._path]

    def _remove_leftovers(self) -> None:
        current = self._read_current()
        infos = [info for info in self._list_files() if _OWN_NAMES.fullmatch(info.path.name)]
        names = {info.path.name for info in infos if _is_old(info, ABANDONED_SECONDS)}
        for info in infos:
            name = info.path.name
            if _CHECKSUMS_NAME.fullmatch(name) and name != current.checksums_name and _is_old(info, _REPEAT_SECONDS):
                names |= {name} | {*checksums.decode_checksums(info.path).files}
        self._remove(name for name in names - current.names if _OWN_NAMES.fullmatch(name))
        for upload, began in self._store.list_uploads(self._path):
            if time.time() - began > ABANDONED_SECONDS and _OWN_NAMES.fullmatch(upload.path.name):
                self._store.abort_upload(upload)


def _is_old(info: ObjectInfo, seconds: float) -> bool:
    return time.time() - info.time > seconds


def _rename_file(result: WriteResult, name: str) -> WriteResult:
    """Return the result of a record whose file has got another name."""
    item: WrittenItem = result.storage_data
    return replace(result, storage_data=replace(item, info=replace(item.info, relative_path=name)))
