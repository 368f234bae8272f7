"""Runs calls that may block forever in a daemon thread, so that the caller can time out.

A daemon thread does not keep the process from ending. But if such a thread returns from C++ code while the interpreter
shuts down, the process dies with SIGABRT: the thread may not run any more, and C++ cannot unwind it. So every thread is
stopped before that.

Each :class:`~rankless.engine.comm.session.RankGroup` has one for its calls of the key-value store, each
:class:`~rankless.engine.io.p2p.P2PExchange` one for each kind of waits. The threads end in the stage ``STORE`` of the
exit, after the stages of saves: a save in the background votes until then. No call of a store or of a wait for bytes
may run in another thread: the process would hang in it, or die at its exit.
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

from rankless.errors import RankFailedError
from rankless.process.exit_order import ExitStage, call_at_exit

T = TypeVar("T")

_CallQueue = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]

#: All threads must end within this many seconds at exit. A thread that waits for an unreachable host is left running.
_EXIT_SECONDS = 5.0


#: The message for a process that would use the connections of another one.
FORKED = "this process was forked from a rank: it cannot communicate with the other ranks in its place"


class DaemonExecutor:
    """Runs calls one after another in a daemon thread, which ends with the executor."""

    def __init__(self, name: str) -> None:
        self._overdue: Future[Any] | None = None
        self._worker = _DaemonWorker(name)
        #: Stops the executor.
        self.close = weakref.finalize(self, self._worker.stop_thread)

    def check_process(self) -> None:
        """Raise ``RankFailedError`` if this process was forked from the one that made the executor."""
        self._worker.check_process()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Schedule a call. It runs when those before it have returned."""
        return self._worker.submit(call)

    def call_with_timeout(self, seconds: float, call: Callable[[], T]) -> T:
        """Return the result of a call.

        Raises ``TimeoutError`` if it does not return within ``seconds``. Later calls raise it at once until that call
        returns.
        """
        if self._overdue is not None and not self._overdue.done():
            raise TimeoutError("an earlier call has not returned yet")
        future = self.submit(call)
        try:
            return future.result(seconds)
        except TimeoutError:
            if future.done():
                return future.result()
            self._overdue = future
            raise TimeoutError(f"no answer within {seconds:g} seconds") from None


class _DaemonWorker:
    """A queue of calls, and the thread that runs them, which is started when first needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: _CallQueue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def check_process(self) -> None:
        if os.getpid() != self._process:  # both would use one connection to the store
            raise RankFailedError(FORKED)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        self.check_process()
        if self._thread is None or not self._thread.is_alive():
            self._calls = queue.SimpleQueue()
            self._thread = _threads.start_thread(self._name, self._calls)
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def stop_thread(self) -> None:
        self._calls.put(None)


class _WorkerThreads:
    """The threads of this process that run calls."""

    def __init__(self) -> None:
        self._process = 0
        self._is_closed = False
        self._running: dict[threading.Thread, _CallQueue] = {}

    def start_thread(self, name: str, calls: _CallQueue) -> threading.Thread:
        if self._process != os.getpid():
            self._process = os.getpid()
            self._running = {}  # the threads of the process that this one was forked from
            self._is_closed = False
            call_at_exit(ExitStage.STORE, self.stop_all)
        if self._is_closed and threading.current_thread().daemon:
            raise RankFailedError(
                "this process is exiting: its daemon threads can no longer communicate with other ranks"
            )
        for ended in [thread for thread in list(self._running) if not thread.is_alive()]:
            self._running.pop(ended, None)
        thread = threading.Thread(target=_run_calls, args=(calls,), name=name, daemon=True)
        thread.start()
        self._running[thread] = calls
        return thread

    def stop_all(self) -> None:
        """Let every thread run the calls in its queue, and end."""
        deadline = time.monotonic() + _EXIT_SECONDS
        self._is_closed = True
        running = list(self._running.items())
        for _, calls in running:
            calls.put(None)
        for thread, _ in running:
            thread.join(max(0.0, deadline - time.monotonic()))


_threads = _WorkerThreads()


def _run_calls(calls: _CallQueue) -> None:
    while (item := calls.get()) is not None:
        _run_call(*item)
        del item  # releases what the call references before the next one comes


def _run_call(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
        future.set_exception(error)
