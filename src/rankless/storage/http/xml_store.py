"""``XmlStore``: all that stores with an XML API have in common. Their checks of the bytes differ.

It relies only on behaviour that all such servers have: ``docs/object-stores.md`` lists the servers that were tried. A
refusal that should have come may not come, so all that matters is compared with the server's state afterwards.

``S3`` and ``GCS`` inherit from it. Receipts of parts are texts, which saves pass from rank to rank:
:meth:`XmlStore.complete_upload` takes them apart, on rank 0 (:mod:`rankless.save.shared_upload`), or in the process
that has sent the parts, such as each rank of a DCP save (:mod:`rankless.engine.io.upload_files`). Worker threads send
parts and complete uploads at the same time: methods must be safe to call from several threads. Conditional writes
decide which of two jobs commits: a refusal must be distinguished from the effect of an earlier attempt.

*Trusted* are the condition of a creation (``If-None-Match: *``; Google: ``x-goog-if-generation-match: 0``), and of a
deletion the ETag that was listed, because a low number of a pointer may be free again.

*Checked* is that an answer is whole, with all its headers (``http.client`` takes the end of a connection for their
end), and has the right root element, range and id; otherwise it is asked for again. Checksums that the server reports
are compared, or the MD5 in the ETag. A lost reply is decided by the object that is there; if that stays unknown, the
files stay. An upload without a reply to its creation is aborted below a name of its own. At a shared name, of a
conversion or a component, it stays, without bytes, until a save there finds it a day old.
"""

from __future__ import annotations

import errno
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote_plus
from xml.sax.saxutils import escape

from rankless.errors import StorageError, TagExistsError
from rankless.storage.body import Body
from rankless.storage.http.client import ObjectResponse, RefusedRequestError, unexpected_answer_error
from rankless.storage.http.xml import find_text, local_name, parse_time, parse_xml
from rankless.storage.http.xml_requests import XmlRequests
from rankless.storage.object_path import ObjectPath, as_object, is_canonical, make_object_path
from rankless.storage.store import ObjectInfo, Upload

#: How often a conditional write is sent again if the server could not decide it, and the seconds between.
_CONFLICTS, _CONFLICT_SECONDS = 20, 0.2

#: How often a body is sent if the server says that it has received other bytes.
_SENDS = 3

#: The codes of refusals of a body that does not match its checksum.
_DIGEST_CODES = frozenset({"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch"})

#: The text between the ETag of a part and its checksums in a receipt. No header contains it.
_SEPARATOR = "\t"


class BodyChecksums(NamedTuple):
    """The headers that let a server check a body, and the record of it for the completion of an upload."""

    headers: Sequence[tuple[str, str]]
    record: Sequence[str] = ()


