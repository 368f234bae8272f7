"""Connections over HTTP, which are kept open between requests: any thread of the process borrows one that is idle.

``http.client`` sends from memory that the caller owns, and receives into it: no byte of a tensor is copied here.

:class:`~rankless.storage.http.client.ObjectClient` has one pool, which the sending threads of a process share. An
answer that is not whole must be an error, and never a shorter answer.
"""

from __future__ import annotations

import http.client
import io
import math
import select
import socket
import ssl
import time
import weakref
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from rankless.errors import InvalidArgumentError
from rankless.storage.body import count_bytes
from rankless.storage.fork_safety import ClosedInForks

#: The most bytes of an answer about objects.
MAX_BODY = 16 * 2**20

#: The most connections to a server that are kept open.
_MOST_IDLE = 64

#: The longest time for an answer: so many time-outs of a connection, and a second for so many bytes.
_MOST_TIMEOUTS, _LEAST_RATE = 10, 1024


@dataclass(frozen=True, slots=True)
class Address:
    """A server: the scheme ``http`` or ``https``, its host, and its port."""

    scheme: str
    host: str
    port: int | None

    @property
    def host_header(self) -> str:
        """The value of the header ``Host``, which is signed. For example, ``localhost:9000``."""
        return self.host if self.port is None else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request: ``target`` is the path with the query, and ``body`` is sent piece by piece.

    The body of the answer is read ``into`` memory, if given. Other answers have at most ``limit`` bytes.
    """

    method: str
    target: str
    headers: Mapping[str, str]
    body: Sequence[memoryview] = ()
    into: memoryview | None = None
    limit: int = MAX_BODY


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """An answer. ``body`` is empty if it was read into the caller's memory, which ``is_filled`` then."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    is_filled: bool = False

    @property
    def date(self) -> datetime | None:
        """The time of the server's clock; ``None`` if it is not known."""
        return parse_http_date(self.headers.get("date", ""))


def parse_http_date(text: str) -> datetime | None:
    """Return the time in a header; ``None`` if it is none."""
    try:
        date = parsedate_to_datetime(text)
        return date if date.tzinfo is not None else date.replace(tzinfo=UTC)
    except (ValueError, TypeError):
        return None


class _Proxy(NamedTuple):
    """A proxy, and the headers with the name and the password of its user."""

    address: Address
    headers: Mapping[str, str]


class _Connection(NamedTuple):
    """A connection to a server. A proxy for ``http`` wants the whole URL: ``prefix`` and the target."""

    http: http.client.HTTPConnection
    prefix: str = ""
    proxy_headers: Mapping[str, str] = MappingProxyType({})

    @property
    def is_open(self) -> bool:
        """Return whether the server has not closed it.

        An idle connection receives its end, or bytes that are no answer: both count as closed.
        """
        if self.http.sock is None:
            return False
        poll = select.poll()
        poll.register(self.http.sock, select.POLLIN)
        return not poll.poll(0)


