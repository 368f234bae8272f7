"""``Azure``: the containers of an account of Azure Blob Storage.

Blocks are uploaded under the key of their object: see :mod:`rankless.storage.azure.uncommitted_blocks`. So of two
uploads to one key at a time, the one that ends first wins, and the other one fails: its blocks are discarded.

``az://`` URLs mean it (:mod:`rankless.storage.location`); each rank has the store of its own process, and any rank may
send parts of an upload that rank 0 has begun. A block without the mark of its upload must never become a part of an
object.
"""

from __future__ import annotations

import base64
import errno
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from rankless.errors import InvalidArgumentError, StorageError, TagExistsError
from rankless.storage.azure.azure_credentials import TokenFunction, check_credentials
from rankless.storage.azure.azure_dialect import AzureService, split_endpoint
from rankless.storage.azure.environment import find_credentials, read_environment
from rankless.storage.azure.uncommitted_blocks import (
    MARK,
    MARK_DATA,
    NOTE,
    block_name,
    build_block_list,
    find_uploads,
    make_upload_id,
    note_headers,
    parse_block_list,
)
from rankless.storage.body import Body
from rankless.storage.http.client import (
    ObjectClient,
    ObjectResponse,
    RefusedRequestError,
    unexpected_answer_error,
)
from rankless.storage.http.object_reads import ObjectReads, Permissions
from rankless.storage.http.settings import check_connection_settings
from rankless.storage.http.xml import find_text, local_name, parse_xml
from rankless.storage.object_path import ObjectPath, as_object, is_canonical, make_object_path, path_class
from rankless.storage.store import ObjectInfo, Upload

#: A role, or a letter of a shared access signature.
_READ = "Storage Blob Data Reader, or r in a shared access signature"
_LIST = "Storage Blob Data Reader, or l in a shared access signature"
_WRITE = "Storage Blob Data Contributor, or w in a shared access signature"
_DELETE = "Storage Blob Data Contributor, or d in a shared access signature"

_PERMISSIONS = Permissions(
    read=_READ,
    inspect=_READ,
    list=_LIST,
    write=_WRITE,
    upload=_WRITE,
    delete=_DELETE,
    abort=_WRITE,
    list_uploads=_LIST,
)

#: The headers that blocks need as well as the objects that are made of them.
_HEADERS_OF_BLOCKS = frozenset({"x-ms-encryption-scope"})

#: The note of an empty object that has taken the place of an aborted upload, until it is deleted.
_ABORTED = f"{NOTE}aborted"

#: The header with the state of a copy, the most seconds that one may take, and those between two looks.
_COPY_STATUS, _COPY_SECONDS, _COPY_POLL_SECONDS = "x-ms-copy-status", 300.0, 0.5

#: The codes of a write that its condition forbids.
_REFUSED = frozenset({"BlobAlreadyExists", "ConditionNotMet"})


