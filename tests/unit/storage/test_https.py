"""Connections by HTTPS: which servers are trusted, what proxies see, and refusals that come early."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rankless.storage.http.connection import ConnectionPool, HttpRequest, HttpResponse, parse_address
from tests.helpers.certificates import Authority

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@contextlib.contextmanager
def served(serve: Callable[[ssl.SSLSocket], object], context: ssl.SSLContext) -> Iterator[int]:
    """Serve one connection in a thread. Yield the port."""
    listener = socket.create_server((HOST, 0))

    def accept() -> None:
        with (
            contextlib.suppress(OSError),
            listener.accept()[0] as plain,
            context.wrap_socket(plain, server_side=True) as connection,
        ):
            serve(connection)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    thread.join(20)
    listener.close()
    assert not thread.is_alive()


def send(authority: Authority, port: int, request: HttpRequest, host: str = HOST) -> HttpResponse:
    return ConnectionPool(authority.file, 10.0).send(parse_address(f"https://{host}:{port}"), request)


def answer(connection: ssl.SSLSocket) -> None:
    receive_head(connection)
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nyes")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_server_of_the_authority_is_trusted(authority: Authority, version: ssl.TLSVersion) -> None:
    with served(answer, authority.issue(HOST, version=version)) as port:
        assert send(authority, port, HttpRequest("GET", "/a", {})).body == b"yes"


@pytest.mark.parametrize(("names", "host"), [(["other.example"], "localhost"), ([HOST], "localhost")])
def test_the_certificate_of_another_host_is_refused(authority: Authority, names: list[str], host: str) -> None:
    refused = pytest.raises(ssl.SSLCertVerificationError, match=r"mismatch|not valid for")
    with served(answer, authority.issue(*names)) as port, refused:
        send(authority, port, HttpRequest("GET", "/a", {}), host)


def test_the_certificate_of_an_unknown_authority_is_refused(authority: Authority, tmp_path: Path) -> None:
    refused = pytest.raises(ssl.SSLCertVerificationError, match="verify failed")
    with served(answer, Authority(tmp_path).issue(HOST)) as port, refused:
        send(authority, port, HttpRequest("GET", "/a", {}))


def test_a_request_is_refused_before_its_body_has_been_read(authority: Authority) -> None:
    def refuse(connection: ssl.SSLSocket) -> None:
        connection.recv(100)
        connection.sendall(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 2\r\n\r\nno")
        time.sleep(0.2)  # the refusal arrives before the end of the connection

    with served(refuse, authority.issue(HOST)) as port:
        response = send(authority, port, HttpRequest("PUT", "/a", {}, [memoryview(bytes(20_000_000))]))
        assert (response.status, response.body) == (403, b"no")


def test_a_proxy_forwards_what_it_cannot_read(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    proxy = socket.create_server((HOST, 0))

    def forward() -> None:
        with proxy.accept()[0] as plain:
            seen.append(receive_head(plain))
            plain.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            with authority.issue("store.example").wrap_socket(plain, server_side=True) as connection:
                seen.append(receive_head(connection))
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nyes")

    thread = threading.Thread(target=forward, daemon=True)
    thread.start()
    monkeypatch.setenv("https_proxy", f"http://{HOST}:{proxy.getsockname()[1]}")
    monkeypatch.delenv("no_proxy", raising=False)
    address = parse_address("https://store.example")
    response = ConnectionPool(authority.file, 10.0).send(address, HttpRequest("GET", "/a", {}))
    thread.join(20)
    proxy.close()
    assert (response.status, response.body) == (200, b"yes")
    assert seen[0].startswith(b"CONNECT store.example:443 HTTP/1.")
    assert seen[1].startswith(b"GET /a HTTP/1.1\r\n")


def receive_head(connection: socket.socket) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += connection.recv(1)
    return head
