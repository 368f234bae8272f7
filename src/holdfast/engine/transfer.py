"""What writing and reading have in common: fragments of tensors, pieces and chunks, and worker threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

from holdfast.engine.local import Bytes, LocalPart, Sink
from holdfast.layout.blocks import BLOCK, Fragment, combine

#: Bytes moved at a time by one thread, and the size of its buffer.
CHUNK = 4 * 2**20

#: Threads that move bytes. Storage needs requests in flight, not processors.
THREADS = 4

#: ``{tensor number: its fragments}``.
Fragments = dict[int, list[Fragment]]


class Piece(NamedTuple):
    """Bytes ``[start, stop)`` of tensor number ``tensor``, to be written or read by this rank.

    ``local`` is where they start in this rank's part of the tensor, ``offset`` in file number ``file``.
    """

    tensor: int
    start: int
    stop: int
    local: int
    file: int
    offset: int

    def cut(self, skip: int, size: int) -> Piece:
        """``size`` bytes of it, after the first ``skip``."""
        return Piece(
            self.tensor, self.start + skip, self.start + skip + size, self.local + skip, self.file, self.offset + skip
        )


def nbytes_of(pieces: Iterable[Piece]) -> int:
    """The size of pieces together."""
    return sum(piece.stop - piece.start for piece in pieces)


class Chunk(NamedTuple):
    """A contiguous range of one file of at most :data:`CHUNK` bytes, and the pieces that it consists of."""

    file: int
    offset: int
    size: int
    pieces: Sequence[Piece]


class Origin(Protocol):
    """Where the bytes of a tensor come from."""

    def copy_out(self, start: int, into: Bytes) -> None:
        """Fill ``into`` with the bytes from ``start`` on. ``start`` and the length are whole elements."""


#: This rank's part of tensor number n.
PartOf = Callable[[int], LocalPart]

#: Where the bytes of tensor number n come from.
OriginOf = Callable[[int], Origin]

#: Where the bytes of tensor number n go.
SinkOf = Callable[[int], Sink]

#: Is told how many bytes have just been moved; from several threads.
Moved = Callable[[int], None]

T = TypeVar("T")
R = TypeVar("R")


def untold(nbytes: int) -> None:
    """Nobody wants to know what has been moved."""
    del nbytes


def in_threads(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
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


def file_chunks(pieces: Iterable[Piece]) -> Iterator[Chunk]:
    """Chunks cut at multiples of :data:`CHUNK` in the file: for direct writes."""
    return _group(_cut(pieces, lambda piece: piece.offset), lambda piece: piece.offset % CHUNK == 0)


def tensor_chunks(pieces: Iterable[Piece]) -> Iterator[Chunk]:
    """Chunks cut at multiples of :data:`CHUNK` in the tensor, so never inside an element: for reads."""
    return _group(_cut(pieces, lambda piece: piece.start), lambda _: False)


def _cut(pieces: Iterable[Piece], position: Callable[[Piece], int]) -> Iterator[Piece]:
    """Pieces that cross neither a multiple of ``CHUNK`` by ``position`` nor a block of their tensor."""
    for piece in pieces:
        rest = piece
        while rest.start < rest.stop:
            size = min(rest.stop - rest.start, BLOCK - rest.start % BLOCK, CHUNK - position(rest) % CHUNK)
            yield rest if size == rest.stop - rest.start else rest.cut(0, size)
            rest = rest.cut(size, rest.stop - rest.start - size)


def _group(pieces: Iterable[Piece], fresh: Callable[[Piece], bool]) -> Iterator[Chunk]:
    """Neighbours in a file together; a ``fresh`` piece begins a chunk of its own."""
    current: list[Piece] = []
    file = offset = size = 0
    for piece in pieces:
        nbytes = piece.stop - piece.start
        follows = piece.file == file and piece.offset == offset + size and size + nbytes <= CHUNK
        if current and (not follows or fresh(piece)):
            yield Chunk(file, offset, size, current)
            current = []
        if not current:
            file, offset, size = piece.file, piece.offset, 0
        current.append(piece)
        size += nbytes
    if current:
        yield Chunk(file, offset, size, current)


def gather(found: Iterable[Iterable[tuple[int, Fragment]]]) -> Fragments:
    """Fragments by tensor, neighbours in one block combined."""
    result: Fragments = {}
    for tensor, fragment in sorted(item for items in found for item in items):
        known = result.setdefault(tensor, [])
        if known and known[-1].stop == fragment.start and fragment.start % BLOCK:
            last = known[-1]
            known[-1] = Fragment(
                last.start, fragment.stop, combine(last.crc, fragment.crc, fragment.stop - fragment.start)
            )
        else:
            known.append(fragment)
    return result
