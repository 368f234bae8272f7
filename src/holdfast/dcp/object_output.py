"""The output of a DCP save in an object store: files with names of their own, and then one object that names them.

A store cannot rename a folder. But the metadata names the files, and it is one object, which a store replaces in one
step. So no two saves use the same names of files, and readers of DCP find the files of the old checkpoint or those of
the new one. Each rank uploads its own files, so that ranks on several hosts need no shared file system.

Files that no metadata names are left by a save that has died. The next save removes them if they are a day old.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from torch.distributed.checkpoint.storage import WriteResult

from holdfast.dcp.write_results import WrittenItem
from holdfast.engine.io.upload_files import upload_file
from holdfast.errors import HoldfastError, RankMismatchError, TagExistsError
from holdfast.formats.dcp import checksums
from holdfast.formats.dcp.folder import METADATA, DcpDirectory
from holdfast.run.object_run import check_output_name
from holdfast.run.owned_lock import ABANDONED_SECONDS
from holdfast.run.upload_staging import UploadStaging
from holdfast.storage.object_path import ObjectPath
from holdfast.storage.reader_pool import ReaderPool
from holdfast.storage.store import map_requests, store_of

#: The names that these saves give. Nothing else is removed as a leftover.
_OWN_NAMES = re.compile(r"__\d+_\d+-[0-9a-f]{16}\.distcp|checksums-[0-9a-f]{16}\.json")


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
        if not overwrite and store_of(self._path).is_file(self._path / METADATA):
            raise TagExistsError(f"there is a checkpoint at {self._path}; choose another path, or pass overwrite=True")
        self._is_begun, self._overwrite = True, overwrite
        with suppress(HoldfastError):  # a save does not fail because of what another one has left
            self._remove_leftovers()

    @contextmanager
    def open_folder(self) -> Iterator[Path]:
        """Give a temporary directory of this host, which is removed afterwards."""
        staging = UploadStaging(self._path)
        staging.create()
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
        replaced, name = set[str](), checksums.name_checksums(metadata)
        with suppress(HoldfastError):  # what cannot be read is replaced, and its files stay
            replaced = self._read_names()
        self._store.replace_small(self._path / name, encoded_checksums)
        self._commit(metadata, name)
        self._is_begun = False
        with suppress(HoldfastError):  # the save is complete
            # Another process that has replaced this checkpoint meanwhile may be the one that removes these files.
            if self._store.read_small(self._path / METADATA) == metadata:
                self._remove(replaced - {name})

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

    def _read_names(self) -> set[str]:
        """Return the names of the files of the checkpoint that is there now."""
        if not store_of(self._path).is_file(self._path / METADATA):
            return set()
        metadata, raw = DcpDirectory(self._path, ReaderPool()).read_metadata()
        locations = [*metadata.values.values()]
        locations += [location for tensor in metadata.tensors.values() for location in tensor.chunks.values()]
        file = checksums.find_checksums(self._path, raw)
        return {location.file for location in locations} | ({file.name} if file is not None else set())

    def _remove_leftovers(self) -> None:
        kept, now = self._read_names(), time.time()
        infos = self._store.list_objects(self._path)
        self._remove(
            info.path.name
            for info in infos
            if info.path.parent == self._path
            and _OWN_NAMES.fullmatch(info.path.name)
            and info.path.name not in kept
            and now - info.time > ABANDONED_SECONDS
        )
        for upload, began in self._store.list_uploads(self._path):
            if now - began > ABANDONED_SECONDS and _OWN_NAMES.fullmatch(upload.path.name):
                self._store.abort_upload(upload)


def _rename_file(result: WriteResult, name: str) -> WriteResult:
    """Return the result of a record whose file has got another name."""
    item: WrittenItem = result.storage_data
    return replace(result, storage_data=replace(item, info=replace(item.info, relative_path=name)))
