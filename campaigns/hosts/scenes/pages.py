"""Bytes that two hosts lose of one another if they write adjacent ranges of a file, as the ranks of a save do."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from campaigns.hosts import guest
from campaigns.hosts.testbed import Testbed, mount_point
from campaigns.hosts.workers import RemoteError
from rankless.storage.aligned_memory import aligned_buffer
from rankless.storage.direct_io import SECTOR_BYTES, BufferedWriter, DirectWriter, FileWriter

#: The file, in bytes, and the longest range of one host.
_SIZE, _LONGEST = 2**20, 60_000


class Range(NamedTuple):
    """A range of bytes of the file, and the client that writes it."""

    start: int
    stop: int
    owner: int


class _ReadWriteWriter(FileWriter):
    """A writer that reads and writes pages of the file through the page cache: it opens the file for both."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        os.close(self._buffered_fd)
        self._buffered_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def write(self, offset: int, data: memoryview) -> None:
        """See :class:`FileWriter`."""
        os.pread(self._buffered_fd, len(data), offset)
        self._write_buffered(data, offset)


class _MappedWriter(FileWriter):
    """A writer that maps the file into memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def write(self, offset: int, data: memoryview) -> None:
        """See :class:`FileWriter`."""
        self._map[offset : offset + len(data)] = bytes(data)

    def sync(self) -> None:
        """See :class:`FileWriter`."""
        self._map.flush()
        super().sync()


#: The ways of writing. The first two are rankless's.
WRITERS: dict[str, type[FileWriter]] = {
    "direct, edges buffered": DirectWriter,
    "buffered, O_WRONLY": BufferedWriter,
    "buffered, O_RDWR, read before": _ReadWriteWriter,
    "mapped": _MappedWriter,
}


def cut(seed: int) -> list[Range]:
    """Return ranges of random lengths, which clients 0 and 1 write in turn; few begin at a page's start."""
    dice, start = random.Random(seed), 0
    ranges: list[Range] = []
    while start < _SIZE:
        stop = min(_SIZE, start + dice.randint(1, _LONGEST))
        ranges.append(Range(start, stop, len(ranges) % 2))
        start = stop
    return ranges


def content(seed: int) -> bytes:
    """Return the bytes that the file must have in the end; none of them is 0, which unwritten bytes are."""
    return random.Random(seed).randbytes(_SIZE).replace(b"\0", b"\1")


def create(path: Path) -> None:
    """Create the file with its final size, as rank 0 does."""
    with path.open("xb") as file:
        file.truncate(_SIZE)


_WRITERS: list[FileWriter] = []


def write(path: Path, way: str, seed: int, owner: int) -> None:
    """Write one client's ranges, and keep the file open."""
    data, writer = content(seed), WRITERS[way](path)
    for start, stop, of in cut(seed):
        if of == owner:
            lead = start % SECTOR_BYTES
            buffer = aligned_buffer(lead + stop - start)[lead:]
            buffer[:] = memoryview(data[start:stop])
            writer.write(start, buffer.data)
    _WRITERS.append(writer)


def sync() -> None:
    """Make what was written durable, and close the file."""
    with closing(_WRITERS.pop()) as writer:
        writer.sync()


def wrong_bytes(path: Path, seed: int) -> int:
    """Return how many bytes of the file differ from what was written."""
    expected, actual = (np.frombuffer(data, np.uint8) for data in (content(seed), path.read_bytes()))
    return int(np.count_nonzero(expected != actual)) if len(expected) == len(actual) else _SIZE


def count_losses(testbed: Testbed, kind: str, way: str, times: int) -> dict[str, int]:
    """Write files from two clients at once. Return how many were wrong as the server and a third client see them."""
    losses = {"server": 0, "third client": 0, "bytes": 0}
    with ExitStack() as stack:
        first, second, third = (stack.enter_context(client.worker()) for client in testbed.clients)
        server = stack.enter_context(testbed.server.worker())
        for seed in range(times):
            name = f"{kind}-{list(WRITERS).index(way)}-{seed}"
            path = mount_point(kind) / name
            first.call(create, path)
            for step, arguments in ((write, (path, way, seed)), (sync, ())):
                for owner, client in enumerate((first, second)):
                    client.send(step, *arguments, *((owner,) if arguments else ()))
                for client in (first, second):
                    client.receive()
            wrong = server.call(wrong_bytes, guest.EXPORT / name, seed)
            losses["server"] += wrong > 0
            losses["bytes"] += wrong
            losses["third client"] += third.call(wrong_bytes, path, seed) > 0
    return losses


def run(testbed: Testbed, kinds: list[str], times: int, report: Callable[[str], None]) -> None:
    """Report for each kind of mount and way of writing how many files were wrong."""
    for kind in kinds:
        for way in WRITERS:
            try:
                losses = count_losses(testbed, kind, way, times)
            except RemoteError as error:
                report(f"{kind} | {way} | {str(error).strip().splitlines()[-1]}")
                continue
            report(
                f"{kind} | {way} | wrong at the server: {losses['server']} of {times} files, "
                f"{losses['bytes']} bytes; at a third client: {losses['third client']}"
            )
