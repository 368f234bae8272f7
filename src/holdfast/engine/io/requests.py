"""Shared code of writing and reading: fragments of tensors, callbacks, and worker threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from holdfast.engine.io.tensor_bytes import ByteSink, TensorBytes
from holdfast.ondisk.block_crcs import BLOCK_BYTES, Fragment, combine
from holdfast.storage.memory import Bytes

#: Threads that move bytes. Storage needs requests in flight, not processors.
THREADS = 4

#: ``{tensor number: its fragments}``.
Fragments = dict[int, list[Fragment]]


class ByteProvider(Protocol):
    """A source of the bytes of a tensor."""

    def copy_out(self, start: int, into: Bytes) -> None:
        """Fill ``into`` with the bytes from ``start`` on. ``start`` and the length are whole elements."""


#: Returns this rank's shard of tensor number n.
ShardOf = Callable[[int], TensorBytes]

#: Returns the source of the bytes of tensor number n.
ProviderOf = Callable[[int], ByteProvider]

#: Returns the destination of the bytes of tensor number n.
SinkOf = Callable[[int], ByteSink]

#: Called with the number of bytes that have just been moved; from several threads.
OnBytesMoved = Callable[[int], None]

T = TypeVar("T")
R = TypeVar("R")


def ignore_progress(nbytes: int) -> None:
    """Ignore the number of bytes moved."""
    del nbytes


def run_in_threads(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Call ``work`` on every item in a few threads. The first error stops the others and is raised."""
    items = list(items)
    if len(items) < 2:  # noqa: PLR2004 - one item needs no thread
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

    threads = [
        threading.Thread(target=work_until_empty, name="holdfast", daemon=True) for _ in range(min(THREADS, len(items)))
    ]
    _start_and_join(threads, errors)
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


def merge_fragments(results: Iterable[Iterable[tuple[int, Fragment]]]) -> Fragments:
    """Group fragments by tensor, and combine adjacent ones of one block."""
    result: Fragments = {}
    for tensor, fragment in sorted(item for items in results for item in items):
        tensor_fragments = result.setdefault(tensor, [])
        if tensor_fragments and tensor_fragments[-1].stop == fragment.start and fragment.start % BLOCK_BYTES:
            last = tensor_fragments[-1]
            tensor_fragments[-1] = Fragment(
                last.start, fragment.stop, combine(last.crc, fragment.crc, fragment.stop - fragment.start)
            )
        else:
            tensor_fragments.append(fragment)
    return result
