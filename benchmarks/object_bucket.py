"""The objects of the benchmark's server, and its answers in the form of S3's. It checks no signatures and checksums."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from urllib.parse import quote, unquote
from xml.sax.saxutils import escape

from rankless.storage.http.xml import find_text, local_name, parse_xml

_CRC = "x-amz-checksum-crc64nvme"


@dataclass(frozen=True)
class Request:
    """A request with its whole body. The names of headers are in lower case; trailers are among them."""

    method: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytearray

    @property
    def kind(self) -> str:
        """The name of the operation."""
        named = next((name for name in ("uploads", "uploadId", "delete", "list-type") if name in self.query), "")
        if self.method == "PUT" and "x-amz-copy-source" in self.headers:
            return "COPY"
        return " ".join(filter(None, (self.method, named, "" if self.key else "bucket")))


@dataclass(frozen=True)
class Answer:
    """An answer. The body is sent piece by piece; ``length`` is that of a body which is not sent."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Sequence[memoryview] = ()
    length: int | None = None


@dataclass(frozen=True)
class StoredObject:
    """An object: the bodies of the requests that it was made of."""

    pieces: Sequence[bytearray]
    etag: str
    crc: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)
    time: float = field(default_factory=time.time)

    @property
    def size(self) -> int:
        """The number of bytes."""
        return sum(map(len, self.pieces))

    def read_range(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes from ``start`` to ``stop``."""
        at = 0
        for piece in self.pieces:
            if at < stop and start < at + len(piece):
                yield memoryview(piece)[max(0, start - at) : stop - at]
            at += len(piece)


@dataclass(frozen=True)
class Upload:
    """An upload of an object in parts."""

    key: str
    notes: Mapping[str, str]
    parts: dict[int, StoredObject] = field(default_factory=dict)
    time: float = field(default_factory=time.time)


class Bucket:
    """One bucket, which has every name."""

    def __init__(self) -> None:
        self._objects: dict[str, StoredObject] = {}
        self._uploads: dict[str, Upload] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._operations = {
            "PUT": self._put,
            "COPY": self._copy,
            "GET": self._get,
            "HEAD": self._head,
            "DELETE": self._delete,
            "POST uploads": self._create_upload,
            "PUT uploadId": self._put_part,
            "POST uploadId": self._complete_upload,
            "DELETE uploadId": self._abort_upload,
            "GET list-type bucket": self._list_objects,
            "GET uploads bucket": self._list_uploads,
            "POST delete bucket": self._delete_several,
            "DELETE bucket": self._clear,
            "HEAD bucket": lambda _: Answer(200),
        }

    def answer(self, request: Request) -> Answer:
        """Do what a request asks for."""
        operation = self._operations.get(request.kind)
        if operation is None:
            return _refuse(HTTPStatus.NOT_IMPLEMENTED, "NotImplemented")
        with self._lock:
            return operation(request)

    def _put(self, request: Request) -> Answer:
        if request.headers.get("if-none-match") == "*" and request.key in self._objects:
            return _refuse(HTTPStatus.PRECONDITION_FAILED, "PreconditionFailed")
        self._objects[request.key] = stored = self._store(request)
        return Answer(200, {"etag": stored.etag, **_find_checksums(request)})

    def _store(self, request: Request) -> StoredObject:
        return StoredObject([request.body], self._make_etag(), request.headers.get(_CRC, ""), _find_notes(request))

    def _make_etag(self) -> str:
        return f'"{next(self._numbers):x}-1"'

    def _copy(self, request: Request) -> Answer:
        source = unquote(request.headers["x-amz-copy-source"]).lstrip("/").partition("/")[2]
        if source not in self._objects:
            return _refuse(HTTPStatus.NOT_FOUND, "NoSuchKey")
        self._objects[request.key] = stored = self._objects[source]
        etag, date = escape(stored.etag), _format_time(stored.time)
        return _build_xml("CopyObjectResult", f"<ETag>{etag}</ETag><LastModified>{date}</LastModified>")

    def _head(self, request: Request) -> Answer:
        stored = self._objects.get(request.key)
        if stored is None:
            return Answer(404, length=0)
        return Answer(200, _describe(stored, request), length=stored.size)

    def _get(self, request: Request) -> Answer:
        stored = self._objects.get(request.key)
        if stored is None:
            return _refuse(HTTPStatus.NOT_FOUND, "NoSuchKey")
        if request.headers.get("if-match", stored.etag).strip('"') != stored.etag.strip('"'):
            return _refuse(HTTPStatus.PRECONDITION_FAILED, "PreconditionFailed")
        headers, size = _describe(stored, request), stored.size
        if "range" not in request.headers:
            return Answer(200, headers, tuple(stored.read_range(0, size)))
        start, stop = _parse_range(request.headers["range"], size)
        if start >= stop:
            return _refuse(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "InvalidRange")
        headers["content-range"] = f"bytes {start}-{stop - 1}/{size}"
        return Answer(206, headers, tuple(stored.read_range(start, stop)))

    def _delete(self, request: Request) -> Answer:
        self._objects.pop(request.key, None)
        return Answer(204)

    def _delete_several(self, request: Request) -> Answer:
        elements = parse_xml(bytes(request.body))
        keys = [find_text(element, "Key") for element in elements if local_name(element) == "Object"]
        for key in keys:
            self._objects.pop(key, None)
        return _build_xml("DeleteResult", "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys))

    def _clear(self, _: Request) -> Answer:
        self._objects.clear()
        self._uploads.clear()
        return Answer(204)

    def _create_upload(self, request: Request) -> Answer:
        name = f"upload-{next(self._numbers)}"
        self._uploads[name] = Upload(request.key, _find_notes(request))
        body = f"<Bucket>bucket</Bucket><Key>{escape(request.key)}</Key><UploadId>{name}</UploadId>"
        return _build_xml("InitiateMultipartUploadResult", body)

    def _put_part(self, request: Request) -> Answer:
        upload = self._uploads.get(request.query["uploadId"])
        if upload is None:
            return _refuse(HTTPStatus.NOT_FOUND, "NoSuchUpload")
        upload.parts[int(request.query["partNumber"])] = part = self._store(request)
        return Answer(200, {"etag": part.etag, **_find_checksums(request)})

    def _complete_upload(self, request: Request) -> Answer:
        upload = self._uploads.pop(request.query["uploadId"], None)
        if upload is None:
            return _refuse(HTTPStatus.NOT_FOUND, "NoSuchUpload")
        elements = parse_xml(bytes(request.body))
        numbers = [int(find_text(element, "PartNumber")) for element in elements if local_name(element) == "Part"]
        pieces = [piece for number in numbers for piece in upload.parts[number].pieces]
        crc, etag = request.headers.get(_CRC, ""), self._make_etag()
        self._objects[upload.key] = StoredObject(pieces, etag, crc, upload.notes)
        of_crc = f"<ChecksumCRC64NVME>{crc}</ChecksumCRC64NVME>" if crc else ""
        body = f"<Bucket>bucket</Bucket><Key>{escape(upload.key)}</Key><ETag>{escape(etag)}</ETag>{of_crc}"
        return _build_xml("CompleteMultipartUploadResult", body)

    def _abort_upload(self, request: Request) -> Answer:
        self._uploads.pop(request.query["uploadId"], None)
        return Answer(204)

    def _list_uploads(self, request: Request) -> Answer:
        listed = "".join(
            f"<Upload><Key>{quote(upload.key)}</Key><UploadId>{name}</UploadId>"
            f"<Initiated>{_format_time(upload.time)}</Initiated></Upload>"
            for name, upload in self._uploads.items()
            if upload.key.startswith(request.query.get("prefix", ""))
        )
        return _build_xml("ListMultipartUploadsResult", f"<IsTruncated>false</IsTruncated>{listed}")

    def _list_objects(self, request: Request) -> Answer:
        query = request.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        limit, after = int(query.get("max-keys", 1000)), query.get("continuation-token", query.get("start-after", ""))
        entries = {}
        for key in sorted(key for key in self._objects if key.startswith(prefix)):
            name, found, _ = key.removeprefix(prefix).partition(delimiter or "\0")
            common = f"{prefix}{name}{delimiter}" if found else ""
            entries[common or key] = _list_common(common) if common else _list_object(key, self._objects[key])
        names = [name for name in entries if name > after]
        page, is_truncated = names[:limit], len(names) > limit
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if page and is_truncated else ""
        counted = f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(is_truncated).lower()}</IsTruncated>"
        head = f"<Name>bucket</Name><Prefix>{quote(prefix)}</Prefix><MaxKeys>{limit}</MaxKeys>{counted}{token}"
        return _build_xml("ListBucketResult", head + "".join(entries[name] for name in page))


def _list_common(prefix: str) -> str:
    return f"<CommonPrefixes><Prefix>{quote(prefix)}</Prefix></CommonPrefixes>"


def _list_object(key: str, stored: StoredObject) -> str:
    modified = f"<LastModified>{_format_time(stored.time)}</LastModified>"
    details = f"{modified}<ETag>{escape(stored.etag)}</ETag><Size>{stored.size}</Size>"
    return f"<Contents><Key>{quote(key)}</Key>{details}<StorageClass>STANDARD</StorageClass></Contents>"


def _describe(stored: StoredObject, request: Request) -> dict[str, str]:
    headers = {"etag": stored.etag, "last-modified": formatdate(stored.time, usegmt=True), "accept-ranges": "bytes"}
    if stored.crc and "x-amz-checksum-mode" in request.headers and "range" not in request.headers:
        headers |= {_CRC: stored.crc, "x-amz-checksum-type": "FULL_OBJECT"}
    return {**headers, "content-type": "application/octet-stream", **stored.notes}


def _find_notes(request: Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name.startswith("x-amz-meta-")}


def _find_checksums(request: Request) -> dict[str, str]:
    """Return the checksums that the client has sent, which the answer repeats."""
    named = [f"x-amz-checksum-{kind}" for kind in ("crc64nvme", "crc32", "crc32c", "sha1", "sha256")]
    return {name: request.headers[name] for name in named if name in request.headers}


def _parse_range(text: str, size: int) -> tuple[int, int]:
    first, _, last = text.removeprefix("bytes=").partition("-")
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(size, int(last) + 1) if last else size


def _build_xml(root: str, content: str) -> Answer:
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{root}>{content}</{root}>'
    return Answer(200, {"content-type": "application/xml"}, (memoryview(text.encode()),))


def _refuse(status: HTTPStatus, code: str) -> Answer:
    body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
    return Answer(status, {"content-type": "application/xml"}, (memoryview(body),))


def _format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))
