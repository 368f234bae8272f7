"""Spans: the phases of saves and loads, each with its times and its thread, as long as a trace records them.

Each phase is named where it is done, with :func:`span` or :func:`traced`. Without a trace this is a check of one
attribute. Nothing is recorded inside the loops over tensors and chunks.

All packages name phases with it, in any thread of any rank; :mod:`rankless.tracing` starts and writes recordings.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import TracebackType
from typing import Literal, NamedTuple, ParamSpec, TypeVar

import msgspec

P = ParamSpec("P")
R = TypeVar("R")

#: The kind of work of a phase. A ``call`` is a whole save or load; a ``step`` is one that all ranks take together; in a
#: ``vote`` a rank posts its outcome, and waits until rank 0 has decided.
Category = Literal[
    "call",
    "step",
    "plan",
    "vote",
    "wait",
    "copy",
    "hash",
    "write",
    "sync",
    "commit",
    "read",
    "verify",
    "apply",
    "import",
    "report",
]


class Span(NamedTuple):
    """A phase that has ended. ``started`` and ``ended`` are nanoseconds of ``time.perf_counter_ns``.

    ``thread`` is the native id of its thread. ``error`` is the type of the error that ended it, or empty.
    """

    name: str
    category: Category
    started: int
    ended: int
    thread: int
    detail: str
    error: str


class Recording:
    """The spans of one trace, at most ``limit``: the oldest are dropped, because outer spans end last.

    It ends when its block has ended, and all work in other threads that began in the block: then ``on_end`` is called,
    in the thread that was last.
    """

    def __init__(self, limit: int, on_end: Callable[[Recording], None]) -> None:
        self._spans: deque[Span] = deque(maxlen=limit)
        self._on_end, self._lock = on_end, threading.Lock()
        self._count, self._pending, self._has_left_block = 0, 1, False
        #: The names of threads by native id.
        self.threads: dict[int, str] = {}

    @property
    def spans(self) -> list[Span]:
        """The recorded spans, in the order of their ends."""
        return list(self._spans)

    @property
    def dropped(self) -> int:
        """The number of spans that there was no room for."""
        return self._count - len(self._spans)

    def add(self, ended: Span) -> None:
        """Record a span that has ended in this thread."""
        with self._lock:
            self._count += 1
            self._spans.append(ended)
            self.threads[ended.thread] = threading.current_thread().name

    def leave_block(self) -> None:
        """Wait for no further work from now on.

        :class:`rankless.Trace` calls it at the end of its block.
        """
        with self._lock:
            self._has_left_block = True
        self._release()

    def hold(self) -> Callable[[], None]:
        """Let the recording go on until the returned function is called, unless its block has ended."""
        with self._lock:
            if self._has_left_block:
                return lambda: None
            self._pending += 1
        return self._release

    def forget_in_fork(self) -> None:
        """Let go of a lock that another thread of the parent process may have held: spans may still end here."""
        self._lock = threading.Lock()

    def _release(self) -> None:
        with self._lock:
            self._pending -= 1
            has_ended = self._pending == 0
        if has_ended:
            tracer.stop(self)
            self._on_end(self)


class Tracer:
    """The recordings of this process. Several may be open: each gets all spans."""

    def __init__(self) -> None:
        #: The open recordings. It is replaced, and never changed.
        self.recordings: tuple[Recording, ...] = ()
        self._lock = threading.Lock()

    def start(self, recording: Recording) -> None:
        """Record all spans that begin from now on."""
        with self._lock:
            self.recordings = (*self.recordings, recording)

    def stop(self, recording: Recording) -> None:
        """Record no span that begins from now on."""
        with self._lock:
            self.recordings = tuple(other for other in self.recordings if other is not recording)

    def hold(self) -> Callable[[], None]:
        """Let all recordings go on until the returned function is called: work begins in another thread.

        :mod:`rankless.save.background` calls it before it starts the thread of a save.
        """
        releases = [recording.hold() for recording in self.recordings]

        def release_all() -> None:
            for release in releases:
                release()

        return release_all

    def forget_in_fork(self) -> None:
        """Record nothing in a forked process: the recordings belong to its parent process."""
        for recording in self.recordings:
            recording.forget_in_fork()
        self.recordings, self._lock = (), threading.Lock()


tracer = Tracer()
os.register_at_fork(after_in_child=tracer.forget_in_fork)


class _OpenSpan(msgspec.Struct):
    """A phase that is under way, from the start of a ``with`` block to its end."""

    recordings: tuple[Recording, ...]
    name: str
    category: Category
    detail: str
    started: int = 0

    def __enter__(self) -> None:
        self.started = time.perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = "" if kind is None else kind.__name__
        ended = Span(
            self.name,
            self.category,
            self.started,
            time.perf_counter_ns(),
            threading.get_native_id(),
            self.detail,
            failure,
        )
        for recording in self.recordings:
            recording.add(ended)


_NOT_RECORDED = nullcontext()


def span(name: str, category: Category, detail: str = "") -> AbstractContextManager[None]:
    """Return a context manager for a phase. ``detail`` says more about it than its name, such as a tag."""
    recordings = tracer.recordings
    return _OpenSpan(recordings, name, category, detail) if recordings else _NOT_RECORDED


def traced(name: str, category: Category) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator of a function that is a phase as a whole."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call_in_span(*args: P.args, **options: P.kwargs) -> R:
            if not tracer.recordings:
                return function(*args, **options)
            with span(name, category):
                return function(*args, **options)

        return call_in_span

    return decorate
