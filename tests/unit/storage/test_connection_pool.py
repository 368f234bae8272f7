"""Connections to object stores: threads borrow them, forked processes do not, and the end of a process closes them."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from unittest import mock

import pytest

from rankless.storage.http.connection import Address, ConnectionPool, HttpRequest, parse_address
from rankless.storage.store import map_requests
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import FakeS3, store_at

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@pytest.fixture
def opened() -> Iterator[list[Address]]:
    """The addresses of the connections that are opened."""
    addresses: list[Address] = []
    open_one = ConnectionPool._open

    def count(self: ConnectionPool, address: Address) -> object:
        addresses.append(address)
        return open_one(self, address)

    with mock.patch.object(ConnectionPool, "_open", count):
        yield addresses


def test_threads_of_one_round_borrow_the_connections_of_the_round_before(opened: list[Address]) -> None:
    with FakeS3().served() as url, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = store_at(url)
        paths = [store.path(f"{BUCKET}/{number}") for number in range(40)]
        for _ in range(5):
            map_requests(lambda path: store.replace_small(path, b"x"), paths)
            map_requests(store.read_small, paths)
        gc.collect()
    assert len(opened) <= 16
    assert not [str(warning.message) for warning in caught if warning.category is ResourceWarning]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def serve(server: socket.socket, answers: int) -> None:
    """Accept two connections, and close each after some answers."""
    for _ in range(2):
        connected, _ = server.accept()
        with connected:
            for _ in range(answers):
                if not connected.recv(65_536):
                    break
                connected.sendall(ANSWER)


def test_a_connection_that_the_server_has_closed_is_replaced(opened: list[Address]) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        thread = threading.Thread(target=serve, args=(server, 1))
        thread.start()
        pool, address = ConnectionPool(None, 5.0), parse_address(f"http://127.0.0.1:{server.getsockname()[1]}")
        for _ in range(2):
            assert pool.send(address, HttpRequest("GET", "/", {})).body == b"ok"
            (connection,) = pool._idle[address]
            wait_until(lambda: not connection.is_open)  # noqa: B023 - called at once
        thread.join()
    assert len(opened) == 2


def test_a_forked_process_opens_its_own_connection(opened: list[Address]) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        threading.Thread(target=serve, args=(server, 9), daemon=True).start()
        pool, address = ConnectionPool(None, 5.0), parse_address(f"http://127.0.0.1:{server.getsockname()[1]}")
        pool.send(address, HttpRequest("GET", "/", {}))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads
            child = os.fork()
        if not child:
            os._exit(pool._idle[address] != [])
        assert os.waitpid(child, 0)[1] == 0
        assert pool.send(address, HttpRequest("GET", "/", {})).body == b"ok"
        assert len(opened) == 1


def test_the_end_of_the_process_closes_them() -> None:
    script = """
import sys
from tests.helpers.fake_s3 import FakeS3, store_at
with FakeS3().served() as url:
    store = store_at(url)
    store.replace_small(store.path("bucket/a"), b"x")
"""
    ended = subprocess.run(
        [sys.executable, "-W", "always", "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert "unclosed" not in ended.stderr
