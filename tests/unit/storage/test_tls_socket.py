"""Connections that encrypt many records at a time, against servers that use Python's own sockets of TLS."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.storage.http.connection import ConnectionPool, HttpRequest, parse_address
from holdfast.storage.http.tls_socket import TlsSocket
from tests.helpers.certificates import Authority

HOST = "127.0.0.1"
VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


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


def connect(port: int, authority: Authority, host: str = HOST, timeout: float = 10.0) -> TlsSocket:
    plain = socket.create_connection((HOST, port), timeout=timeout)
    try:
        return TlsSocket(plain, ssl.create_default_context(cafile=authority.file), host)
    except BaseException:
        plain.close()
        raise


def receive(connection: ssl.SSLSocket, nbytes: int) -> bytes:
    with connection.makefile("rb") as file:
        return file.read(nbytes)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("nbytes", [1, 16384, 16385, 2**18, 3_000_001])
def test_bytes_arrive_in_both_directions(authority: Authority, version: ssl.TLSVersion, nbytes: int) -> None:
    data = random.Random(nbytes).randbytes(nbytes)

    def echo(connection: ssl.SSLSocket) -> None:
        connection.sendall(receive(connection, nbytes)[::-1])

    with served(echo, authority.issue(HOST, version=version)) as port:
        client = connect(port, authority)
        client.sendall(memoryview(data))
        client.sendall(b"")
        with client.makefile("rb") as file:
            client.close()  # the file keeps the connection open
            answer = bytearray(nbytes)
            assert file.readinto(answer) == nbytes  # type: ignore[union-attr]
            assert answer == data[::-1]
            assert file.read(1) == b""


def test_what_arrives_is_returned_without_waiting_for_more(authority: Authority) -> None:
    asked = threading.Event()

    def serve(connection: ssl.SSLSocket) -> None:
        connection.sendall(b"first")
        assert asked.wait(10)
        connection.sendall(b"second")

    with served(serve, authority.issue(HOST)) as port:
        client = connect(port, authority)
        with client.makefile("rb", buffering=0) as file:
            assert file.read(100) == b"first"
            asked.set()
            assert file.read(100) == b"second"
            assert file.read(100) == b""
        client.close()


@pytest.mark.parametrize(("names", "host"), [(["other.example"], "this.example"), ([HOST], "127.0.0.2")])
def test_the_certificate_of_another_host_is_refused(authority: Authority, names: list[str], host: str) -> None:
    refused = pytest.raises(ssl.SSLCertVerificationError, match=r"mismatch|not valid for")
    with served(lambda connection: connection.recv(1), authority.issue(*names)) as port, refused:
        connect(port, authority, host)


def test_the_certificate_of_an_unknown_authority_is_refused(authority: Authority, tmp_path: Path) -> None:
    refused = pytest.raises(ssl.SSLCertVerificationError, match="verify failed")
    with served(lambda connection: connection.recv(1), Authority(tmp_path).issue(HOST)) as port, refused:
        connect(port, authority)


def test_a_connection_that_breaks_ends_the_file(authority: Authority) -> None:
    with served(lambda connection: connection.shutdown(socket.SHUT_RDWR), authority.issue(HOST)) as port:
        client = connect(port, authority)
        with client.makefile("rb") as file:
            assert file.read(10) == b""
        client.close()


def test_a_server_that_sends_nothing_is_not_waited_for(authority: Authority) -> None:
    done = threading.Event()
    with served(lambda _: done.wait(10), authority.issue(HOST)) as port:
        client = connect(port, authority, timeout=0.3)
        with client.makefile("rb") as file, pytest.raises(TimeoutError):
            file.read(10)
        client.close()
        done.set()


def test_a_record_that_drips_has_the_timeout_of_one_read(authority: Authority) -> None:
    """Each of its bytes arrives in time, but not all of them."""
    ends: tuple[ssl.MemoryBIO, ssl.MemoryBIO] = ssl.MemoryBIO(), ssl.MemoryBIO()
    encrypted = authority.issue(HOST).wrap_bio(*ends, server_side=True)
    listener = socket.create_server((HOST, 0))

    def drip() -> None:
        with listener.accept()[0] as plain, contextlib.suppress(OSError):
            while True:
                try:
                    encrypted.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    plain.sendall(ends[1].read())
                    ends[0].write(plain.recv(2**16))
            encrypted.write(bytes(1000))
            for byte in ends[1].read():
                plain.sendall(bytes([byte]))
                time.sleep(0.02)

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    client = connect(listener.getsockname()[1], authority, timeout=0.5)
    started = time.monotonic()
    with client.makefile("rb") as file, pytest.raises(TimeoutError, match="too slowly"):
        file.read(10)
    assert time.monotonic() - started < 5
    client.close()
    thread.join(20)
    listener.close()


def test_a_request_that_is_refused_early_returns_the_refusal(authority: Authority) -> None:
    def refuse(connection: ssl.SSLSocket) -> None:
        connection.recv(100)
        connection.sendall(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 2\r\n\r\nno")
        time.sleep(0.2)  # the refusal arrives before the end of the connection

    with served(refuse, authority.issue(HOST)) as port:
        address = parse_address(f"https://{HOST}:{port}")
        request = HttpRequest("PUT", "/a", {"host": address.host_header}, [memoryview(bytes(20_000_000))])
        answer = ConnectionPool(authority.file, 10.0).send(address, request)
        assert (answer.status, answer.body) == (403, b"no")


def test_a_proxy_forwards_what_it_cannot_read(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    def serve(connection: ssl.SSLSocket) -> None:
        seen.append(receive_head(connection))
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nyes")

    proxy = socket.create_server((HOST, 0))

    def forward() -> None:
        with proxy.accept()[0] as plain:
            seen.append(receive_head(plain))
            plain.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            with authority.issue("store.example").wrap_socket(plain, server_side=True) as connection:
                serve(connection)

    thread = threading.Thread(target=forward, daemon=True)
    thread.start()
    monkeypatch.setenv("https_proxy", f"http://{HOST}:{proxy.getsockname()[1]}")
    monkeypatch.delenv("no_proxy", raising=False)
    address = parse_address("https://store.example")
    answer = ConnectionPool(authority.file, 10.0).send(address, HttpRequest("GET", "/a", {"host": "store.example"}))
    thread.join(20)
    proxy.close()
    assert (answer.status, answer.body) == (200, b"yes")
    assert seen[0].startswith(b"CONNECT store.example:443 HTTP/1.")
    assert seen[1].startswith(b"GET /a HTTP/1.1\r\n")


def receive_head(connection: socket.socket) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += connection.recv(1)
    return head
