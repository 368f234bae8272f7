"""Calls to functions on another host: a process of that host runs them, one after the other."""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from types import TracebackType
from typing import Any, Self

#: The port on which each host listens.
PORT = 7000


class RemoteError(RuntimeError):
    """An error on another host, with its traceback. ``errno`` is that of an ``OSError``."""

    def __init__(self, kind: str, errno: int | None, text: str) -> None:
        super().__init__(kind, errno, text)
        self.kind, self.errno, self.text = kind, errno, text

    def __str__(self) -> str:
        return self.text


class Worker:
    """A process on another host. It ends when the worker is closed."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def call(self, function: Callable[..., Any], *args: Any, seconds: float = 600.0) -> Any:
        """Call a function of a module, and return what it returns. Raises ``RemoteError``."""
        self.send(function, *args)
        return self.receive(seconds)

    def send(self, function: Callable[..., Any], *args: Any) -> None:
        """Begin a call."""
        self._pipe.send((function, args))

    def receive(self, seconds: float = 600.0) -> Any:
        """Return what the call returned that was begun. Raises ``RemoteError`` and ``TimeoutError``."""
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"no answer within {seconds} s")
        error, value = self._pipe.recv()
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """End the process."""
        self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(address: str, port: int, seconds: float, is_running: Callable[[], bool]) -> Worker:
    """Return a new worker of a host that may still be booting. Raises ``TimeoutError``."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and is_running():
        try:
            # A host that boots does not refuse, it is silent.
            with socket.create_connection((address, port), timeout=2.0):
                pass
            return Worker(Client((address, port)))
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(f"the host {address} did not answer within {seconds} s")


def serve(address: str, port: int) -> None:
    """Start a process for each connection, which makes the calls that it receives. Does not return."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects ended processes
    listener = Listener((address, port), backlog=64)
    while True:
        pipe = listener.accept()
        pid = os.fork()
        if not pid:
            listener.close()
            _run_calls(pipe)
        pipe.close()


def _run_calls(pipe: Connection) -> None:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        while True:
            function, args = pipe.recv()
            pipe.send(_outcome(function, args))
    except (EOFError, OSError):
        pass
    except BaseException:  # noqa: BLE001 - the host's log has it
        traceback.print_exc()
    finally:
        os._exit(0)


def _outcome(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[RemoteError | None, Any]:
    try:
        return None, function(*args)
    except BaseException as error:  # noqa: BLE001 - the campaign judges it
        return RemoteError(type(error).__name__, getattr(error, "errno", None), traceback.format_exc()), None
