"""Worker threads that move bytes or send requests. They also run while the process ends, when saves are finished.

The engine, storage and statistics call it on each rank, in the thread that saves, loads or measures. It returns only
when all of its threads have ended, also after an error: their files are closed then.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

#: Threads that move bytes. Storage needs requests in flight, not processors.
THREADS = 4

#: Fewer bytes are moved by the calling thread: it takes less time than to start threads. A save and a load of 33 kB
#: started eleven and seven.
_FEW_BYTES = 2**20

#: Added to the niceness of threads in the background, so that training has precedence.
_NICENESS = 10

T = TypeVar("T")
R = TypeVar("R")


def are_few(nbytes: int) -> bool:
    """Return whether to move ``nbytes`` between memory and files takes less time than to start threads for it."""
    return nbytes < _FEW_BYTES


def count_threads(nbytes: int, threads: int = THREADS) -> int:
    """Return how many of ``threads`` are to move ``nbytes`` between memory and files: one if they are few."""
    return threads if nbytes >= _FEW_BYTES else 1


def run_in_threads(work: Callable[[T], R], items: Iterable[T], threads: int = THREADS) -> list[R]:
    """Call ``work`` on every item in a few threads; one is the calling thread. The first error stops the others."""
    items = list(items)
    if len(items) < 2 or threads == 1:  # noqa: PLR2004 - one item needs no thread
        return [work(item) for item in items]
    # Not a ThreadPoolExecutor: it accepts no work once the main thread has ended, and saves may still be running.
    pending, lock = iter(enumerate(items)), threading.Lock()
    done: dict[int, R] = {}
    errors: list[BaseException] = []

    def work_until_empty() -> None:
        while not errors:
            with lock:
                next_item = next(pending, None)
            if next_item is None:
                return
            try:
                done[next_item[0]] = work(next_item[1])
            except BaseException as error:  # noqa: BLE001 - raised below, by the thread that waits
                errors.append(error)

    workers = [
        threading.Thread(target=work_until_empty, name="rankless", daemon=True) for _ in range(min(threads, len(items)))
    ]
    _start_and_join(workers, errors)
    if errors:
        raise errors[0]
    return [done[number] for number in range(len(items))]


def _start_and_join(threads: Sequence[threading.Thread], errors: list[BaseException]) -> None:
    """Start threads, and wait for those that could be started."""
    try:
        for thread in threads:
            thread.start()
    except BaseException as error:  # noqa: BLE001 - an interrupt, or no more threads; raised by the caller
        errors.append(error)
    for thread in threads:
        if thread.ident is not None:
            _join_thread(thread, errors)


def _join_thread(thread: threading.Thread, errors: list[BaseException]) -> None:
    """Wait for a thread, even when interrupted: the files that it works on must not be closed meanwhile."""
    while thread.is_alive():
        try:
            thread.join()
        except BaseException as interruption:  # noqa: BLE001 - raised by the caller when all threads have ended
            errors.append(interruption)


def lower_priority() -> None:
    """Lower the priority of this thread, and of the threads that it starts.

    The threads that save and that compute statistics call it first.
    """
    with suppress(OSError, AttributeError):  # only some systems have priorities for single threads
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)
