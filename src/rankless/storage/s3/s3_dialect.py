"""The dialect of Amazon S3: addresses of buckets, signatures, regions, and codes of errors.

:class:`~rankless.storage.http.client.ObjectClient` asks it for each attempt of a request, in several threads at a time.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from rankless.storage.body import Body
from rankless.storage.http.client import ObjectRequest
from rankless.storage.http.connection import Address, HttpRequest, HttpResponse, make_target, parse_address
from rankless.storage.http.xml import find_error_code, find_text, parse_xml
from rankless.storage.object_path import ObjectPath
from rankless.storage.s3.aws_signing import AwsSigner, Credentials, CredentialsFunction

_MD5 = re.compile(r'"?([0-9a-f]{32})"?')

#: After so many ETags in a row that are no MD5, ETags are not compared any more.
_MOST_DIFFERENCES = 3


class ETags:
    """Compares the ETags of a server with the MD5 of the bytes that were sent.

    For servers that report no checksum of the bytes that they have received. Old ones, such as Ceph 16, ignore the CRC
    of a body. Nearly all servers answer with its MD5 as the ETag. Some answer with another text that looks like one,
    which differs from the MD5 of each body.
    """

    def __init__(self) -> None:
        self._differences = 0

    def is_plausible(self, headers: Mapping[str, str], body: Body) -> bool:
        """Return false if an answer has another MD5 than the bytes that were sent."""
        match = _MD5.fullmatch(headers.get("etag", ""))
        if match is None or _is_encrypted(headers) or self._differences >= _MOST_DIFFERENCES:
            return True
        if match[1] == _compute_md5(body):
            self._differences = 0
            return True
        self._differences += 1
        return self._differences >= _MOST_DIFFERENCES


def _compute_md5(body: Body) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    for piece in body.pieces:
        digest.update(piece)
    return digest.hexdigest()


def _is_encrypted(headers: Mapping[str, str]) -> bool:
    """Return whether the server has encrypted an object with a key of its own service, or of the caller."""
    name = "x-amz-server-side-encryption"
    return headers.get(name, "AES256") != "AES256" or f"{name}-customer-algorithm" in headers


#: Codes of a request that was sent to the wrong region.
_REDIRECTED = frozenset(
    {"PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
)
_REDIRECTED_STATUSES = frozenset({301, 307})

#: Codes of credentials that the server does not accept any more: they have expired, or were replaced by others.
_RENEWABLE = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidToken", "TokenRefreshRequired"}
)


class S3Service:
    """One endpoint, or AWS's endpoint in the region of each bucket."""

    transient_codes = frozenset(
        {"SlowDown", "InternalError", "RequestTimeout", "ServiceUnavailable", "OperationAborted"}
    )
    header_of_all_answers = None  # not all servers have one

    def __init__(
        self, endpoint: str | None, region: str, credentials: Credentials | tuple[str, ...] | CredentialsFunction | None
    ) -> None:
        self._endpoint, self._region = endpoint, region
        self._signer = AwsSigner(credentials)
        self._region_of: dict[str, str] = {}
        self.etags = ETags()

    def address_of(self, path: ObjectPath) -> Address:
        """See :class:`~rankless.storage.http.client.ObjectService`."""
        if self._endpoint is not None:
            return parse_address(self._endpoint)
        host = f"s3.{self._region_in(path.bucket)}.amazonaws.com"
        return Address("https", host if "." in path.bucket else f"{path.bucket}.{host}", None)

    def sign_request(self, request: ObjectRequest) -> HttpRequest:
        """See :class:`~rankless.storage.http.client.ObjectService`."""
        bucket, address, target = request.path.bucket, self.address_of(request.path), self._target(request)
        headers = self._signer.sign(request.method, target, dict(request.headers), address, self._region_in(bucket))
        return HttpRequest(request.method, target, headers, request.body, request.into, request.limit)

    def error_code(self, request: ObjectRequest, response: HttpResponse) -> str:
        """See :class:`~rankless.storage.http.client.ObjectService`."""
        return find_error_code(request.method, response.status, response.body)

    def adapt_to(self, path: ObjectPath, response: HttpResponse, code: str) -> bool:
        """Take from a refusal the region of the bucket, or the clock; get new credentials if they have expired."""
        region = response.headers.get("x-amz-bucket-region") or find_text(parse_xml(response.body), "Region")
        if (code in _REDIRECTED or response.status in _REDIRECTED_STATUSES) and region:
            is_new = self._region_in(path.bucket) != region
            self._region_of[path.bucket] = region
            return is_new
        if code == "RequestTimeTooSkewed" and response.date is not None:
            self._signer.set_clock(response.date)
            return True
        if code in _RENEWABLE:
            self._signer.forget_credentials()
            return True
        return False

    def _region_in(self, bucket: str) -> str:
        return self._region_of.get(bucket, self._region)

    def _target(self, request: ObjectRequest) -> str:
        bucket, key = request.path.bucket, request.path.key
        path = f"/{bucket}/{key}" if self._endpoint is not None or "." in bucket else f"/{key}"
        return make_target(path, request.query)