class ConnectionPool(ClosedInForks):
    """The idle connections of this process to any servers. Each request borrows one. A forked process opens its own.

    Nothing is locked: each step is one operation on a list or a dictionary. A lock could be held at the time of a fork.
    """

    def __init__(self, ca_file: str | None, timeout: float) -> None:
        super().__init__()
        self._ca_file, self._timeout = ca_file, timeout
        self._idle: dict[Address, list[_Connection]] = {}
        weakref.finalize(self, _close_all, self._idle)  # also at the end of the process

    def send(self, address: Address, request: HttpRequest) -> HttpResponse:
        """Send a request, and return the whole answer.

        Raises ``OSError`` or ``HTTPException`` if the connection breaks. Then it is unknown whether the server has
        executed the request.
        """
        connection = self._borrow(address)
        headers, body = {**request.headers, **connection.proxy_headers}, list(request.body) or None
        if body is not None:
            headers["content-length"] = str(count_bytes(body))
        try:
            response = _exchange(connection, request, headers, body)
        except BaseException:
            connection.http.close()
            raise
        self._give_back(address, connection)
        return response

    def close_in_fork(self) -> None:
        """Close the connections of the parent process, which keeps its own side of them."""
        _close_all(self._idle)

    def _borrow(self, address: Address) -> _Connection:
        idle = self._idle.setdefault(address, [])
        with suppress(IndexError):
            while True:
                connection = idle.pop()
                if connection.is_open:
                    return connection
                connection.http.close()
        return self._open(address)

    def _give_back(self, address: Address, connection: _Connection) -> None:
        idle = self._idle.setdefault(address, [])
        if connection.http.sock is not None and len(idle) < _MOST_IDLE:
            idle.append(connection)
        else:
            connection.http.close()

    def _open(self, address: Address) -> _Connection:
        proxy = _find_proxy(address)
        server = address if proxy is None else proxy.address
        host = server.host.strip("[]")  # of an IPv6 address
        if address.scheme == "http":
            plain = http.client.HTTPConnection(host, server.port or http.client.HTTP_PORT, timeout=self._timeout)
            plain.response_class = _WholeResponse
            if proxy is None:
                return _Connection(plain)
            return _Connection(plain, f"http://{address.host_header}", proxy.headers)
        context = ssl.create_default_context(cafile=self._ca_file)
        port = server.port or http.client.HTTPS_PORT
        connection = http.client.HTTPSConnection(host, port, timeout=self._timeout, context=context)
        connection.response_class = _WholeResponse
        if proxy is not None:
            connection.set_tunnel(address.host, address.port, dict(proxy.headers))
        return _Connection(connection)


def _exchange(
    connection: _Connection, request: HttpRequest, headers: Mapping[str, str], body: list[memoryview] | None
) -> HttpResponse:
    try:
        connection.http.request(request.method, connection.prefix + request.target, body, headers)
    except (BrokenPipeError, ConnectionResetError, ssl.SSLEOFError) as error:
        if connection.http.sock is None:  # the connection was never made
            raise
        return _read_early_refusal(connection.http, error)
    return _read_response(connection.http.getresponse(), request)


def _close_all(idle: dict[Address, list[_Connection]]) -> None:
    for connections in list(idle.values()):
        with suppress(IndexError):
            while True:
                connections.pop().http.close()


def parse_address(url: str) -> Address:
    """Return the server of a URL such as ``https://host:9000``. Raises ``ValueError``."""
    scheme, separator, rest = url.rstrip("/").partition("://")
    host, _, port = rest.rpartition(":") if rest.rpartition(":")[2].isdecimal() else (rest, "", "")
    if scheme not in {"http", "https"} or not separator or not host or {"/", "@", "?", "#"} & {*host}:
        raise ValueError(url)
    return Address(scheme, host, int(port) if port else None)


def check_endpoint(endpoint: str) -> None:
    """Raise ``InvalidArgumentError`` unless an endpoint is the URL of a server."""
    try:
        parse_address(endpoint)
    except (AttributeError, ValueError):
        raise InvalidArgumentError(
            "endpoint must be a URL such as 'https://host:9000', without a user, a path and a query"
        ) from None


def make_target(path: str, query: Iterable[tuple[str, str]]) -> str:
    """Return a path and a query as they are sent, and signed. For example, ``/bucket/a%20b?partNumber=1``."""
    pairs = "&".join(f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in sorted(query))
    return quote(path, safe="/-_.~") + (f"?{pairs}" if pairs else "")


def _find_proxy(address: Address) -> _Proxy | None:
    """Return the proxy that the environment names for a server."""
    url = None if proxy_bypass(address.host_header) else getproxies().get(address.scheme)
    if url is None:
        return None
    parts = urlsplit(url if "://" in url else f"http://{url}")
    user = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else ""
    headers = {"Proxy-Authorization": f"Basic {b64encode(user.encode()).decode()}"} if user else {}
    return _Proxy(Address("http", parts.hostname or "", parts.port), headers)


