"""A store with the API of S3 or of Google in memory, which can fail at each request, before or after its effect.

``Profile`` says what real servers do differently: which conditions and checksums they ignore. That of Google's XML API
follows its documentation: https://cloud.google.com/storage/docs/xml-api/reference-methods
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from awscrt.checksums import crc32c, crc64nvme

from rankless.storage.gcs.gcs_store import GCS
from rankless.storage.http.connection import HttpResponse
from rankless.storage.s3.s3_store import S3
from tests.helpers.fake_http import BUCKET, FakeStore

#: The least bytes of a part, except the last one.
MIN_PART = 5 * 2**20


@dataclass(frozen=True)
class Profile:
    """What a kind of server does."""

    checks_part_crc: bool = True
    checks_full_crc: bool = True
    tells_full_crc: bool = True
    honours_conditions: bool = True
    forgets_uploads: bool = True
    is_google: bool = False
    tells_part_crc: bool = False
    deletes_versions: bool = True
    #: The status of the refusal to replace a version, whichever it is; 0 if the version is compared.
    refuses_to_replace: int = 0
    equal_parts: bool = False
    copies: bool = True


AWS = Profile(tells_part_crc=True)
RGW_16 = Profile(
    deletes_versions=False,
    checks_part_crc=False,
    checks_full_crc=False,
    tells_full_crc=False,
    forgets_uploads=False,
    refuses_to_replace=412,
)
RGW_20 = Profile(checks_full_crc=False, forgets_uploads=False)
SWIFT = Profile(checks_full_crc=False, tells_full_crc=False, forgets_uploads=False, refuses_to_replace=501)
#: As its documentation says: all parts but the last have one size. It is not assumed to look at CRC-64/NVME.
R2 = Profile(checks_part_crc=False, checks_full_crc=False, tells_full_crc=False, equal_parts=True)
GOOGLE = Profile(checks_full_crc=False, tells_full_crc=False, is_google=True)
PROFILES = {"aws": AWS, "rgw-16": RGW_16, "rgw-20": RGW_20, "swift": SWIFT, "r2": R2, "google": GOOGLE}

#: The access token that the server with Google's API accepts.
ACCEPTED = "token"


#: The numbers of the versions of objects.
_generations = itertools.count(1)


@dataclass
class StoredObject:
    data: bytes
    etag: str
    crc: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)
    time: float = field(default_factory=time.time)
    md5: str = ""
    generation: str = field(default_factory=lambda: str(next(_generations)))


@dataclass
class StoredUpload:
    key: str
    notes: Mapping[str, str]
    time: float = field(default_factory=time.time)
    parts: dict[int, tuple[bytes, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Recorded:
    """A request that has arrived."""

    method: str
    key: str
    query: Mapping[str, str]
    nbytes: int = 0
    copies: bool = False

    @property
    def kind(self) -> str:
        if "uploads" in self.query:
            return "create upload" if self.method == "POST" else "list uploads"
        if "uploadId" in self.query:
            return {"PUT": "part", "POST": "complete", "DELETE": "abort"}[self.method]
        return "list" if "list-type" in self.query else self.method.lower()


class FakeS3(FakeStore):
    """The state of a store with one bucket."""

    objects: dict[str, StoredObject]
    uploads: dict[str, StoredUpload]

    def __init__(self, profile: Profile = AWS) -> None:
        super().__init__()
        self.profile = profile
        self._upload_numbers = itertools.count(1)
        self.tokens = {ACCEPTED}

    def store_at(self, endpoint: str, **options: Any) -> S3 | GCS:
        return store_for(self.profile)(endpoint, **options)

    def handle(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> HttpResponse:
        parts = urlsplit(target)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        copies = self._copy_source in {name.lower() for name in headers}
        recorded = Recorded(method, key, query, len(body), copies)
        with self.lock:
            self.requests.append(recorded)
        if (instead := self.on_request(recorded, "before")) is not None:
            return instead
        with self.lock:
            named = {name.lower(): value for name, value in headers.items()}
            if self.profile.is_google and named.get("authorization") not in {
                f"Bearer {token}" for token in self.tokens
            }:
                response = failure(401, "AuthenticationRequired")
            elif bucket != BUCKET:
                response = failure(404, "NoSuchBucket")
            else:
                handler = getattr(self, "_" + recorded.kind.replace(" ", "_"))
                response = handler(key, query, named, body)
        return self.on_request(recorded, "after") or response

    def _get(self, key: str, query: Any, headers: Mapping[str, str], body: bytes) -> HttpResponse:
        stored = self.objects.get(key)
        if stored is None:
            return failure(404, "NoSuchKey")
        if headers.get("if-match", stored.etag) != stored.etag:
            return failure(412, "PreconditionFailed")
        notes = {f"{self._note_prefix}{name}": value for name, value in stored.notes.items()}
        tags = {"etag": stored.etag, **notes, **self._hashes_of(stored), **self.times_of(stored)}
        if "range" not in headers:
            return HttpResponse(200, tags | {"content-length": str(len(stored.data))}, stored.data)
        first, last = (int(number) for number in headers["range"].removeprefix("bytes=").split("-"))
        if first >= len(stored.data):
            return failure(416, "InvalidRange")
        found = stored.data[first : last + 1]
        span = f"bytes {first}-{first + len(found) - 1}/{len(stored.data)}"
        return HttpResponse(206, tags | {"content-range": span}, found)

    def _head(self, key: str, query: Any, headers: Mapping[str, str], body: bytes) -> HttpResponse:
        response = self._get(key, query, {}, b"")
        length = {"content-length": str(len(response.body))}
        return HttpResponse(response.status, {**response.headers, **length}, b"")

    def _put(self, key: str, query: Any, headers: Mapping[str, str], body: bytes) -> HttpResponse:
        if (source := headers.get(self._copy_source)) is not None:
            return self._copy(unquote(source).removeprefix(f"/{BUCKET}/"), key, headers)
        if not self._is_crc_right(headers, body):
            return failure(400, "BadDigest")
        condition = ("x-goog-if-generation-match", "0") if self.profile.is_google else ("if-none-match", "*")
        if condition in headers.items() and key in self.objects and self.profile.honours_conditions:
            return failure(412, "PreconditionFailed")
        if (refusal := self._refuse_version(self.objects.get(key), headers)) is not None:
            return refusal
        self.objects[key] = StoredObject(body, md5(body), encode_crc(body), time=self.clock(), md5=md5_base64(body))
        return self._answer_to(body)

    @property
    def _copy_source(self) -> str:
        return "x-goog-copy-source" if self.profile.is_google else "x-amz-copy-source"

    def _copy(self, source: str, key: str, headers: Mapping[str, str]) -> HttpResponse:
        if not self.profile.copies:
            return failure(501, "NotImplemented")
        stored = self.objects.get(source)
        if stored is None:
            return failure(404, "NoSuchKey")
        if headers.get(f"{self._copy_source}-if-match", stored.etag) != stored.etag:
            return failure(412, "PreconditionFailed")
        self.objects[key] = replace(stored, time=self.clock(), generation=str(next(_generations)))
        told = (
            f"<ChecksumCRC64NVME>{encode_crc(stored.data)}</ChecksumCRC64NVME>" if self.profile.tells_full_crc else ""
        )
        return xml(f"<CopyObjectResult><ETag>{escape(stored.etag)}</ETag>{told}</CopyObjectResult>")

    def _refuse_version(self, stored: StoredObject | None, headers: Mapping[str, str]) -> HttpResponse | None:
        """Refuse a write of an object that is not the version which the request names."""
        name = "x-goog-if-generation-match" if self.profile.is_google else "if-match"
        version = headers.get(name, "0")
        if version == "0" or not self.profile.honours_conditions:
            return None
        if self.profile.refuses_to_replace:
            code = "NotImplemented" if self.profile.refuses_to_replace == 501 else "PreconditionFailed"
            return failure(self.profile.refuses_to_replace, code)
        if stored is None:
            return failure(412, "PreconditionFailed") if self.profile.is_google else failure(404, "NoSuchKey")
        current = stored.generation if self.profile.is_google else stored.etag
        return None if current == version else failure(412, "PreconditionFailed")

    def _delete(self, key: str, query: Any, headers: Mapping[str, str], body: bytes) -> HttpResponse:
        stored = self.objects.get(key)
        if stored is None and self.profile.is_google:
            return failure(404, "NoSuchKey")
        conditions = {"if-match": stored.etag, "x-goog-if-generation-match": stored.generation} if stored else {}
        if self.profile.deletes_versions and any(
            headers.get(name, value) != value for name, value in conditions.items()
        ):
            return failure(412, "PreconditionFailed")
        self.objects.pop(key, None)
        return HttpResponse(204, {})

    @property
    def _note_prefix(self) -> str:
        return "x-goog-meta-" if self.profile.is_google else "x-amz-meta-"

    def _hashes_of(self, stored: StoredObject) -> Mapping[str, str]:
        """The checksums of an object, as Google tells them: of one that was made of parts there is no MD5."""
        if not self.profile.is_google:
            return {}
        hashes = encode_crc32c(stored.data) + (f",md5={stored.md5}" if stored.md5 else "")
        return {"x-goog-hash": hashes, "x-goog-generation": stored.generation}

    def _create_upload(self, key: str, query: Any, headers: Mapping[str, str], body: bytes) -> HttpResponse:
        if "x-goog-if-generation-match" in headers:
            return failure(400, "InvalidArgument")
        number, prefix = f"upload-{next(self._upload_numbers)}", self._note_prefix
        notes = {name.removeprefix(prefix): value for name, value in headers.items() if name.startswith(prefix)}
        self.uploads[number] = StoredUpload(key, notes, self.clock())
        return xml(f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>")

    def _part(self, key: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes) -> HttpResponse:
        upload = self.uploads.get(query["uploadId"])
        if upload is None:
            return failure(404, "NoSuchUpload")
        if not self._is_crc_right(headers, body):
            return failure(400, "BadDigest")
        upload.parts[int(query["partNumber"])] = body, md5(body)
        return self._answer_to(body)

    def _answer_to(self, body: bytes) -> HttpResponse:
        crc = {"x-amz-checksum-crc64nvme": encode_crc(body)} if self.profile.tells_part_crc else {}
        return HttpResponse(200, {"etag": md5(body), **crc})

    def _refuse_completion(self, key: str, headers: Mapping[str, str]) -> HttpResponse | None:
        if "x-goog-if-generation-match" in headers:
            return failure(400, "InvalidArgument")
        is_taken = headers.get("if-none-match") == "*" and key in self.objects
        return failure(412, "PreconditionFailed") if is_taken and self.profile.honours_conditions else None

    def _complete(  # noqa: PLR0911 - a return for each refusal
        self, key: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes
    ) -> HttpResponse:
        upload = self.uploads.get(query["uploadId"])
        if upload is None:
            if not self.profile.forgets_uploads and key in self.objects:
                return xml("<CompleteMultipartUploadResult></CompleteMultipartUploadResult>")
            return failure(404, "NoSuchUpload")
        if (refusal := self._refuse_completion(key, headers)) is not None:
            return refusal
        named = [int(number) for number in find_all(body.decode(), "PartNumber")]
        etags = [etag.replace("&quot;", '"') for etag in find_all(body.decode(), "ETag")]
        if [upload.parts.get(number, (b"", ""))[1] for number in named] != etags or named != sorted(named):
            return failure(400, "InvalidPart")
        chosen = [upload.parts[number][0] for number in named]
        sizes = {len(part) for part in chosen[:-1]}
        if sizes and (min(sizes) < MIN_PART or (self.profile.equal_parts and len(sizes) > 1)):
            return failure(400, "EntityTooSmall")
        data = b"".join(chosen)
        wants = headers.get("x-amz-checksum-crc64nvme", encode_crc(data)), headers.get("x-amz-mp-object-size")
        if self.profile.checks_full_crc and wants not in {(encode_crc(data), str(len(data))), (encode_crc(data), None)}:
            return failure(400, "BadDigest")
        digests = b"".join(bytes.fromhex(etag.strip('"')) for etag in etags)
        digest = f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(chosen)}"
        etag = f'"-{encode_crc(data)}"' if self.profile.is_google else f'"{digest}"'
        self.objects[key] = StoredObject(data, etag, encode_crc(data), upload.notes, self.clock())
        del self.uploads[query["uploadId"]]
        told = f"<ChecksumCRC64NVME>{encode_crc(data)}</ChecksumCRC64NVME>" if self.profile.tells_full_crc else ""
        return xml(f"<CompleteMultipartUploadResult><ETag>{escape(etag)}</ETag>{told}</CompleteMultipartUploadResult>")

    def _abort(self, key: str, query: Mapping[str, str], headers: Any, body: bytes) -> HttpResponse:
        return HttpResponse(204, {}) if self.uploads.pop(query["uploadId"], None) else failure(404, "NoSuchUpload")

    def _list_uploads(self, key: str, query: Mapping[str, str], headers: Any, body: bytes) -> HttpResponse:
        found = "".join(
            f"<Upload><Key>{quote(upload.key)}</Key><UploadId>{number}</UploadId>"
            f"<Initiated>{iso(upload.time)}</Initiated></Upload>"
            for number, upload in self.uploads.items()
            if upload.key.startswith(query.get("prefix", ""))
        )
        return xml(f"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>{found}</ListMultipartUploadsResult>")

    def _list(self, key: str, query: Mapping[str, str], headers: Any, body: bytes) -> HttpResponse:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        limit, after = int(query.get("max-keys", 1000)), query.get("continuation-token", "")
        entries: dict[str, str] = {}
        objects = self.listed_objects()
        for name in sorted(objects):
            if not name.startswith(prefix):
                continue
            rest = name[len(prefix) :]
            common = prefix + rest[: rest.index(delimiter) + 1] if delimiter and delimiter in rest else ""
            stored = objects[name]
            entries[common or name] = (
                f"<CommonPrefixes><Prefix>{quote(common)}</Prefix></CommonPrefixes>"
                if common
                else f"<Contents><Key>{quote(name)}</Key><Size>{len(stored.data)}</Size>"
                f"<ETag>{escape(stored.etag)}</ETag><LastModified>{iso(stored.time)}</LastModified></Contents>"
            )
        names = [name for name in entries if name > after]
        page = names[:limit]
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if names[limit:] else ""
        return xml(f"<ListBucketResult>{token}{''.join(entries[name] for name in page)}</ListBucketResult>")

    def _is_crc_right(self, headers: Mapping[str, str], body: bytes) -> bool:
        if self.profile.is_google:
            return headers.get("x-goog-hash") in {None, encode_crc32c(body)}
        told = headers.get("x-amz-checksum-crc64nvme")
        return told is None or not self.profile.checks_part_crc or told == encode_crc(body)


def store_at(endpoint: str, **options: Any) -> S3:
    """Return a store with settings for tests: failures are repeated for a short time only."""
    return S3(endpoint, **({"retry_seconds": 5.0, "credentials": ("key", "secret")} | options))  # type: ignore[arg-type]


def gcs_at(endpoint: str, **options: Any) -> GCS:
    """Return such a store with Google's API."""
    return GCS(endpoint, **({"retry_seconds": 5.0, "credentials": a_token} | options))  # type: ignore[arg-type]


