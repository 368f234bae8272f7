"""What the fakes of all clouds share: they fail on request, before or after an effect, and are connected or served.

In one process a fake takes the place of the connections. For several ones it is a server on the loopback interface.
"""

from __future__ import annotations

import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email.utils import formatdate
from http.client import RemoteDisconnected
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from unittest import mock

from rankless.storage.http.connection import Address, ConnectionPool, HttpRequest, HttpResponse
from rankless.storage.store import ObjectStore

BUCKET = "bucket"

#: The most seconds that the end of a server takes.
_POLL_SECONDS = 0.02


class RecordedRequest(Protocol):
    """A request that has arrived."""

    @property
    def kind(self) -> str: ...


#: Called with each request before its effect (``"before"``) and after it (``"after"``). An exception is raised in the
#: client, as if the connection broke; a response takes the place of the true one.
OnRequest = Callable[[Any, str], HttpResponse | None]


class FakeStore(ABC):
    """The state of a store with one bucket."""

    objects: dict[str, Any]
    uploads: dict[str, Any]

    def __init__(self) -> None:
        self.objects, self.uploads = {}, {}
        self.requests: list[Any] = []
        self.on_request: OnRequest = lambda request, stage: None  # noqa: ARG005
        self.lock = threading.RLock()
        self.clock: Callable[[], float] = time.time
        #: For how many seconds lists do not have a new object.
        self.list_lag = 0.0

    def times_of(self, stored: Any) -> dict[str, str]:
        """Return the headers of an object that tell its time and the server's."""
        return {"last-modified": formatdate(stored.time, usegmt=True), "date": formatdate(self.clock(), usegmt=True)}

    def listed_objects(self) -> dict[str, Any]:
        """Return the objects that lists have, by their keys."""
        return {key: stored for key, stored in self.objects.items() if self.clock() - stored.time >= self.list_lag}

    @abstractmethod
    def store_at(self, endpoint: str, **options: Any) -> ObjectStore:
        """Return a store that sends its requests to this one."""

    @abstractmethod
    def handle(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> HttpResponse:
        """Answer a request."""

    def send(self, _: Address, request: HttpRequest) -> HttpResponse:
        """What a connection would do."""
        response = self.handle(request.method, request.target, request.headers, b"".join(request.body))
        if request.into is None or response.status not in {200, 206} or len(response.body) != len(request.into):
            return response
        request.into[:] = response.body
        return HttpResponse(response.status, response.headers, is_filled=True)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Let all stores of this process talk to this one."""
        with mock.patch.object(ConnectionPool, "send", lambda _, *args: self.send(*args)):
            yield

    @contextmanager
    def served(self, context: ssl.SSLContext | None = None) -> Iterator[str]:
        """Serve it on the loopback interface, encrypted if a context is given. Yield the URL."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # an answer in one piece: the second of two would wait for an acknowledgement, 40 ms

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                try:
                    response = fake.handle(self.command, self.path, dict(self.headers), body)
                except ConnectionError:
                    self.close_connection = True
                    return
                self.send_response_only(response.status)
                if "date" not in response.headers:
                    self.send_header("date", self.date_time_string())
                told = {name: value for name, value in response.headers.items() if name != "content-length"}
                length = response.headers.get("content-length") if self.command == "HEAD" else len(response.body)
                for name, value in {**told, "content-length": str(length or 0)}.items():
                    for item in value.split(",") if name == "x-goog-hash" else [value]:
                        self.send_header(name, item)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(response.body)

            do_PUT = do_POST = do_DELETE = do_HEAD = do_GET  # noqa: N815

            def log_message(self, *args: Any) -> None:
                pass

        server = _Server(("127.0.0.1", 0), Handler)
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,), daemon=True)
        thread.start()
        try:
            yield f"{'http' if context is None else 'https'}://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Server(ThreadingHTTPServer):
    """A server with room for the connections of many ranks: others would be reset on a busy machine."""

    request_queue_size = 128


class Answers:
    """Gives these answers to the first requests of a kind, instead of the true ones."""

    def __init__(self, *answers: HttpResponse | Callable[[], None], kind: str = "get", stage: str = "before") -> None:
        self.answers, self.kind, self.stage = list(answers), kind, stage

    def __call__(self, request: RecordedRequest, stage: str) -> HttpResponse | None:
        if request.kind != self.kind or stage != self.stage or not self.answers:
            return None
        answer = self.answers.pop(0)
        if isinstance(answer, HttpResponse):
            return answer
        answer()
        return None


class LoseOnce:
    """The connection breaks at one request, before or after its effect."""

    def __init__(self, number: int, stage: str) -> None:
        self.number, self.stage, self.count = number, stage, 0

    def __call__(self, request: object, stage: str) -> None:
        self.count += stage == "before"
        if self.count == self.number + 1 and stage == self.stage:
            self.number = -1
            disconnect()


def disconnect() -> None:
    """Break the connection."""
    raise RemoteDisconnected("the test broke the connection")
