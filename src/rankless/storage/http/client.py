"""A client of an object store: it sends each request until it is answered, and gives advice if it is refused.

All requests of all stores go through :meth:`ObjectClient.send` (:mod:`rankless.storage.http.object_reads`), from any
thread of a rank. Whether an earlier attempt may have had its effect must reach the caller: conditional writes are
decided by it.
"""

from __future__ import annotations

import errno
import http.client
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol
from urllib.parse import urlsplit

from rankless.errors import InvalidArgumentError, StorageError
from rankless.storage.http.connection import MAX_BODY, Address, ConnectionPool, HttpRequest, HttpResponse
from rankless.storage.http.retries import Attempts, Throttle
from rankless.storage.http.xml import find_text, parse_xml, root_name
from rankless.storage.object_path import ObjectPath

#: Statuses of failures that may be over at the next attempt.
_TRANSIENT_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
_THROTTLED = frozenset({429, 503})

#: The codes of refusals of credentials, whatever their permissions.
_UNKNOWN_CREDENTIALS = frozenset({"AuthenticationFailed", "InvalidAccessKeyId", "SignatureDoesNotMatch"})

_MISSING_BUCKETS = frozenset({"NoSuchBucket", "ContainerNotFound"})

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_REDIRECT_ADVICE = (
    "pass the endpoint and the region of the bucket, or check whether a gateway or a login page is in between"
)

_ERRNO_BY_STATUS = {
    401: errno.EACCES,
    403: errno.EACCES,
    404: errno.ENOENT,
    409: errno.EBUSY,
    412: errno.EEXIST,
    416: errno.EINVAL,
}


class RefusedRequestError(StorageError):
    """A refusal of the server, with its status and its code, such as ``NoSuchKey``.

    It ``is_repeated`` if an earlier attempt of the same request may have had its effect, though its answer was lost.
    """

    def __init__(
        self, number: int, message: str, status: int = 0, code: str = "", *, is_repeated: bool = False
    ) -> None:
        super().__init__(number, message)
        self.status, self.code, self.is_repeated = status, code, is_repeated


class NoAnswerError(RefusedRequestError):
    """There was no answer of the service. It is unknown whether the request had its effect."""


@dataclass(frozen=True, slots=True)
class ObjectRequest:
    """A request for an object; for a bucket if the path has no key.

    ``permission`` is the permission that the request needs, for errors, such as ``s3:GetObject``. ``action`` completes
    "could not". If the answer must be XML, ``root`` is the name of its first element. It must have all headers that the
    request ``needs``. An answer that is not read ``into`` memory has at most ``limit`` bytes.
    """

    method: str
    path: ObjectPath
    action: str
    permission: str
    query: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    body: Sequence[memoryview] = ()
    into: memoryview | None = None
    root: str = ""
    limit: int = MAX_BODY
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ObjectResponse:
    """An answer that is no refusal. It ``is_filled`` if the memory of the caller has its body."""

    headers: Mapping[str, str]
    body: bytes
    status: int = 200
    is_filled: bool = False


class ObjectService(Protocol):
    """The dialect of a cloud: addresses, signatures, and codes of errors."""

    @property
    def transient_codes(self) -> frozenset[str]:
        """The codes of failures that may be over at the next attempt."""

    @property
    def header_of_all_answers(self) -> str | None:
        """The name of a header that each answer of the service has, so that others are recognised; or ``None``."""

    def address_of(self, path: ObjectPath) -> Address:
        """Return the server of a bucket."""

    def sign_request(self, request: ObjectRequest) -> HttpRequest:
        """Return a request as it is sent. Raises ``StorageError`` if there are no credentials."""

    def error_code(self, request: ObjectRequest, response: HttpResponse) -> str:
        """Return the code of a refusal, if there is one. Also an answer with the status 200 may be one."""

    def adapt_to(self, path: ObjectPath, response: HttpResponse, code: str) -> bool:
        """Learn from a refusal how to make the next attempt right. Return false if there is nothing to learn."""