def store_for(profile: Profile) -> Callable[..., S3 | GCS]:
    """Return the function that makes stores which a server of this kind understands."""
    return gcs_at if profile.is_google else store_at


def a_token() -> str:
    """Return the access token that the server accepts."""
    return ACCEPTED


def failure(status: int, code: str, **headers: str) -> HttpResponse:
    """Return a refusal."""
    body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return HttpResponse(status, {"date": formatdate(usegmt=True), **headers}, body.encode())


def xml(text: str) -> HttpResponse:
    """Return an answer."""
    return HttpResponse(200, {}, text.encode())


def md5(data: bytes) -> str:
    """Return the ETag of an object that was written at once, or of a part."""
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def md5_base64(data: bytes) -> str:
    """Return the MD5 as Google writes it."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def encode_crc32c(data: bytes) -> str:
    """Return the checksum as Google writes it."""
    return f"crc32c={base64.b64encode(crc32c(data).to_bytes(4, 'big')).decode()}"


def encode_crc(data: bytes) -> str:
    """Return the checksum as S3 writes it."""
    return base64.b64encode(crc64nvme(data).to_bytes(8, "big")).decode()


def find_all(text: str, name: str) -> list[str]:
    """Return the texts of the elements of this name."""
    return [part.partition(f"</{name}>")[0] for part in text.split(f"<{name}>")[1:]]


def iso(seconds: float) -> str:
    """Return a time as S3 writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))