class _PatientReader(io.RawIOBase):
    """The bytes that arrive at a socket, which must not drip: each restarts the time-out of the socket.

    Servers may send some bytes each minute while they execute a request. So the limit is generous. A large buffer is
    filled here: over TLS, ``io.BufferedReader`` would call this once for each 16 KiB.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._count = sock, 0
        self._open_file = sock.makefile("rb", buffering=0)  # keeps the socket open
        self._deadline = time.monotonic() + _MOST_TIMEOUTS * (sock.gettimeout() or math.inf)

    def readable(self) -> bool:
        """Return true."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the bytes that came, or fill a large buffer. Raises ``TimeoutError`` if the answer takes too long."""
        done, memory = 0, memoryview(buffer)
        while True:
            if time.monotonic() > self._deadline + (self._count + done) / _LEAST_RATE:
                raise TimeoutError("the answer arrives too slowly")
            count = self._socket.recv_into(memory[done:])
            done += count
            if not count or done == len(memory) or len(memory) <= io.DEFAULT_BUFFER_SIZE:
                self._count += done
                return done

    def close(self) -> None:
        """Close the socket's file."""
        self._open_file.close()
        super().close()


class _WholeResponse(http.client.HTTPResponse):
    """An answer with whole headers: ``http.client`` takes the end of the connection for the end of the headers."""

    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp.close()
        self.fp = io.BufferedReader(_PatientReader(sock))

    def begin(self) -> None:
        """Read the status and the headers. Raises ``ConnectionResetError`` if the connection ends inside of them."""
        raw = self.fp
        self.fp = _WholeLines(raw)  # type: ignore[assignment]
        try:
            super().begin()
        finally:
            if self.fp is not None:  # else it was closed, because the answer is none
                self.fp = raw


class _WholeLines:
    """A file with whole lines."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def close(self) -> None:
        """Close it, as ``http.client`` does if the first line is no status."""
        self._raw.close()

    def readline(self, limit: int = -1) -> bytes:
        """Read a line. Raises ``ConnectionResetError`` if the file ends before the line does."""
        line: bytes = self._raw.readline(limit)
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the connection ended inside of the headers of the answer")
        return line


def _read_early_refusal(connection: http.client.HTTPConnection, error: OSError) -> HttpResponse:
    """Return the refusal that a server has sent before it has read the whole request. Raise ``error`` without one."""
    try:
        response = connection.getresponse()
        refusal = HttpResponse(response.status, _join_headers(response.getheaders()), response.read(MAX_BODY))
    except (OSError, http.client.HTTPException):
        raise error from None
    finally:
        connection.close()
    if refusal.status < HTTPStatus.BAD_REQUEST:
        raise error
    return refusal


def _read_response(response: http.client.HTTPResponse, request: HttpRequest) -> HttpResponse:
    headers, into = _join_headers(response.getheaders()), request.into
    has_end = response.length is not None or response.chunked
    if response.status < HTTPStatus.OK or not has_end:
        raise http.client.HTTPException(f"the answer has the status {response.status}, or its length is unknown")
    if into is None or response.status not in {200, 206} or response.length not in {None, len(into)}:
        body = response.read(request.limit)
        if response.length:  # more than that, or the connection has ended before
            raise http.client.IncompleteRead(body, response.length)
        return HttpResponse(response.status, headers, body)
    done = 0
    while done < len(into):
        count = response.readinto(into[done:])
        if not count:
            raise http.client.IncompleteRead(b"", len(into) - done)
        done += count
    with suppress(http.client.HTTPException):
        response.read()  # so that the connection can be used again
    return HttpResponse(response.status, headers, is_filled=True)


def _join_headers(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return headers by their names in lower case. The values of one that comes several times are joined by commas.

    For example, two headers ``X: 1`` and ``x: 2`` become ``x`` with ``1, 2``.
    """
    headers: dict[str, str] = {}
    for name, value in pairs:
        key = name.lower()
        headers[key] = f"{headers[key]}, {value}" if key in headers else value
    return headers
