"""Requests for objects, and the reads of :class:`~rankless.storage.store.Store`, which are alike in all stores.

``S3``, ``GCS`` and ``Azure`` inherit from :class:`ObjectReads`. An answer must be checked to be one to this request
before its bytes count.
"""

from __future__ import annotations

import errno
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar

from rankless.errors import CheckpointReplacedError, CorruptCheckpointError, StorageError, UnsafeNameError
from rankless.storage.http.client import (
    ObjectClient,
    ObjectRequest,
    ObjectResponse,
    RefusedRequestError,
    unexpected_answer_error,
)
from rankless.storage.http.connection import MAX_BODY, parse_http_date
from rankless.storage.object_path import ObjectPath, as_object
from rankless.storage.object_reader import ObjectReader
from rankless.storage.store import Item, ObjectInfo, T, map_requests

_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)", re.ASCII)


#: The answers to a request for a copy of a store that will never copy this object.
_REFUSALS = frozenset(
    {
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.FORBIDDEN,
        HTTPStatus.METHOD_NOT_ALLOWED,
        HTTPStatus.CONFLICT,
        HTTPStatus.NOT_IMPLEMENTED,
    }
)


@dataclass(frozen=True, slots=True)
class Permissions:
    """The names of the permissions that requests need, for errors."""

    read: str
    inspect: str
    list: str
    write: str
    upload: str
    delete: str
    abort: str
    list_uploads: str


#: How often an object is looked for that was just written, and the seconds between.
_ATTEMPTS, _ATTEMPT_SECONDS = 20, 0.05


