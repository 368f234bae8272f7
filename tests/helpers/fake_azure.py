"""A store with the API of Azure Blob Storage in memory. It checks signatures by its own computation."""

from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import formatdate, parsedate_to_datetime
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

from awscrt.checksums import crc64nvme

from rankless.storage.azure.azure_store import Azure
from rankless.storage.http.connection import HttpResponse
from tests.helpers.fake_http import BUCKET, FakeStore
from tests.helpers.fake_s3 import find_all

ACCOUNT, KEY = "account", base64.b64encode(b"a key of the account").decode()

#: The header that all answers of Azure have.
REQUEST_ID = {"x-ms-request-id": "1"}

#: The most seconds between the clocks of a server and a client.
_MAX_SKEW = 900

_SIGNED_BY_PLACE = (
    *("Content-Encoding", "Content-Language", "Content-Length", "Content-MD5", "Content-Type", "Date"),
    *("If-Modified-Since", "If-Match", "If-None-Match", "If-Unmodified-Since", "Range"),
)


@dataclass
class StoredBlob:
    data: bytes
    etag: str
    time: float
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Uncommitted:
    time: float
    blocks: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Recorded:
    """A request that has arrived."""

    method: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]

    @property
    def copies(self) -> bool:
        return "x-ms-copy-source" in self.headers

    @property
    def kind(self) -> str:
        comp = self.query.get("comp", "")
        if comp == "list":
            return "list uploads" if "include" in self.query else "list"
        if comp == "blocklist":
            return "complete" if self.method == "PUT" else "list blocks"
        return "part" if comp == "block" else self.method.lower()


