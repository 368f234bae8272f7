"""Calls that may never come back, made by a daemon thread: who asked waits for them as long as it wants to.

A daemon thread keeps no process from ending. But one that comes back from C++ code while the interpreter ends takes the
process down with SIGABRT: it may not run any more, and C++ cannot unwind it. So every thread is stopped before that.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from holdfast.errors import RankFailedError
from holdfast.process.exit_order import ExitStage, call_at_exit

T = TypeVar("T")

_Todo = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]

#: Seconds in which all threads must end at exit. One that waits for a host that is gone is left where it is.
_EXIT_SECONDS = 5.0


class DaemonExecutor:
    """Makes calls one after another. Its thread ends with it, and keeps no process from ending."""

    def __init__(self, name: str) -> None:
        self._late: Future[Any] | None = None
        self._worker = _DaemonWorker(name)
        #: Make no more calls.
        self.close = weakref.finalize(self, self._worker.stop)

    def begin(self, call: Callable[[], T]) -> Future[T]:
        """Have a call made when those before it are back."""
        return self._worker.submit(call)

    def ask(self, seconds: float, call: Callable[[], T]) -> T:
        """What a call gives. Raises ``TimeoutError`` where it is not back by then; and at once, until it is."""
        if self._late is not None and not self._late.done():
            raise TimeoutError("an earlier call is not back yet")
        done = self.begin(call)
        try:
            return done.result(seconds)
        except TimeoutError:
            if done.done():
                return done.result()
            self._late = done
            raise TimeoutError(f"no answer within {seconds:g} seconds") from None


class _DaemonWorker:
    """A queue of calls, and the thread that makes them, which is started when first needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._todo: _Todo = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        if os.getpid() != self._process:  # it has the same connection, over which two cannot talk
            raise RankFailedError("this process was forked from a rank: it cannot talk to the other ranks in its place")
        if self._thread is None or not self._thread.is_alive():
            self._todo = queue.SimpleQueue()
            self._thread = _threads.start(self._name, self._todo)
        done: Future[T] = Future()
        self._todo.put((done, call))
        return done

    def stop(self) -> None:
        self._todo.put(None)


class _WorkerThreads:
    """The threads of this process that make calls."""

    def __init__(self) -> None:
        self._process = 0
        self._is_closed = False
        self._running: dict[threading.Thread, _Todo] = {}

    def start(self, name: str, todo: _Todo) -> threading.Thread:
        if self._process != os.getpid():
            self._process = os.getpid()
            self._running = {}  # the threads of the process that this one was forked from
            self._is_closed = False
            call_at_exit(ExitStage.STORE, self.stop_all)
        if self._is_closed and threading.current_thread().daemon:
            raise RankFailedError("this process ends: its daemon threads cannot talk to other ranks any more")
        for ended in [thread for thread in list(self._running) if not thread.is_alive()]:
            self._running.pop(ended, None)
        thread = threading.Thread(target=_serve, args=(todo,), name=name, daemon=True)
        thread.start()
        self._running[thread] = todo
        return thread

    def stop_all(self) -> None:
        """Let every thread make the calls that it was given, and end."""
        ends = time.monotonic() + _EXIT_SECONDS
        self._is_closed = True
        running = list(self._running.items())
        for _, todo in running:
            todo.put(None)
        for thread, _ in running:
            thread.join(max(0.0, ends - time.monotonic()))


_threads = _WorkerThreads()


def _serve(todo: _Todo) -> None:
    while (item := todo.get()) is not None:
        _make(*item)
        del item  # what a call holds is not held until the next one


def _make(done: Future[Any], call: Callable[[], Any]) -> None:
    try:
        done.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised where it is waited for
        done.set_exception(error)