class ObjectReads(ABC):
    """Requests for objects, and the reads that are made of ``GET`` and ``HEAD``, with ``Range`` and ``If-Match``."""

    is_remote: ClassVar[bool] = True
    permissions: ClassVar[Permissions]

    #: The headers that describe any object.
    headers_of_objects: ClassVar[tuple[str, ...]] = ("content-length", "etag")

    @abstractmethod
    def _client(self) -> ObjectClient:
        """Return the client that all equal stores of this process share."""

    def _headers_of_all(self) -> tuple[tuple[str, str], ...]:
        """Return the caller's headers that belong to all requests."""
        return ()

    def _send(  # noqa: PLR0917 - the parts of a request
        self,
        method: str,
        path: ObjectPath,
        action: str,
        permission: str,
        query: Mapping[str, str] | None = None,
        headers: Sequence[tuple[str, str]] = (),
        *,
        body: Sequence[memoryview] = (),
        into: memoryview | None = None,
        root: str = "",
        limit: int = MAX_BODY,
        needs: tuple[str, ...] = (),
    ) -> ObjectResponse:
        """Send a request: see :class:`~rankless.storage.http.client.ObjectRequest`."""
        parameters, headers = tuple((query or {}).items()), (*headers, *self._headers_of_all())
        return self._client().send(
            ObjectRequest(method, path, action, permission, parameters, headers, body, into, root, limit, needs)
        )

    def _get(
        self,
        path: ObjectPath,
        headers: Sequence[tuple[str, str]],
        into: memoryview | None = None,
        limit: int = MAX_BODY,
    ) -> ObjectResponse:
        """Request an object, or a range of it."""
        return self._send("GET", path, "read", self.permissions.read, {}, headers, into=into, limit=limit)

    def _head(self, path: ObjectPath) -> ObjectResponse | None:
        """Return the headers of an object; ``None`` if there is none."""
        try:
            return self._send("HEAD", path, "inspect", self.permissions.inspect, needs=self.headers_of_objects)
        except RefusedRequestError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise

    def is_bucket(self, path: Path) -> bool:
        """See :class:`~rankless.storage.store.Store`."""
        return not as_object(path).key

    def make_folder(self, folder: Path) -> None:
        """See :class:`~rankless.storage.store.Store`. There are no directories."""
        del folder

    @abstractmethod
    def list_objects(self, prefix: ObjectPath) -> list[ObjectInfo]:
        """See :class:`~rankless.storage.store.ObjectStore`."""

    @abstractmethod
    def create_object(self, path: ObjectPath, data: bytes) -> bool:
        """See :class:`~rankless.storage.store.ObjectStore`."""

    def create_small(self, path: Path, data: bytes) -> bool:
        """See :class:`~rankless.storage.store.Store`.

        A store may ignore the condition, and a reply may be lost: so the object that is there afterwards counts.
        """
        written = as_object(path)
        self.create_object(written, data)
        return self.read_back(written) == data

    def read_back(self, path: ObjectPath) -> bytes:
        """See :class:`~rankless.storage.store.ObjectStore`."""
        for _ in range(_ATTEMPTS):
            try:
                if data := self.read_small(path):
                    return data
            except StorageError as error:
                if error.errno != errno.ENOENT:
                    raise
            time.sleep(_ATTEMPT_SECONDS)  # a replica may lag
        raise StorageError(
            errno.EIO,
            f"{path} is not there after the server has confirmed it: check whether a proxy answers for the server, and "
            "save again",
        )

    def find_version(self, path: ObjectPath) -> str | None:
        """See :class:`~rankless.storage.store.ObjectStore`."""
        found = self._head(path)
        if found is not None and "etag" not in found.headers:
            raise StorageError(errno.EIO, f"the server sent no ETag of {path}: it cannot be replaced safely")
        return None if found is None else found.headers["etag"]

    def _find_noted(self, path: ObjectPath, notes: Mapping[str, str], prefix: str) -> str | None:
        found = self._head(path)
        if found is None or any(found.headers.get(f"{prefix}{name}") != note for name, note in notes.items()):
            return None
        return found.headers.get("etag")

    def _find_if(self, path: ObjectPath, etag: str) -> ObjectResponse | None:
        """Return the headers of an object if it has an ETag. Lists and headers may quote it differently."""
        found = self._head(path)
        return found if found is not None and found.headers.get("etag", "").strip('"') == etag.strip('"') else None

    def _copy(
        self,
        source: ObjectPath,
        etag: str,
        target: ObjectPath,
        headers_for: Callable[[ObjectResponse], Sequence[tuple[str, str]]],
        **expected: Any,
    ) -> ObjectResponse:
        """Send a request for a copy: see ``copy_object`` of :class:`~rankless.storage.store.ObjectStore`.

        Some servers ignore the condition on the ETag, so look first. ``headers_for`` returns the headers of the
        request, given the source's headers. ``expected`` are passed to :meth:`_send`.
        """
        changed = f"{source} was removed or replaced before it was copied to {target}"
        found = self._find_if(source, etag)
        if found is None:
            raise StorageError(errno.ENOENT, changed)
        try:
            return self._send("PUT", target, "copy", self.permissions.write, {}, headers_for(found), **expected)
        except RefusedRequestError as error:
            if error.status in {HTTPStatus.NOT_FOUND, HTTPStatus.PRECONDITION_FAILED}:
                raise StorageError(errno.ENOENT, changed) from error
            if error.status not in _REFUSALS:
                raise
            raise StorageError(errno.ENOTSUP, f"the server does not copy {source} to {target}: {error}") from error

    @abstractmethod
    def _list_entries(self, folder: ObjectPath) -> Iterator[str]:
        """Yield the keys of the objects in a folder, and the common prefixes of those below, which end with a slash."""

    def _list_inside(self, folder: Path) -> Iterator[str]:
        """Yield the entries without an empty object that some programs create for the folder itself."""
        own = f"{as_object(folder).key}/"
        return (key for key in self._list_entries(as_object(folder)) if key != own)

    def list_names(self, folder: Path) -> set[str]:
        """See :class:`~rankless.storage.store.Store`."""
        return {_last_name(key) for key in self._list_inside(folder)} - {""}

    def list_entries(self, folder: Path) -> dict[str, str]:
        """See :class:`~rankless.storage.store.Store`."""
        prefix = as_object(folder)
        return {str(info.path.relative_to(prefix)): info.etag for info in self.list_objects(prefix)}

    def list_files(self, folder: Path) -> list[Path]:
        """See :class:`~rankless.storage.store.Store`."""
        keys = (key for key in self._list_inside(folder) if not key.endswith("/"))
        return sorted(folder / _last_name(key) for key in keys)

    def list_subdirectories(self, folder: Path) -> list[Path]:
        """See :class:`~rankless.storage.store.Store`."""
        names = {_last_name(key) for key in self._list_inside(folder) if key.endswith("/")}
        return sorted(folder / name for name in names if name and not name.startswith("."))

    @abstractmethod
    def is_directory(self, path: Path) -> bool:
        """See :class:`~rankless.storage.store.Store`."""

    def is_file(self, path: Path) -> bool:
        """See :class:`~rankless.storage.store.Store`."""
        return bool(as_object(path).key) and self._head(as_object(path)) is not None

    def file_exists(self, path: Path) -> bool:
        """See :class:`~rankless.storage.store.Store`."""
        return self.is_file(path)

    def path_exists(self, path: Path) -> bool:
        """See :class:`~rankless.storage.store.Store`."""
        return self.is_file(path) or self.is_directory(path)

    def file_size(self, path: Path) -> int:
        """See :class:`~rankless.storage.store.Store`."""
        response = self._head(as_object(path))
        if response is None:
            raise StorageError(errno.ENOENT, f"could not read {path}: there is no such object")
        return int(response.headers["content-length"])

    def file_version(self, path: Path) -> str:
        """See :class:`~rankless.storage.store.Store`: the ETag, without quotes."""
        found = self._head(as_object(path))
        return "" if found is None else found.headers.get("etag", "").strip('"')

    def read_small(self, path: Path, limit: int = 2**30) -> bytes:
        """See :class:`~rankless.storage.store.Store`."""
        response = self._get_start(as_object(path), limit)
        if response is None:
            return b""
        _check_size(path, response, limit)
        return response.body

    def read_with_age(self, path: ObjectPath, limit: int) -> tuple[bytes, float | None]:
        """See :class:`~rankless.storage.store.ObjectStore`."""
        response = self._get_start(path, limit)
        if response is None:
            return b"", None
        _check_size(path, response, limit)
        now, written = (parse_http_date(response.headers.get(name, "")) for name in ("date", "last-modified"))
        return response.body, None if now is None or written is None else (now - written).total_seconds()

    def remove_empty_folder(self, folder: Path) -> None:
        """See :class:`~rankless.storage.store.Store`. A store of objects has no directories."""
        del folder

    def seconds_unchanged(self, folder: Path) -> float:
        """See :class:`~rankless.storage.store.Store`."""
        objects = self.list_objects(as_object(folder))
        newest = max(objects, key=lambda info: info.time, default=None)
        response = None if newest is None else self._head(newest.path)
        if response is None:
            return 0.0
        now, written = (parse_http_date(response.headers.get(name, "")) for name in ("date", "last-modified"))
        return 0.0 if now is None or written is None else (now - written).total_seconds()

    def check_regular(self, path: Path, *, within: tuple[Path, ...]) -> None:
        """See :class:`~rankless.storage.store.Store`. Objects are no links; a missing one is found by the read."""
        if ".." in path.parts or not any(path.is_relative_to(folder) for folder in within):
            raise UnsafeNameError(f"{path} is outside of the checkpoint: refused")

    def map_files(self, read: Callable[[Item], T], items: Iterable[Item]) -> list[T]:
        """See :class:`~rankless.storage.store.Store`."""
        return map_requests(read, items)

    def open_reader(self, path: Path) -> ObjectReader:
        """See :class:`~rankless.storage.store.Store`."""
        return ObjectReader(self, as_object(path))

    def get_range(self, path: ObjectPath, offset: int, into: memoryview, version: str | None) -> str:
        """See :class:`~rankless.storage.object_reader.RangeSource`. The version is the ETag."""
        headers = [("range", f"bytes={offset}-{offset + len(into) - 1}")]
        headers += [("if-match", version)] if version else []
        try:
            response = self._get(path, headers, into)
        except RefusedRequestError as error:
            if error.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise CorruptCheckpointError(f"{path} ends before byte {offset}: it is truncated") from error
            if error.status == HTTPStatus.PRECONDITION_FAILED:
                raise CheckpointReplacedError(f"{path} was replaced while it was being read; try again") from error
            raise
        start, _ = _find_range(response, path)
        if start != offset:
            raise unexpected_answer_error("read", path)
        if not response.is_filled:  # it has another number of bytes
            raise CorruptCheckpointError(
                f"{path} ends inside of bytes {offset} to {offset + len(into)}: it is truncated"
            )
        return response.headers.get("etag", "")

    def get_start(self, path: ObjectPath, limit: int) -> tuple[bytes, int, str]:
        """See :class:`~rankless.storage.object_reader.RangeSource`."""
        response = self._get_start(path, limit)
        if response is None:
            return b"", 0, ""
        return response.body, _find_range(response, path)[1], response.headers.get("etag", "")

    def _get_start(self, path: ObjectPath, limit: int) -> ObjectResponse | None:
        """Request an object, or its first ``limit`` bytes; ``None`` if it is empty."""
        try:
            response = self._get(path, [("range", f"bytes=0-{limit - 1}")], limit=limit)
        except RefusedRequestError as error:
            if error.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                return None
            raise
        start, size = _find_range(response, path)
        if start or len(response.body) != min(size, limit):
            raise unexpected_answer_error("read", path)
        return response


def _check_size(path: Path, response: ObjectResponse, limit: int) -> None:
    if _find_range(response, as_object(path))[1] > limit:
        raise StorageError(errno.EFBIG, f"could not read {path}: it has more than {limit} bytes")


def _find_range(response: ObjectResponse, path: ObjectPath) -> tuple[int, int]:
    """Return the first byte of an answer, and the size of the object.

    For example, ``content-range: bytes 100-199/500`` gives 100 and 500.
    """
    if response.status == HTTPStatus.OK:  # the whole object
        return 0, int(response.headers.get("content-length") or len(response.body))
    match = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
    if response.status != HTTPStatus.PARTIAL_CONTENT or match is None:
        raise unexpected_answer_error("read", path)
    return int(match[1]), int(match[2])


def _last_name(key: str) -> str:
    return key.rstrip("/").rpartition("/")[2]
