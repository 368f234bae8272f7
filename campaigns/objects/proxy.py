"""A TCP proxy between clients and a server that cuts, delays, truncates, changes or repeats bytes at random.

It knows nothing of HTTP. A fault can happen at any byte, of a request and of an answer.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

#: The mean number of bytes between two faults of the whole proxy.
_BYTES_BETWEEN_FAULTS = 1_500_000

#: The faults: end the connection; end it after an orderly close of one direction; wait; send some bytes twice.
_FAULTS = ("cut", "truncated", "delayed", "duplicated")

_CHUNK = 64 * 2**10


class FaultyProxy:
    """A proxy in front of a server. ``faults`` counts what it has done.

    With ``changes_bytes`` it also sends bytes twice, so that a message arrives with others than were sent.
    """

    def __init__(self, url: str, seed: int, *, changes_bytes: bool = True) -> None:
        address = urlsplit(url)
        self._server = (address.hostname, address.port)
        self._draw, self._lock = random.Random(seed), threading.Lock()
        self._left = self._draw_distance()
        self._kinds = _FAULTS if changes_bytes else _FAULTS[:-1]
        self.faults: Counter[str] = Counter()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._server)
        except OSError:
            client.close()
            return
        for source, target in ((client, server), (server, client)):
            threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(_CHUNK):
                fault, position = self._draw_fault(len(data))
                if not fault:
                    target.sendall(data)
                    continue
                target.sendall(data[:position])
                if fault == "truncated":
                    break
                if fault == "cut":
                    self._reset(source, target)
                    return
                if fault == "delayed":
                    time.sleep(0.5)
                    target.sendall(data[position:])
                else:
                    target.sendall(data[max(0, position - 100) :])
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _draw_fault(self, nbytes: int) -> tuple[str, int]:
        """Return the fault in the next bytes, and its position; an empty text if there is none."""
        with self._lock:
            if nbytes < self._left:
                self._left -= nbytes
                return "", 0
            position, self._left = self._left, self._draw_distance()
            fault = self._draw.choice(self._kinds)
            self.faults[fault] += 1
            return fault, position

    def _draw_distance(self) -> int:
        return int(self._draw.expovariate(1 / _BYTES_BETWEEN_FAULTS)) + 1

    @staticmethod
    def _reset(*ends: socket.socket) -> None:
        for end in ends:
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                end.close()
