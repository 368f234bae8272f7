"""``S3``: a store of objects with the API of Amazon S3, at AWS or at any other endpoint.

``s3://`` URLs mean it (:mod:`rankless.storage.location`); each rank has the store of its own process.
"""

from __future__ import annotations

import base64
import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from rankless.errors import InvalidArgumentError, StorageError
from rankless.storage.body import Body
from rankless.storage.http.client import ObjectClient, ObjectResponse
from rankless.storage.http.connection import check_endpoint
from rankless.storage.http.object_reads import Permissions
from rankless.storage.http.settings import check_connection_settings
from rankless.storage.http.xml import find_text, parse_xml
from rankless.storage.http.xml_requests import XmlDialect
from rankless.storage.http.xml_store import BodyChecksums, XmlStore
from rankless.storage.object_path import ObjectPath
from rankless.storage.s3.aws_signing import Credentials, CredentialsFunction, check_credentials
from rankless.storage.s3.s3_dialect import S3Service

_PERMISSIONS = Permissions(
    read="s3:GetObject",
    inspect="s3:GetObject, and s3:ListBucket to see that it is missing",
    list="s3:ListBucket",
    write="s3:PutObject",
    upload="s3:PutObject",
    delete="s3:DeleteObject",
    abort="s3:AbortMultipartUpload",
    list_uploads="s3:ListBucketMultipartUploads",
)

_DIALECT = XmlDialect(
    note_prefix="x-amz-meta-",
    creation_condition=("if-none-match", "*"),
    copy_source="x-amz-copy-source",
    headers_of_all=frozenset({"x-amz-request-payer", "x-amz-expected-bucket-owner"}),
)

_FULL_OBJECT = ("x-amz-checksum-type", "FULL_OBJECT")


@dataclass(frozen=True)
class S3(XmlStore):
    """A store with the API of Amazon S3.

    A URL ``s3://bucket/run`` means :meth:`from_environment`. To pass settings, make a path with :meth:`path`, and use
    it wherever a path is accepted: ``rankless.save_checkpoint(S3(endpoint="https://…").path("bucket/run"), …)``.

    Args:
        endpoint: The URL of the server; by default the one in ``AWS_ENDPOINT_URL_S3`` or ``AWS_ENDPOINT_URL``, else
            AWS's own in the region.
        region: The region, by default the one in ``AWS_REGION`` or ``AWS_DEFAULT_REGION``, else ``us-east-1``. The
            server of another region is found by itself.
        credentials: The access key and its secret (and a token), or a function that returns them. By default the ones
            that AWS's tools find.
        ca_file: A file with the certificates of authorities to trust, instead of the system's.
        headers: Further headers of requests that create objects, such as ``x-amz-storage-class``, and of all requests,
            such as ``x-amz-request-payer``.
        timeout: The number of seconds without any byte after which a connection counts as broken.
        retry_seconds: For how many seconds a request that fails is repeated.

    Raises:
        InvalidArgumentError: An argument is invalid.
    """

    endpoint: str | None = None
    region: str | None = None
    credentials: Credentials | tuple[str, ...] | CredentialsFunction | None = field(default=None, repr=False)
    ca_file: str | None = None
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    timeout: float = 60.0
    retry_seconds: float = 120.0

    scheme = "s3"
    permissions = _PERMISSIONS
    dialect = _DIALECT

    def __post_init__(self) -> None:
        env = os.environ
        if self.endpoint is None:
            object.__setattr__(self, "endpoint", env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or None)
        if self.region is None:
            region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or "us-east-1"
            object.__setattr__(self, "region", region)
        if self.endpoint is not None:
            check_endpoint(self.endpoint)
        check_connection_settings(self)
        if not isinstance(self.region, str) or not self.region:
            raise InvalidArgumentError(f"region must be the name of a region, such as 'eu-west-1'; got {self.region!r}")
        object.__setattr__(self, "credentials", check_credentials(self.credentials))

    @classmethod
    def from_environment(cls) -> S3:
        """Return the store that the variables of AWS's tools describe.

        These are ``AWS_ENDPOINT_URL_S3``, ``AWS_ENDPOINT_URL``, ``AWS_REGION``, ``AWS_DEFAULT_REGION`` and
        ``AWS_CA_BUNDLE``. Credentials are looked for when they are needed.
        """
        return _reuse(cls(ca_file=os.environ.get("AWS_CA_BUNDLE") or None))

    def _client(self) -> ObjectClient:
        return _client_of(self)

    def _checksums(self, body: Body) -> BodyChecksums:
        """Return the headers of a body. Some servers check it only if the algorithm is named."""
        named = ("x-amz-sdk-checksum-algorithm", "CRC64NVME")
        return BodyChecksums((("x-amz-checksum-crc64nvme", _encode_crc(body.crc64nvme)), named))

    def _is_received(self, response: ObjectResponse, body: Body) -> bool:
        """Compare the CRC that the server reports. Of servers that report none, compare the ETag, if it is an MD5."""
        reported = response.headers.get("x-amz-checksum-crc64nvme")
        if reported is not None:
            return reported == _encode_crc(body.crc64nvme)
        return _service_of(self).etags.is_plausible(response.headers, body)

    def _upload_headers(self) -> Sequence[tuple[str, str]]:
        return ("x-amz-checksum-algorithm", "CRC64NVME"), _FULL_OBJECT

    def _completion_headers(self, size: int, crc64nvme: int) -> Sequence[tuple[str, str]]:
        checksum = ("x-amz-checksum-crc64nvme", _encode_crc(crc64nvme))
        return checksum, _FULL_OBJECT, ("x-amz-mp-object-size", str(size))

    def _copy_headers(self) -> Sequence[tuple[str, str]]:
        return (("x-amz-checksum-algorithm", "CRC64NVME"),)

    def _is_copied(
        self,
        source: Mapping[str, str],  # noqa: ARG002 - the CRC of the copy is enough
        target: ObjectPath,  # noqa: ARG002
        answer: bytes,
        crc64nvme: int,
    ) -> bool:
        return find_text(parse_xml(answer), "ChecksumCRC64NVME") in {"", _encode_crc(crc64nvme)}

    def _version_condition(self, headers: Mapping[str, str]) -> tuple[str, str]:
        return "if-match", headers["etag"]

    def _check_completed(
        self,
        path: ObjectPath,
        records: Sequence[Sequence[str]],  # noqa: ARG002 - the CRC of the object is enough
        size: int,  # noqa: ARG002
        crc64nvme: int,
        answer: bytes,
    ) -> None:
        reported = find_text(parse_xml(answer), "ChecksumCRC64NVME")
        if reported and reported != _encode_crc(crc64nvme):
            raise StorageError(errno.EIO, f"{path} has other bytes than were sent: save again")


@cache
def _client_of(store: S3) -> ObjectClient:
    """Return the client of a store, which all equal stores of this process share."""
    return ObjectClient(
        _service_of(store), ca_file=store.ca_file, timeout=store.timeout, retry_seconds=store.retry_seconds
    )


@cache
def _service_of(store: S3) -> S3Service:
    return S3Service(store.endpoint, str(store.region), store.credentials)


@cache
def _reuse(store: S3) -> S3:
    """Return the store with these settings that this process has used before."""
    return store


def _encode_crc(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(8, "big")).decode()