class ObjectClient:
    """Sends requests to one service, from any number of threads and processes."""

    def __init__(self, service: ObjectService, *, ca_file: str | None, timeout: float, retry_seconds: float) -> None:
        self._service, self._retry_seconds = service, retry_seconds
        self._pool = ConnectionPool(ca_file, timeout)
        self._throttle = Throttle()

    def send(self, request: ObjectRequest) -> ObjectResponse:
        """Send a request until it is answered. Raises ``StorageError`` if it is refused, or time is over."""
        attempts = Attempts(self._retry_seconds)
        while True:
            self._throttle.wait()
            try:
                response = self._send_once(request)
            except NoAnswerError as error:
                self._throttle.report_silence(attempts, str(error))
                if attempts.wait():
                    continue
                raise
            code = self._service.error_code(request, response)
            if response.status < HTTPStatus.MULTIPLE_CHOICES and not code:
                if request.root in {"", root_name(response.body)} and response.headers.keys() >= {*request.needs}:
                    return ObjectResponse(response.headers, response.body, response.status, response.is_filled)
                if attempts.wait():
                    continue
                raise unexpected_answer_error(request.action, request.path)
            if attempts.may_adapt() and self._service.adapt_to(request.path, response, code):
                continue
            is_transient = response.status in _TRANSIENT_STATUSES or code in self._service.transient_codes
            if response.status in _THROTTLED:
                self._throttle.slow_down(attempts.next_wait)
            if not (is_transient and attempts.wait()):
                # No variable holds the raised error: it would be a cycle, which keeps all objects in its frames.
                raise _refusal(request, response, code, is_repeated=attempts.may_have_had_effect)

    def _send_once(self, request: ObjectRequest) -> HttpResponse:
        """Return the answer to a request. Raises ``StorageError`` if there is none, or if it is not the service's."""
        address = self._service.address_of(request.path)
        try:
            response = self._pool.send(address, self._service.sign_request(request))
        except StorageError:
            raise
        except http.client.InvalidURL:  # its text may contain a signature
            raise InvalidArgumentError(
                f"{request.path} or its credentials contain a character that HTTP does not allow"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
            where = f"could not {request.action} {request.path} at {address.host_header}"
            advice = "check the network, and the endpoint of the store"
            reason = (isinstance(error, OSError) and error.strerror) or error or type(error).__name__
            raise NoAnswerError(number, f"{where}: {reason}; {advice}") from error
        known = self._service.header_of_all_answers
        if known is not None and known not in response.headers and response.status not in _TRANSIENT_STATUSES:
            raise NoAnswerError(errno.EIO, _describe_unexpected(request.action, request.path))
        return response


def unexpected_answer_error(action: str, path: ObjectPath) -> RefusedRequestError:
    """Return the error of an answer that is none to the request, such as a page of a proxy."""
    return RefusedRequestError(errno.EIO, _describe_unexpected(action, path))


def _describe_unexpected(action: str, path: ObjectPath) -> str:
    return f"could not {action} {path}: the answer is none to this request: is that the server, or a proxy?"


def _refusal(request: ObjectRequest, response: HttpResponse, code: str, *, is_repeated: bool) -> RefusedRequestError:
    text = " ".join(find_text(parse_xml(response.body), "Message").split())
    message = text or code or f"HTTP status {response.status}"
    if response.status == HTTPStatus.UNAUTHORIZED or code in _UNKNOWN_CREDENTIALS:
        message = f"{message}; the server does not accept the credentials: pass others"
    elif response.status == HTTPStatus.FORBIDDEN:
        message = f"{message}; the credentials need the permission {request.permission}"
    if response.status in _REDIRECTS:
        target = _redirect_target(response)
        message = f"{message}; the server redirects to {target}, which is not followed: {_REDIRECT_ADVICE}"
    if code in _MISSING_BUCKETS:
        message = f"{message.rstrip('.')}; create it, or pass the name of another: rankless creates none"
    number = _ERRNO_BY_STATUS.get(response.status, errno.EIO)
    described = f"could not {request.action} {request.path}: {message}"
    return RefusedRequestError(number, described, response.status, code, is_repeated=is_repeated)


def _redirect_target(response: HttpResponse) -> str:
    """Return the server of a redirect, without the path and the query: they may contain a signature.

    For example, ``https://other.host:9000``.
    """
    with suppress(ValueError):
        parts = urlsplit(response.headers.get("location", ""))
        if parts.scheme and parts.hostname:
            return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    return "another address"
