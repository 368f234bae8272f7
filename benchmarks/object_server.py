"""A fast server for :mod:`benchmarks.object_store`, in a process of its own: HTTP and HTTPS, a thread per connection.

``python -m benchmarks.object_server FOLDER`` writes the certificate of its authority into ``FOLDER/ca.pem``, and prints
the two ports. It ends with its standard input.
"""

from __future__ import annotations

import importlib
import io
import socket
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from pathlib import Path
from typing import Protocol, Self, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from benchmarks.object_bucket import Answer, Bucket, Request
from benchmarks.request_process import ROOT

HOST = "127.0.0.1"

#: The bytes that are read ahead. A longer read goes straight into the memory of the body.
_AHEAD = 64 * 2**10


@dataclass(frozen=True)
class Endpoint:
    """The URL of a server, and the file with the certificate of its authority."""

    url: str
    ca_file: str

    @property
    def is_plain(self) -> bool:
        """Whether bytes are sent as they are."""
        return self.url.startswith("http:")


class ObjectServer:
    """The process of a server."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.object_server", str(folder)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
        self._ca_file = folder / "ca.pem"

    def __enter__(self) -> Self:
        ports = self._process.stdout.readline().split() if self._process.stdout else []
        self.plain, self.secure = (
            Endpoint(f"{scheme}://{HOST}:{port}", str(self._ca_file))
            for scheme, port in zip(("http", "https"), ports, strict=True)
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def clear(self) -> None:
        """Delete all objects."""
        request = urllib.request.Request(f"{self.plain.url}/bucket", method="DELETE")  # noqa: S310 - this server
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request).close()


def main() -> None:
    """Serve until the end of the standard input."""
    folder, bucket = Path(sys.argv[1]), Bucket()
    context = _create_context(folder)
    plain, secure = (socket.create_server((HOST, 0), backlog=128) for _ in range(2))
    _start_thread(lambda: _accept(plain, bucket, lambda connection: connection))
    _start_thread(lambda: _accept(secure, bucket, lambda connection: context.wrap_socket(connection, server_side=True)))
    print(plain.getsockname()[1], secure.getsockname()[1], flush=True)
    sys.stdin.read()


def _create_context(folder: Path) -> ssl.SSLContext:
    authority = importlib.import_module("trustme").CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(HOST, "localhost").configure_cert(context)
    return context


def _start_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, daemon=True).start()


def _accept(listener: socket.socket, bucket: Bucket, wrap: Callable[[socket.socket], socket.socket]) -> None:
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _start_thread(lambda connection=connection: _serve(connection, bucket, wrap))  # type: ignore[misc]


def _serve(plain: socket.socket, bucket: Bucket, wrap: Callable[[socket.socket], socket.socket]) -> None:
    with suppress(OSError), plain, wrap(plain) as connection, connection.makefile("rb", _AHEAD) as file:
        while (request := _read_request(cast("io.BufferedReader", file), connection)) is not None:
            _send_answer(connection, request.method, bucket.answer(request))


def _send_answer(connection: socket.socket, method: str, answer: Answer) -> None:
    length = sum(map(len, answer.body)) if answer.length is None else answer.length
    headers = {"content-length": length, "date": formatdate(usegmt=True), "x-amz-request-id": "0", **answer.headers}
    if answer.status == HTTPStatus.NO_CONTENT:
        del headers["content-length"]
    lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    connection.sendall("\r\n".join((*lines, "\r\n")).encode())
    if method != "HEAD":
        for piece in answer.body:
            connection.sendall(piece)


class _Source(Protocol):
    """A file that is read line by line, and into memory."""

    def readline(self) -> bytes:
        """Read a line."""

    def readinto(self, memory: memoryview, /) -> int | None:
        """Fill memory, unless the file ends."""


def _read_request(file: _Source, connection: socket.socket) -> Request | None:
    line = file.readline().decode()
    if not line:
        return None
    method, target, _ = line.split()
    headers = _read_headers(file)
    if headers.get("expect", "").lower() == "100-continue":
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    body, trailers = _read_body(file, headers)
    parts = urlsplit(target)
    key = unquote(parts.path).lstrip("/").partition("/")[2]
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    return Request(method, key, query, {**headers, **trailers}, body)


def _read_headers(file: _Source) -> dict[str, str]:
    headers = {}
    while line := file.readline().decode("latin-1").strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return headers


def _read_body(file: _Source, headers: Mapping[str, str]) -> tuple[bytearray, Mapping[str, str]]:
    """Return the body without any frames, and the headers after it."""
    chunks = _HttpChunks(file) if "chunked" in headers.get("transfer-encoding", "") else None
    buffered = io.BufferedReader(chunks, _AHEAD) if chunks else None
    trailers: Mapping[str, str] = {}
    if headers.get("x-amz-content-sha256", "").startswith("STREAMING-"):
        body = bytearray(int(headers["x-amz-decoded-content-length"]))
        trailers = _read_signed_chunks(buffered or file, memoryview(body))
    elif buffered:
        body = bytearray(buffered.read())
    else:
        body = bytearray(int(headers.get("content-length", 0)))
        _fill(file, memoryview(body))
    if buffered:
        buffered.read()
    return body, trailers


def _read_signed_chunks(file: _Source, body: memoryview) -> Mapping[str, str]:
    """Read the frames of ``aws-chunked``, and return the trailers."""
    at = 0
    while size := int(file.readline().partition(b";")[0], 16):
        _fill(file, body[at : at + size])
        at += size
        file.readline()
    if at != len(body):
        raise ConnectionError("the body has another length than was announced")
    return _read_headers(file)


def _fill(file: _Source, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        count = file.readinto(memory[done:])
        if not count:
            raise ConnectionError("the connection has ended inside of a body")
        done += count


class _HttpChunks(io.RawIOBase):
    """The bytes in the frames of ``transfer-encoding: chunked``."""

    def __init__(self, file: _Source) -> None:
        self._file = file
        self._left, self._at_end = 0, False

    def readable(self) -> bool:
        """Return true."""
        return True

    def readinto(self, memory: memoryview, /) -> int:  # type: ignore[override]
        """Read the bytes of the current chunk."""
        if self._at_end:
            return 0
        if not self._left:
            self._left = int(self._file.readline().partition(b";")[0], 16)
        if not self._left:
            self._at_end = True
            _read_headers(self._file)
            return 0
        count = min(self._left, len(memory))
        _fill(self._file, memory[:count])
        self._left -= count
        if not self._left:
            self._file.readline()
        return count


if __name__ == "__main__":
    main()
