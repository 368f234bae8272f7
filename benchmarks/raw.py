"""The limits: the same number of bytes moved to and from the disk, past the page cache and through it."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

CHUNK = 4 * 2**20


def write_direct(path: Path, size: int, threads: int) -> None:
    """Write ``size`` bytes past the page cache, and make them durable."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_DIRECT, 0o644)
    os.ftruncate(fd, size)
    _in_threads(threads, size, lambda buffer, offset: os.pwrite(fd, buffer, offset))
    os.fsync(fd)
    os.close(fd)


def read(path: Path, threads: int, *, direct: bool) -> None:
    """Read a file whole."""
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    _in_threads(threads, path.stat().st_size, lambda buffer, offset: os.preadv(fd, [buffer], offset))
    os.close(fd)


def _in_threads(threads: int, size: int, move: Callable[[mmap.mmap, int], object]) -> None:
    def work(number: int) -> None:
        buffer = mmap.mmap(-1, CHUNK)
        buffer.write(bytes(range(256)) * (CHUNK // 256))
        for offset in range(number * CHUNK, size, threads * CHUNK):
            move(buffer, offset)

    running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def forget(folder: Path) -> None:
    """Take the files of a folder out of the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