@dataclass(frozen=True)
class Azure(ObjectReads):
    """The blob containers of a storage account of Azure.

    A URL ``az://container/run`` means :meth:`from_environment`. To pass settings, make a path with :meth:`path`, and
    use it wherever a path is accepted: ``rankless.save_checkpoint(Azure("account").path("container/run"), …)``.

    Args:
        account: The name of the storage account.
        endpoint: The URL of the server; by default ``https://ACCOUNT.blob.core.windows.net``.
        credentials: A key of the account, or a shared access signature, or a function that returns a token of Microsoft
            Entra ID, such as ``azure.identity.get_bearer_token_provider(…)``. By default tokens of
            ``DefaultAzureCredential``, from the package ``azure-identity``.
        ca_file: A file with the certificates of authorities to trust, instead of the system's.
        headers: Further headers of requests that create objects, such as ``x-ms-access-tier`` and
            ``x-ms-encryption-scope``.
        timeout: The number of seconds without any byte after which a connection counts as broken.
        retry_seconds: For how many seconds a request that fails is repeated.

    Raises:
        InvalidArgumentError: An argument is invalid.
    """

    account: str
    endpoint: str | None = None
    credentials: str | TokenFunction | None = field(default=None, repr=False)
    ca_file: str | None = None
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    timeout: float = 60.0
    retry_seconds: float = 120.0

    scheme = "az"
    permissions = _PERMISSIONS

    def __post_init__(self) -> None:
        if not isinstance(self.account, str) or not self.account.isalnum():
            raise InvalidArgumentError(f"account must be the name of a storage account; got {self.account!r}")
        if self.endpoint is not None:
            try:
                split_endpoint(self.endpoint)
            except ValueError:
                raise InvalidArgumentError(
                    "endpoint must be a URL such as 'https://account.blob.core.windows.net', without a user and a "
                    "query: pass a shared access signature as credentials"
                ) from None
        check_connection_settings(self)
        object.__setattr__(self, "credentials", check_credentials(self.credentials))

    @classmethod
    def from_environment(cls) -> Azure:
        """Return the account that the variables of Azure's tools describe.

        These are ``AZURE_STORAGE_CONNECTION_STRING``, or ``AZURE_STORAGE_ACCOUNT`` with ``AZURE_STORAGE_KEY`` or
        ``AZURE_STORAGE_SAS_TOKEN``. Without a key or a signature, ``azure-identity`` is asked for a token when one is
        needed. Raises ``StorageError`` if no account is named.
        """
        return cls(*read_environment(os.environ))

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave out credentials of the environment: where the store is unpickled, they are looked up again."""
        if self.credentials is None or self.credentials != _find_credentials(self.account):
            return super().__reduce__()  # type: ignore[return-value]
        return _restore, (replace(self, credentials=None),)

    def path(self, location: str) -> ObjectPath:
        """Return the path of ``"container/name"`` in this account. Raises ``InvalidArgumentError``."""
        return make_object_path(self, location)

    # Methods for reads: see Store.

    def _list_entries(self, folder: ObjectPath) -> Iterator[str]:
        return (find_text(element, "Name") for element in self._list_blobs(folder, {"delimiter": "/"}))

    def is_directory(self, path: Path) -> bool:
        """See :class:`~rankless.storage.store.Store`."""
        return any(True for _ in self._list_blobs(as_object(path), {"maxresults": "1"}))

    def replace_small(self, path: Path, data: bytes) -> None:
        """See :class:`~rankless.storage.store.Store`."""
        self._put(as_object(path), Body.of(data))

    def remove_file(self, path: Path) -> None:
        """See :class:`~rankless.storage.store.Store`. A missing object is no error."""
        self._delete(as_object(path))

    # Methods for saves: see ObjectStore.

    def remove_version(self, path: ObjectPath, etag: str) -> None:
        """See :class:`~rankless.storage.store.ObjectStore`."""
        found = self._find_if(path, etag)
        if found is None:
            return
        try:
            self._delete(path, (("if-match", found.headers["etag"]),))
        except RefusedRequestError as error:
            if error.code != "ConditionNotMet":  # else it is another version; with a lease it is still this one
                raise

    def put_object(self, path: ObjectPath, body: Body) -> str:
        """See :class:`~rankless.storage.store.ObjectStore`."""
        return self._put(path, body).headers["etag"]

    def list_objects(self, prefix: ObjectPath) -> list[ObjectInfo]:
        """See :class:`~rankless.storage.store.ObjectStore`."""
        return [
            ObjectInfo(
                self._path_of(prefix, element),
                int(_find_property(element, "Content-Length")),
                _find_property(element, "Etag"),
                _parse_time(_find_property(element, "Last-Modified")),
            )
            for element in self._list_blobs(prefix, {})
            if is_canonical(find_text(element, "Name"))
        ]

    def create_object(self, path: ObjectPath, data: bytes) -> bool:
        """See :class:`~rankless.storage.store.ObjectStore`.

        If the answer was lost, the object that is there tells by its bytes who has created it. So ``data`` must differ
        from the bytes that other processes write.
        """
        return self._put_if(path, data, ("if-none-match", "*"))

    def replace_version(self, path: ObjectPath, etag: str, data: bytes) -> bool:
        """See :class:`~rankless.storage.store.ObjectStore`."""
        found = self._find_if(path, etag)
        return found is not None and self._put_if(path, data, ("if-match", found.headers["etag"]))

    def _put_if(self, path: ObjectPath, data: bytes, condition: tuple[str, str]) -> bool:
        """Write an object under a condition. Return whether this call did."""
        try:
            self._put(path, Body.of(data), (condition,))
        except RefusedRequestError as error:
            if error.code not in _REFUSED:
                raise
            return error.is_repeated and self.read_small(path) == data
        return True

    def copy_object(self, source: ObjectPath, etag: str, target: ObjectPath, crc64nvme: int) -> str:  # noqa: ARG002
        """See :class:`~rankless.storage.store.ObjectStore`. The server tells no CRC of a copy.

        Of an account it copies at once, or says that it has begun. A shared access signature does not allow it.
        """

        def headers_for(found: ObjectResponse) -> Sequence[tuple[str, str]]:
            condition = ("x-ms-source-if-match", found.headers["etag"])
            return ("x-ms-copy-source", _service_of(self).url_of(source)), condition, *self.headers

        copied = self._copy(source, etag, target, headers_for, needs=("etag", _COPY_STATUS))
        deadline = time.monotonic() + _COPY_SECONDS
        while copied.headers.get(_COPY_STATUS) == "pending" and time.monotonic() < deadline:
            time.sleep(_COPY_POLL_SECONDS)
            copied = self._head(target) or copied
        if copied.headers.get(_COPY_STATUS) != "success":
            raise StorageError(errno.EIO, f"the copy of {source} to {target} is {copied.headers.get(_COPY_STATUS)}")
        return copied.headers["etag"]

    def create_upload(self, path: ObjectPath, notes: Mapping[str, str]) -> Upload:
        """See :class:`~rankless.storage.store.ObjectStore`. The notes and the id have at most 57 characters."""
        upload = Upload(path, make_upload_id(notes))
        self.put_part(upload, MARK, Body.of(MARK_DATA))
        return upload

    def put_part(self, upload: Upload, number: int, body: Body) -> str:
        """See :class:`~rankless.storage.store.ObjectStore`. Returns the name of the block, which has no ETag."""
        name = block_name(upload.id, number)
        headers = [header for header in self.headers if header[0] in _HEADERS_OF_BLOCKS]
        headers.append(_checksum_header(body.crc64nvme))
        query = {"comp": "block", "blockid": name}
        self._send("PUT", upload.path, "upload a part of", _WRITE, query, headers, body=body.pieces)
        return name

    def find_noted(self, path: ObjectPath, notes: Mapping[str, str]) -> str | None:
        """See :class:`~rankless.storage.store.ObjectStore`."""
        return self._find_noted(path, notes, NOTE)

    def complete_upload(
        self,
        upload: Upload,
        receipts: Sequence[str],
        size: int,
        crc64nvme: int,  # noqa: ARG002 - see below
        *,
        is_new: bool = False,
    ) -> str:
        """See :class:`~rankless.storage.store.ObjectStore`. The server checks the CRC of each block only."""
        blocks = self._list_blocks(upload.path)
        if block_name(upload.id, MARK) not in blocks:
            raise StorageError(
                errno.ENOENT,
                f"could not complete {upload.path}: its upload was aborted, or the blob written by another process",
            )
        if sum(blocks.get(name, 0) for name in receipts) != size:
            raise StorageError(errno.EIO, f"{upload.path} has other blocks than were sent: save again")
        try:
            condition = (("if-none-match", "*"),) if is_new else ()
            headers = (*note_headers(upload.id), *condition)
            return self._put_block_list(upload.path, receipts, headers).headers["etag"]
        except RefusedRequestError as error:
            # The answer to an earlier attempt may have been lost.
            completed = self._find_completed(upload, size) if error.is_repeated else None
            if completed is None and is_new and error.code in _REFUSED:
                raise TagExistsError(
                    f"{upload.path} exists already; choose another path, or remove it first"
                ) from error
            if completed is None:
                raise
            return completed

    def abort_upload(self, upload: Upload) -> None:
        """See :class:`~rankless.storage.store.ObjectStore`.

        An empty object takes the place of the blocks, unless the object exists, and is deleted.
        """
        try:
            aborted = (("if-none-match", "*"), (_ABORTED, "true"))
            etag = self._put_block_list(upload.path, [], aborted).headers["etag"]
        except RefusedRequestError as error:
            if error.code not in _REFUSED:
                raise
            response = self._head(upload.path)
            if response is None or _ABORTED not in response.headers:
                return
            etag = response.headers["etag"]
        try:
            self._delete(upload.path, (("if-match", etag),))
        except RefusedRequestError as error:
            if error.code != "ConditionNotMet":  # else another process has aborted it too
                raise

    def list_uploads(self, prefix: ObjectPath) -> list[tuple[Upload, float]]:
        """See :class:`~rankless.storage.store.ObjectStore`.

        An empty object is one, too, if the process that has put it in place of the blocks died before it deleted it.
        """
        return [
            (Upload(path, upload), _parse_time(_find_property(element, "Last-Modified")))
            for element in self._list_blobs(prefix, {"include": "metadata,uncommittedblobs"})
            if _find_property(element, "Content-Length") == "0"
            for path in [self._path_of(prefix, element)]
            for upload in self._find_uploads(path, element)
        ]

    def _find_uploads(self, path: ObjectPath, element: Element) -> list[str]:
        """Return the ids of the uploads of an object that has no bytes; one without an id if it was aborted."""
        if _find_property(element, _ABORTED.removeprefix("x-ms-meta-")):
            return [""]
        return sorted(find_uploads(self._list_blocks(path)))

    # Requests.

    def _client(self) -> ObjectClient:
        return _client_of(self)

    def _put(self, path: ObjectPath, body: Body, headers: tuple[tuple[str, str], ...] = ()) -> ObjectResponse:
        own = _checksum_header(body.crc64nvme), ("x-ms-blob-type", "BlockBlob")
        return self._send(
            "PUT", path, "write", _WRITE, {}, (*own, *headers, *self.headers), body=body.pieces, needs=("etag",)
        )

    def _delete(self, path: ObjectPath, headers: tuple[tuple[str, str], ...] = ()) -> None:
        try:
            self._send("DELETE", path, "delete", _DELETE, {}, (("x-ms-delete-snapshots", "include"), *headers))
        except RefusedRequestError as error:
            if error.code != "BlobNotFound":
                raise

    def _list_blocks(self, path: ObjectPath) -> dict[str, int]:
        """Return the sizes of the uncommitted blocks of an object, by their names."""
        try:
            query = {"comp": "blocklist", "blocklisttype": "uncommitted"}
            response = self._send("GET", path, "inspect the parts of", _READ, query, root="BlockList")
            return parse_block_list(response.body)
        except RefusedRequestError as error:
            if error.code != "BlobNotFound":
                raise
            return {}

    def _put_block_list(
        self, path: ObjectPath, names: Sequence[str], headers: tuple[tuple[str, str], ...]
    ) -> ObjectResponse:
        """Make an object of blocks, in place of the one that is there, if any. All other blocks are discarded."""
        body = Body.of(build_block_list(names))
        headers = _checksum_header(body.crc64nvme), *headers, *self.headers
        return self._send(
            "PUT", path, "complete", _WRITE, {"comp": "blocklist"}, headers, body=body.pieces, needs=("etag",)
        )

    def _find_completed(self, upload: Upload, size: int) -> str | None:
        """Return the ETag of the object that an upload has made; ``None`` if there is none, or another one."""
        response = self._head(upload.path)
        if response is None or response.headers["content-length"] != str(size):
            return None
        is_made = all(response.headers.get(name) == value for name, value in note_headers(upload.id))
        return response.headers["etag"] if is_made else None

    def _list_blobs(self, folder: ObjectPath, options: Mapping[str, str]) -> Iterator[Element]:
        """Yield the blobs and the common prefixes below a folder. A page may be empty though there are more."""
        query = {"restype": "container", "comp": "list", "prefix": f"{folder.key}/" if folder.key else "", **options}
        container = path_class(self)(f"/{folder.bucket}")
        while True:
            action, marker = f"list {folder.key or 'the root'} in", query.get("marker", "")
            response = self._send("GET", container, action, _LIST, query, root="EnumerationResults")
            page = list(parse_xml(response.body))
            yield from (element for element in page if local_name(element) in {"Blob", "BlobPrefix"})
            query["marker"] = find_text(page, "NextMarker")
            if not query["marker"]:
                return
            if query["marker"] == marker:
                raise unexpected_answer_error("list", folder)

    def _path_of(self, prefix: ObjectPath, element: Element) -> ObjectPath:
        return path_class(self)(f"/{prefix.bucket}/{find_text(element, 'Name')}")


def _find_credentials(account: str) -> str | TokenFunction | None:
    return check_credentials(find_credentials(os.environ, account))


def _restore(store: Azure) -> Azure:
    """Return a store that was pickled without its credentials."""
    return replace(store, credentials=_find_credentials(store.account))


@cache
def _client_of(store: Azure) -> ObjectClient:
    """Return the client of a store, which all equal stores of this process share."""
    return ObjectClient(
        _service_of(store), ca_file=store.ca_file, timeout=store.timeout, retry_seconds=store.retry_seconds
    )


@cache
def _service_of(store: Azure) -> AzureService:
    return AzureService(store.account, store.endpoint, store.credentials)


def _checksum_header(crc: int) -> tuple[str, str]:
    """Return the header that lets the server check a body: the bytes of the CRC, the lowest one first."""
    return "x-ms-content-crc64", base64.b64encode(crc.to_bytes(8, "little")).decode()


def _find_property(element: Element, name: str) -> str:
    return find_text(element.iter(), name)


def _parse_time(text: str) -> float:
    """Return a time in seconds since 1970. Without one, an upload counts as new: the server removes it in a week."""
    return parsedate_to_datetime(text).timestamp() if text else time.time()
