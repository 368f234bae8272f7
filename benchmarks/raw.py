"""The hardware limits: the same number of bytes moved to and from the disk, past the page cache and through it."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rankless.storage.aligned_memory import aligned_buffer

CHUNK = 4 * 2**20

Bytes = npt.NDArray[np.uint8]


def aligned_copy(arrays: Sequence[Bytes]) -> Bytes:
    """Copy arrays into one page-aligned buffer of large pages, whose size is a whole number of pages."""
    size = sum(array.nbytes for array in arrays)
    memory = aligned_buffer(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    np.concatenate(arrays, out=memory[:size])
    return memory


def write_direct(path: Path, memory: Bytes, threads: int) -> None:
    """Write memory to a file past the page cache, and make it durable."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_DIRECT, 0o644)
    os.ftruncate(fd, len(memory))
    _move_in_threads(threads, len(memory), lambda _, at: os.pwrite(fd, memory[at : at + CHUNK].data, at))
    os.fsync(fd)
    os.close(fd)


def read_file(path: Path, threads: int, *, direct: bool) -> None:
    """Read a whole file into reused buffers."""
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    _move_in_threads(threads, path.stat().st_size, lambda buffer, at: os.preadv(fd, [buffer.data], at))
    os.close(fd)


def read_share(files: Sequence[Path], part: int, parts: int, *, direct: bool) -> None:
    """Read one of ``n`` equal shares of each file."""
    for file in files:
        fd = os.open(file, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        buffer = aligned_buffer(CHUNK).data
        for offset in range(part * CHUNK, file.stat().st_size, parts * CHUNK):
            os.preadv(fd, [buffer], offset)
        os.close(fd)


def _move_in_threads(threads: int, size: int, move: Callable[[Bytes, int], object]) -> None:
    """Move a file chunk by chunk; each thread takes the next chunk."""
    offsets = iter(range(0, size, CHUNK))
    lock = threading.Lock()

    def work() -> None:
        buffer = aligned_buffer(CHUNK)
        while True:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return
            move(buffer, offset)

    running = [threading.Thread(target=work) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def evict_from_cache(folder: Path) -> None:
    """Evict a file, or those of a directory, from the page cache."""
    os.sync()
    for path in [folder, *folder.rglob("*")]:
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def read_into_cache(folder: Path) -> None:
    """Read the files of a directory into the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            read_file(path, 1, direct=False)


def sync_tree(path: Path) -> None:
    """Make a file, or a directory and its contents, durable."""
    for entry in [path, *path.rglob("*")]:
        sync_path(entry)


def sync_path(path: Path) -> None:
    """Make a file durable, or the names in a directory."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def copy_durably(source: Path, target: Path) -> None:
    """Copy a file or a directory with ``cp`` and make it durable: the limit of conversions."""
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(target)], check=True)
    sync_tree(target)


def empty_directory(folder: Path) -> None:
    """Remove the contents of a directory."""
    remove_path(folder)
    folder.mkdir()


def remove_path(path: Path) -> None:
    """Remove a file, or a directory and its contents, if it exists."""
    if path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
