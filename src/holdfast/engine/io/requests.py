"""What writing and reading have in common: fragments of tensors, pieces and chunks, and worker threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from holdfast.engine.io.tensor_bytes import ByteSink, TensorBytes
from holdfast.ondisk.blocks import BLOCK_BYTES, Fragment, combine
from holdfast.storage.memory import Bytes

#: Threads that move bytes. Storage needs requests in flight, not processors.
THREADS = 4

#: ``{tensor number: its fragments}``.
Fragments = dict[int, list[Fragment]]


class ByteProvider(Protocol):
    """Where the bytes of a tensor come from."""

    def copy_out(self, start: int, into: Bytes) -> None:
        """Fill ``into`` with the bytes from ``start`` on. ``start`` and the length are whole elements."""


#: This rank's part of tensor number n.
PartOf = Callable[[int], TensorBytes]

#: Where the bytes of tensor number n come from.
OriginOf = Callable[[int], ByteProvider]

#: Where the bytes of tensor number n go.
SinkOf = Callable[[int], ByteSink]

#: Is told how many bytes have just been moved; from several threads.
Moved = Callable[[int], None]

T = TypeVar("T")
R = TypeVar("R")


def ignore_progress(nbytes: int) -> None:
    """Nobody wants to know what has been moved."""
    del nbytes


def run_in_threads(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """``work`` on every item by a few threads; the first error stops the rest and is raised."""
    items = list(items)
    if len(items) < 2:  # noqa: PLR2004 - one item needs no thread
        return [work(item) for item in items]
    # Not a ThreadPoolExecutor: that takes no work once the main thread has ended, and saves may still be under way.
    todo, lock = iter(enumerate(items)), threading.Lock()
    done: dict[int, R] = {}
    errors: list[BaseException] = []

    def run() -> None:
        while not errors:
            with lock:
                following = next(todo, None)
            if following is None:
                return
            try:
                done[following[0]] = work(following[1])
            except BaseException as error:  # noqa: BLE001 - raised below, by the thread that waits
                errors.append(error)

    threads = [threading.Thread(target=run, name="holdfast", daemon=True) for _ in range(min(THREADS, len(items)))]
    _run_to_the_end(threads, errors)
    if errors:
        raise errors[0]
    return [done[number] for number in range(len(items))]


def _run_to_the_end(threads: Sequence[threading.Thread], errors: list[BaseException]) -> None:
    """Start threads, and wait for those that could be started."""
    try:
        for thread in threads:
            thread.start()
    except BaseException as error:  # noqa: BLE001 - an interrupt, or no more threads; raised by the caller
        errors.append(error)
    for thread in threads:
        if thread.ident is not None:
            _join(thread, errors)


def _join(thread: threading.Thread, errors: list[BaseException]) -> None:
    """Wait for a thread, also when interrupted: what it works on must not be closed under it."""
    while thread.is_alive():
        try:
            thread.join()
        except BaseException as interruption:  # noqa: BLE001 - raised by the caller when all threads have ended
            errors.append(interruption)


def merge_fragments(found: Iterable[Iterable[tuple[int, Fragment]]]) -> Fragments:
    """Fragments by tensor, neighbours in one block combined."""
    result: Fragments = {}
    for tensor, fragment in sorted(item for items in found for item in items):
        known = result.setdefault(tensor, [])
        if known and known[-1].stop == fragment.start and fragment.start % BLOCK_BYTES:
            last = known[-1]
            known[-1] = Fragment(
                last.start, fragment.stop, combine(last.crc, fragment.crc, fragment.stop - fragment.start)
            )
        else:
            known.append(fragment)
    return result