class FakeAzure(FakeStore):
    """The state of an account with one container. ``uploads`` has the uncommitted blocks of each key."""

    objects: dict[str, StoredBlob]
    uploads: dict[str, Uncommitted]

    #: No two versions of any object have equal ETags, as those of Azure, which are times.
    _versions = itertools.count(1)

    def __init__(self) -> None:
        super().__init__()
        #: The most entries of a page, and whether objects can be copied.
        self.page, self.copies = 5000, True

    def store_at(self, endpoint: str, **options: Any) -> Azure:
        return Azure(ACCOUNT, endpoint, **({"credentials": KEY, "retry_seconds": 5.0} | options))

    def handle(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> HttpResponse:
        parts = urlsplit(target)
        container, _, key = unquote(parts.path).lstrip("/").partition("/")
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        lower = {name.lower(): value for name, value in headers.items()}
        recorded = Recorded(method, key, query, lower)
        with self.lock:
            self.requests.append(recorded)
        if (instead := self.on_request(recorded, "before")) is not None:
            return instead
        with self.lock:
            if not self._is_allowed(method, parts.path, query, lower, body):
                response = self.failure(403, "AuthenticationFailed")
            elif container != BUCKET:
                response = self.failure(404, "ContainerNotFound")
            else:
                response = getattr(self, "_" + recorded.kind.replace(" ", "_"))(key, query, lower, body)
        instead = self.on_request(recorded, "after")
        if method == "HEAD":
            response = HttpResponse(response.status, response.headers)
        return instead or HttpResponse(response.status, {**response.headers, **REQUEST_ID}, response.body)

    def _is_allowed(
        self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes
    ) -> bool:
        """Whether a request is signed with the key, or has a token or a signature at all."""
        authorization = headers.get("authorization", "")
        if not authorization.startswith("SharedKey "):
            return authorization.startswith("Bearer ") or "sig" in query
        if abs(parsedate_to_datetime(headers["x-ms-date"]).timestamp() - self.clock()) > _MAX_SKEW:
            return False
        placed = {**headers, "content-length": str(len(body) or "")}
        lines = [method, *(placed.get(name.lower(), "") for name in _SIGNED_BY_PLACE)]
        lines += [f"{name}:{headers[name]}" for name in sorted(headers) if name[:5] == "x-ms-"]
        resource = f"/{ACCOUNT}{path}"
        for name in sorted(query):
            resource += f"\n{name}:{query[name]}"
        text = "\n".join([*lines, resource])
        signature = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
        return authorization == f"SharedKey {ACCOUNT}:{base64.b64encode(signature).decode()}"

    def failure(self, status: int, code: str) -> HttpResponse:
        """Return a refusal."""
        body = f"\ufeff<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}\nRequestId:1</Message></Error>"
        headers = {**REQUEST_ID, "x-ms-error-code": code, "date": formatdate(self.clock(), usegmt=True)}
        return HttpResponse(status, headers, body.encode())

    def _get(self, key: str, query: Any, headers: Mapping[str, str], body: bytes) -> HttpResponse:
        blob = self.objects.get(key)
        if blob is None:
            return self.failure(404, "BlobNotFound")
        if headers.get("if-match", blob.etag) != blob.etag:
            return self.failure(412, "ConditionNotMet")
        described = {"etag": blob.etag, "content-length": str(len(blob.data)), **blob.notes, **self.times_of(blob)}
        if "range" not in headers:
            return HttpResponse(200, described, blob.data)
        first, last = (int(number) for number in headers["range"].removeprefix("bytes=").split("-"))
        if first >= len(blob.data):
            return self.failure(416, "InvalidRange")
        found = blob.data[first : last + 1]
        span = f"bytes {first}-{first + len(found) - 1}/{len(blob.data)}"
        return HttpResponse(206, described | {"content-length": str(len(found)), "content-range": span}, found)

    def _head(self, key: str, query: Any, headers: Mapping[str, str], body: bytes) -> HttpResponse:
        return self._get(key, query, {}, b"")

    def _put(self, key: str, query: Any, headers: Mapping[str, str], body: bytes) -> HttpResponse:
        if (source := headers.get("x-ms-copy-source")) is not None:
            return self._copy(unquote(urlsplit(source).path).removeprefix(f"/{BUCKET}/"), key, headers)
        assert headers["x-ms-blob-type"] == "BlockBlob"
        if (refusal := self._check(key, headers, body)) is not None:
            return refusal
        return self._create(key, headers, body)

    def _copy(self, source: str, key: str, headers: Mapping[str, str]) -> HttpResponse:
        """Copy an object. A look at it later says that the copy has ended."""
        blob = self.objects.get(source)
        if not self.copies:
            return self.failure(403, "CannotVerifyCopySource")
        if blob is None:
            return self.failure(404, "CannotVerifyCopySource")
        if headers.get("x-ms-source-if-match", blob.etag) != blob.etag:
            return self.failure(412, "SourceConditionNotMet")
        answer = self._create(key, {**blob.notes, "x-ms-meta-copied": ""}, blob.data)
        self.objects[key].notes = {**blob.notes, "x-ms-copy-status": "success"}
        return HttpResponse(202, {**answer.headers, "x-ms-copy-status": "pending"})

    def _check(self, key: str, headers: Mapping[str, str], body: bytes) -> HttpResponse | None:
        if headers["x-ms-content-crc64"] != encode_crc(body):
            return self.failure(400, "Crc64Mismatch")
        if headers.get("if-none-match") == "*" and key in self.objects:
            return self.failure(409, "BlobAlreadyExists")
        if "if-match" in headers and (key not in self.objects or self.objects[key].etag != headers["if-match"]):
            return self.failure(412, "ConditionNotMet")
        return None

    def _create(self, key: str, headers: Mapping[str, str], data: bytes) -> HttpResponse:
        notes = {name: value for name, value in headers.items() if name.startswith("x-ms-meta-")}
        self.objects[key] = StoredBlob(data, f'"0x{next(self._versions):X}"', self.clock(), notes)
        self.uploads.pop(key, None)
        return HttpResponse(201, {"etag": self.objects[key].etag})

    def _delete(self, key: str, query: Any, headers: Mapping[str, str], body: bytes) -> HttpResponse:
        blob = self.objects.get(key)
        if blob is None:
            return self.failure(404, "BlobNotFound")
        if headers.get("if-match", blob.etag) != blob.etag:
            return self.failure(412, "ConditionNotMet")
        del self.objects[key]
        return HttpResponse(202, {})

    def _part(self, key: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes) -> HttpResponse:
        if (refusal := self._check("", headers, body)) is not None:
            return refusal
        blocks = self.uploads.setdefault(key, Uncommitted(self.clock())).blocks
        lengths = {len(base64.b64decode(name)) for name in (*blocks, query["blockid"])}
        if len(lengths) > 1 or max(lengths) > 64 or not body:
            return self.failure(400, "InvalidBlobOrBlock")
        blocks[query["blockid"]] = body
        return HttpResponse(201, {})

    def _list_blocks(self, key: str, query: Any, headers: Mapping[str, str], body: bytes) -> HttpResponse:
        if key not in self.objects and key not in self.uploads:
            return self.failure(404, "BlobNotFound")
        blocks = self.uploads[key].blocks if key in self.uploads else {}
        found = "".join(f"<Block><Name>{name}</Name><Size>{len(data)}</Size></Block>" for name, data in blocks.items())
        return xml(f"<BlockList><CommittedBlocks/><UncommittedBlocks>{found}</UncommittedBlocks></BlockList>")

    def _complete(self, key: str, query: Any, headers: Mapping[str, str], body: bytes) -> HttpResponse:
        if (refusal := self._check(key, headers, body)) is not None:
            return refusal
        blocks = self.uploads[key].blocks if key in self.uploads else {}
        names = find_all(body.decode(), "Uncommitted")
        if not blocks.keys() >= set(names):
            return self.failure(400, "InvalidBlockList")
        return self._create(key, headers, b"".join(blocks[name] for name in names))

    def _describe_notes(self, name: str, query: Mapping[str, str]) -> str:
        """Describe the notes of a blob, if a list includes them."""
        if "metadata" not in query.get("include", "").split(",") or name not in self.objects:
            return ""
        notes = self.objects[name].notes.items()
        texts = (
            f"<{note[10:]}>{escape(value)}</{note[10:]}>" for note, value in notes if note.startswith("x-ms-meta-")
        )
        return f"<Metadata>{''.join(texts)}</Metadata>"

    def _list_uploads(self, key: str, query: Mapping[str, str], headers: Any, body: bytes) -> HttpResponse:
        return self._list(key, query, headers, body)

    def _list(self, key: str, query: Mapping[str, str], headers: Any, body: bytes) -> HttpResponse:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        limit, after = min(int(query.get("maxresults", 5000)), self.page), query.get("marker", "")
        found = {name: (len(blob.data), blob.etag, blob.time) for name, blob in self.listed_objects().items()}
        if "uncommittedblobs" in query.get("include", "").split(","):
            found |= {name: (0, "", blob.time) for name, blob in self.uploads.items() if name not in found}
        entries: dict[str, str] = {}
        for name in sorted(found):
            if not name.startswith(prefix):
                continue
            rest = name[len(prefix) :]
            common = prefix + rest[: rest.index(delimiter) + 1] if delimiter and delimiter in rest else ""
            size, etag, changed = found[name]
            entries[common or name] = (
                f"<BlobPrefix><Name>{escape(common)}</Name></BlobPrefix>"
                if common
                else f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{formatdate(changed, usegmt=True)}"
                f"</Last-Modified><Etag>{etag.strip(chr(34))}</Etag><Content-Length>{size}</Content-Length>"
                f"</Properties>{self._describe_notes(name, query)}</Blob>"
            )
        names = [name for name in entries if name >= after]
        marker = names[limit] if names[limit:] else ""
        blobs = "".join(entries[name] for name in names[:limit])
        return xml(
            f"<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker>{escape(marker)}</NextMarker></EnumerationResults>"
        )


def xml(text: str) -> HttpResponse:
    """Return an answer, which begins with a byte order mark."""
    return HttpResponse(200, {}, f"\ufeff<?xml version='1.0' encoding='utf-8'?>{text}".encode())


def encode_crc(data: bytes) -> str:
    """Return the checksum as Azure writes it."""
    return base64.b64encode(crc64nvme(data).to_bytes(8, "little")).decode()