class XmlStore(XmlRequests):
    """A store with an XML API, as a :class:`~rankless.storage.store.ObjectStore`."""

    @abstractmethod
    def _checksums(self, body: Body) -> BodyChecksums:
        """Return the checksums of a body."""

    @abstractmethod
    def _is_received(self, response: ObjectResponse, body: Body) -> bool:
        """Return false if the answer to a body says that the server has received other bytes."""

    @abstractmethod
    def _upload_headers(self) -> Sequence[tuple[str, str]]:
        """Return the headers of a new upload that name the checksum of the object."""

    @abstractmethod
    def _completion_headers(self, size: int, crc64nvme: int) -> Sequence[tuple[str, str]]:
        """Return the headers that let a server check the object that it makes of the parts."""

    @abstractmethod
    def _check_completed(
        self, path: ObjectPath, records: Sequence[Sequence[str]], size: int, crc64nvme: int, answer: bytes
    ) -> None:
        """Raise ``StorageError`` if an object is not as it was sent. ``records`` has its parts' records, in order.

        ``answer`` is the server's answer; it is empty if it was lost.
        """

    @abstractmethod
    def _copy_headers(self) -> Sequence[tuple[str, str]]:
        """Return the headers of a copy that name the checksum of the object."""

    @abstractmethod
    def _is_copied(self, source: Mapping[str, str], target: ObjectPath, answer: bytes, crc64nvme: int) -> bool:
        """Return false if the server says that a copy has other bytes than its source.

        ``source`` are the headers of the source, and ``answer`` is that to the request for the copy.
        """

    @abstractmethod
    def _version_condition(self, headers: Mapping[str, str]) -> tuple[str, str]:
        """Return the header of a request for this version of an object only. ``headers`` are the object's."""

    def path(self, location: str) -> ObjectPath:
        """Return the path of ``"bucket/name"`` in this store. Raises ``InvalidArgumentError``."""
        return make_object_path(self, location)

    # Methods for reads: see Store.

    def _list_entries(self, folder: ObjectPath) -> Iterator[str]:
        for page in self._list_pages(folder, delimiter="/"):
            for element in page:
                if local_name(element) in {"Contents", "CommonPrefixes"}:
                    yield unquote_plus(find_text(element, "Key") or find_text(element, "Prefix"))

    def is_directory(self, path: Path) -> bool:
        """See :class:`~rankless.storage.store.Store`."""
        return any(local_name(element) == "Contents" for element in self._list_page(as_object(path), "", "", 1))

    def replace_small(self, path: Path, data: bytes) -> None:
        """See :class:`~rankless.storage.store.Store`."""
        self.put_object(as_object(path), Body.of(data))

    def remove_file(self, path: Path) -> None:
        """See :class:`~rankless.storage.store.Store`. A missing object is no error."""
        try:
            self._send("DELETE", as_object(path), "delete", self.permissions.delete)
        except RefusedRequestError as error:
            if error.code != "NoSuchKey":
                raise

    # Methods for saves: see ObjectStore.

    def remove_version(self, path: ObjectPath, etag: str) -> None:
        """See :class:`~rankless.storage.store.ObjectStore`. Some servers ignore the condition, so look first."""
        found = self._find_if(path, etag)
        if found is None:
            return
        permission, condition = self.permissions.delete, self._version_condition(found.headers)
        try:
            self._send("DELETE", path, "delete", permission, {}, (condition,))
        except RefusedRequestError as error:
            if error.status == HTTPStatus.NOT_IMPLEMENTED:
                self.remove_file(path)
            elif error.status not in {HTTPStatus.NOT_FOUND, HTTPStatus.PRECONDITION_FAILED}:
                raise

    def put_object(self, path: ObjectPath, body: Body) -> str:
        """See :class:`~rankless.storage.store.ObjectStore`."""
        return self._send_until_received(path, lambda: self._put(path, body), body).headers["etag"]

    def list_objects(self, prefix: ObjectPath) -> list[ObjectInfo]:
        """See :class:`~rankless.storage.store.ObjectStore`."""
        listed = (element for page in self._list_pages(prefix) for element in page)
        contents = (element for element in listed if local_name(element) == "Contents")
        try:
            return [
                ObjectInfo(
                    self._path_of(prefix.bucket, key),
                    int(find_text(element, "Size")),
                    find_text(element, "ETag"),
                    parse_time(find_text(element, "LastModified")),
                )
                for element in contents
                if is_canonical(key := unquote_plus(find_text(element, "Key")))
            ]
        except ValueError as error:
            raise unexpected_answer_error("list", prefix) from error

    def create_object(self, path: ObjectPath, data: bytes) -> bool:
        """See :class:`~rankless.storage.store.ObjectStore`.

        If an earlier attempt may have had its effect, the object that is there tells by its bytes who has created it.
        So ``data`` must differ from the bytes that other processes write.
        """
        return self._put_if(path, data, self.dialect.creation_condition)

    def replace_version(self, path: ObjectPath, etag: str, data: bytes) -> bool:
        """See :class:`~rankless.storage.store.ObjectStore`."""
        found = self._find_if(path, etag)
        if found is None:
            return False
        try:
            if self._put_if(path, data, self._version_condition(found.headers)):
                return True
            if self._find_if(path, etag) is None:
                return False
            # It is still this version: the server refuses all versions, as Ceph 16 does.
        except RefusedRequestError as error:
            if error.code == "NoSuchKey":  # it was removed meanwhile
                return False
            if error.status != HTTPStatus.NOT_IMPLEMENTED:
                raise
        self.replace_small(path, data)
        return True

    def _put_if(self, path: ObjectPath, data: bytes, condition: tuple[str, str]) -> bool:
        """Write an object under a condition. Return whether this call did."""
        for conflicts in range(_CONFLICTS):
            try:
                self._put(path, Body.of(data), (condition,))
            except RefusedRequestError as error:
                if error.status == HTTPStatus.CONFLICT:  # another write of this key is in progress
                    time.sleep(_CONFLICT_SECONDS)
                    continue
                if error.status != HTTPStatus.PRECONDITION_FAILED:
                    raise
                return (error.is_repeated or conflicts > 0) and self.read_small(path) == data
            else:
                return True
        raise StorageError(errno.EBUSY, f"could not write {path}: other processes write it all the time")

    def copy_object(self, source: ObjectPath, etag: str, target: ObjectPath, crc64nvme: int) -> str:
        """See :class:`~rankless.storage.store.ObjectStore`."""
        name, source_headers = self.dialect.copy_source, dict[str, str]()

        def headers_for(found: ObjectResponse) -> Sequence[tuple[str, str]]:
            source_headers.update(found.headers)
            own = (name, quote(f"/{source.bucket}/{source.key}")), (f"{name}-if-match", found.headers["etag"])
            return *own, *self._copy_headers(), *self._creation_headers()

        answer = self._copy(source, etag, target, headers_for, root="CopyObjectResult").body
        if not self._is_copied(source_headers, target, answer, crc64nvme):
            raise StorageError(errno.EIO, f"{target} has other bytes than {source}, of which it is a copy")
        return find_text(parse_xml(answer), "ETag") or self.find_version(target) or ""

    def create_upload(self, path: ObjectPath, notes: Mapping[str, str]) -> Upload:
        """See :class:`~rankless.storage.store.ObjectStore`."""
        stored = [(f"{self.dialect.note_prefix}{name}", value) for name, value in notes.items()]
        headers = (*stored, *self._upload_headers(), *self._creation_headers())
        action, permission = "begin the upload of", self.permissions.upload
        root = "InitiateMultipartUploadResult"
        response = self._send("POST", path, action, permission, {"uploads": ""}, headers, root=root)
        upload_id = find_text(parse_xml(response.body), "UploadId")
        if not upload_id:
            raise unexpected_answer_error(action, path)
        return Upload(path, upload_id)

    def put_part(self, upload: Upload, number: int, body: Body) -> str:
        """See :class:`~rankless.storage.store.ObjectStore`."""
        checksums = self._checksums(body)
        query, permission = {"partNumber": str(number), "uploadId": upload.id}, self.permissions.upload

        def send() -> ObjectResponse:
            return self._send(
                "PUT", upload.path, "upload a part of", permission, query, checksums.headers, body=body.pieces
            )

        response = self._send_until_received(upload.path, send, body)
        return _SEPARATOR.join((response.headers["etag"], *checksums.record))

    def complete_upload(
        self, upload: Upload, receipts: Sequence[str], size: int, crc64nvme: int, *, is_new: bool = False
    ) -> str:
        """See :class:`~rankless.storage.store.ObjectStore`."""
        parts = [receipt.split(_SEPARATOR) for receipt in receipts]
        listed = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(part[0])}</ETag></Part>"
            for number, part in enumerate(parts, 1)
        )
        completion = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        headers, answer = self._completion_headers(size, crc64nvme), b""
        conditions = [(self.dialect.creation_condition,), ()] if is_new else [()]
        try:
            answer = self._complete(upload, completion, headers, conditions)
        except RefusedRequestError as error:
            if error.status == HTTPStatus.PRECONDITION_FAILED and not error.is_repeated:
                raise TagExistsError(
                    f"{upload.path} exists already; choose another path, or remove it first"
                ) from error
            # The answer to an earlier attempt may have been lost. No other upload has this key, or this id.
            is_lost = error.status in {HTTPStatus.NOT_FOUND, HTTPStatus.PRECONDITION_FAILED}
            if not error.is_repeated or not is_lost or self.file_size(upload.path) != size:
                raise
        self._check_completed(upload.path, [part[1:] for part in parts], size, crc64nvme, answer)
        return find_text(parse_xml(answer), "ETag") or self.find_version(upload.path) or ""

    def _complete(
        self,
        upload: Upload,
        completion: bytes,
        headers: Sequence[tuple[str, str]],
        conditions: Sequence[Sequence[tuple[str, str]]],
    ) -> bytes:
        """Send the request, under the first of some conditions that the server knows. Return its answer."""
        for number, condition in enumerate(conditions, 1):
            try:
                return self._send(
                    "POST",
                    upload.path,
                    "complete",
                    self.permissions.upload,
                    {"uploadId": upload.id},
                    (*headers, *condition),
                    body=(memoryview(completion),),
                    root="CompleteMultipartUploadResult",
                ).body
            except RefusedRequestError as error:
                is_unknown = error.status in {HTTPStatus.NOT_IMPLEMENTED, HTTPStatus.BAD_REQUEST}
                if not is_unknown or number == len(conditions):
                    raise
        raise AssertionError("the last condition is none")

    def find_noted(self, path: ObjectPath, notes: Mapping[str, str]) -> str | None:
        """See :class:`~rankless.storage.store.ObjectStore`."""
        return self._find_noted(path, notes, self.dialect.note_prefix)

    def abort_upload(self, upload: Upload) -> None:
        """See :class:`~rankless.storage.store.ObjectStore`."""
        permission, query = self.permissions.abort, {"uploadId": upload.id}
        try:
            self._send("DELETE", upload.path, "abort the upload of", permission, query)
        except RefusedRequestError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise

    def list_uploads(self, prefix: ObjectPath) -> list[tuple[Upload, float]]:
        """See :class:`~rankless.storage.store.ObjectStore`."""
        uploads: list[tuple[Upload, float]] = []
        query = {"uploads": "", "prefix": f"{prefix.key}/" if prefix.key else "", "encoding-type": "url"}
        while True:
            action = "list the uploads below"
            permission = self.permissions.list_uploads
            response = self._send_to_bucket(prefix, action, permission, query, "ListMultipartUploadsResult")
            for element in parse_xml(response.body):
                if local_name(element) == "Upload":
                    path = self._path_of(prefix.bucket, unquote_plus(find_text(element, "Key")))
                    uploads.append(
                        (Upload(path, find_text(element, "UploadId")), parse_time(find_text(element, "Initiated")))
                    )
            if find_text(parse_xml(response.body), "IsTruncated") != "true":
                return uploads
            query["key-marker"] = unquote_plus(find_text(parse_xml(response.body), "NextKeyMarker"))
            query["upload-id-marker"] = find_text(parse_xml(response.body), "NextUploadIdMarker")

    def _send_until_received(self, path: ObjectPath, send: Callable[[], ObjectResponse], body: Body) -> ObjectResponse:
        """Send a body again if the server says that it has received other bytes. Return its answer."""
        for _ in range(_SENDS):
            try:
                response = send()
            except RefusedRequestError as error:
                if error.code not in _DIGEST_CODES:
                    raise
            else:
                if "etag" in response.headers and self._is_received(response, body):
                    return response
        raise StorageError(
            errno.EIO,
            f"the server has received other bytes of {path} than were sent, {_SENDS} times: "
            "check the network, and let no thread change tensors while they are saved",
        )

    def _put(self, path: ObjectPath, body: Body, headers: tuple[tuple[str, str], ...] = ()) -> ObjectResponse:
        headers = (*self._checksums(body).headers, *headers, *self._creation_headers())
        return self._send("PUT", path, "write", self.permissions.write, {}, headers, body=body.pieces)
