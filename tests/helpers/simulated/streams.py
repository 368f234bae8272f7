"""Streams and events that run nothing by themselves: the work of an accelerator, in an order that a test chooses.

Work is enqueued on streams. It runs while something waits: for an event, a stream, or the whole device. Then an *order*
decides which of the streams that could go on does so. A real device may take any of these orders, so code is right only
if its result is the same in all of them. A missing wait shows as wrong bytes in one.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self


class Mark:
    """A place in a stream, which the device reaches some time."""

    def __init__(self) -> None:
        self.reached = False


@dataclass(frozen=True)
class Entry:
    """One thing that a stream does: work, a wait for a mark of another stream, or a mark of its own."""

    work: Callable[[], None] | None = None
    awaited: Mark | None = None
    mark: Mark | None = None


class Stream:
    """A queue of entries. ``torch.cuda.Stream`` has these methods, and more."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.queue: deque[Entry] = deque()
        #: Set by a test while what it enqueues goes into a graph, and does not run. Other streams cannot join.
        self.is_capturing = False
        self.graph: list[Entry] = []
        SCHEDULER.streams.append(self)

    def wait_event(self, event: Event) -> None:
        if self.is_capturing or event.is_captured:
            raise RuntimeError("simulated error: operation not permitted when stream is capturing")
        if event.mark is not None:
            self.add(Entry(awaited=event.mark))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def add(self, entry: Entry) -> None:
        with SCHEDULER.lock:
            (self.graph if self.is_capturing else self.queue).append(entry)

    def is_ready(self) -> bool:
        """Return whether the stream can go on."""
        return bool(self.queue) and (self.queue[0].awaited is None or self.queue[0].awaited.reached)


class Event:
    """A place in a stream. ``torch.cuda.Event`` has these methods, and more."""

    def __init__(self, *, enable_timing: bool = False, blocking: bool = False) -> None:
        self.mark: Mark | None = None
        self.is_captured = False

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        self.mark, self.is_captured = Mark(), stream.is_capturing
        stream.add(Entry(mark=self.mark))

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        SCHEDULER.note_call()
        if self.mark is not None:
            SCHEDULER.run_until(self.mark)

    def query(self) -> bool:
        return self.mark is None or self.mark.reached


#: Chooses one of the streams that can go on, of which the first is the one that is waited for.
Order = Callable[[Sequence[Stream]], Stream]


def needed_first(ready: Sequence[Stream]) -> Stream:
    """Nothing runs that need not."""
    return ready[0]


def caller_first(ready: Sequence[Stream]) -> Stream:
    """The default stream goes ahead of all others, as far as its waits let it."""
    return DEFAULT if DEFAULT in ready else ready[0]


def copies_first(ready: Sequence[Stream]) -> Stream:
    """All other streams go ahead of the default one."""
    return next((stream for stream in ready if stream is not DEFAULT), DEFAULT)


def at_random(seed: int) -> Order:
    """Any of them."""
    return random.Random(seed).choice


class Scheduler:
    """All streams of a process, and the order in which they run. The first one is the default stream."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.streams: list[Stream] = []
        self.order: Order = needed_first
        #: The names of the threads that had to wait on the host for work that was not done.
        self.waits: list[str] = []
        #: Cleared while threads that save must not go on: a test enqueues what comes after the call first.
        self.saves_go_on = threading.Event()
        self.saves_go_on.set()
        #: The number of entries after which the device is lost.
        self.lost_after: int | None = None
        #: The names of threads, other than the main one, that called the runtime and had not selected the device. On
        #: CUDA each would make a context on the first one.
        self.without_device: set[str] = set()

    def reset(self) -> None:
        """Forget the past: what is enqueued, and the settings of a test."""
        for stream in self.streams:
            stream.queue.clear()
        self.order, self.waits, self.lost_after, self.without_device = needed_first, [], None, set()
        self.saves_go_on.set()

    def note_call(self) -> None:
        """Note that the calling thread calls the runtime."""
        if not getattr(_current, "devices", 0) and threading.current_thread() is not threading.main_thread():
            self.without_device.add(threading.current_thread().name)

    def run_until(self, mark: Mark) -> None:
        """Run streams until the mark is reached. Everything that waits on the host comes here."""
        if threading.current_thread().name.startswith("rankless "):
            self.saves_go_on.wait()
        with self.lock:
            self.raise_if_lost()
            if not mark.reached:
                self.waits.append(threading.current_thread().name)
            while not mark.reached:
                needed = self._find_needed(mark)
                others = [stream for stream in self.streams if stream.is_ready() and stream is not needed]
                self._run_next(self.order([needed, *others]))

    def run_all(self) -> None:
        """Run everything, as ``torch.cuda.synchronize`` does."""
        for stream in list(self.streams):
            if stream.queue:
                stream.synchronize()

    def raise_if_lost(self) -> None:
        if self.lost_after == 0:
            raise RuntimeError("simulated error: the device is lost")

    def _find_needed(self, mark: Mark) -> Stream:
        """Return the stream that must go on for a mark to be reached: its own, or one that this waits for."""
        stream = next(stream for stream in self.streams if any(entry.mark is mark for entry in stream.queue))
        awaited = stream.queue[0].awaited
        return stream if awaited is None or awaited.reached else self._find_needed(awaited)

    def _run_next(self, stream: Stream) -> None:
        self.raise_if_lost()
        entry = stream.queue.popleft()
        if entry.work is not None:
            entry.work()
            self.lost_after = None if self.lost_after is None else self.lost_after - 1
        if entry.mark is not None:
            entry.mark.reached = True


_current = threading.local()
SCHEDULER = Scheduler()
DEFAULT = Stream()


def current_stream(device: object = None) -> Stream:
    """Return the stream that the calling thread enqueues on: the default one, unless it has chosen another."""
    stream: Stream = getattr(_current, "stream", DEFAULT)
    return stream


class StreamContext:
    """Enqueue on another stream inside the ``with`` block."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> Self:
        SCHEDULER.note_call()
        self._before = current_stream()
        _current.stream = self._stream
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.stream = self._before


class DeviceContext:
    """Make a device the current one of the thread inside the ``with`` block. The main thread has selected it."""

    def __init__(self, device: object) -> None:
        del device

    def __enter__(self) -> None:
        _current.devices = getattr(_current, "devices", 0) + 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.devices -= 1
