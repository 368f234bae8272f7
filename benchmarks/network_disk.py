"""A read-only network file system: a server that serves a folder over TCP, and a FUSE client.

The server counts the bytes that clients read, and limits their rate. Each mount has a page cache of its own, so
several mounts on one machine behave as those of several hosts. ``mfusepy`` and libfuse 3 are needed.
"""

from __future__ import annotations

import errno
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

#: A request: its kind, an offset, a size, and the length of the path that follows.
_REQUEST = struct.Struct("<cQII")

#: The head of a reply: an error number or 0, and the length of the data that follow.
_REPLY = struct.Struct("<II")

#: The fields of ``stat`` that clients see.
_STAT = struct.Struct("<IQQddd")
_STAT_FIELDS = ("st_mode", "st_ino", "st_size", "st_mtime", "st_atime", "st_ctime")


def serve_folder(folder: Path, address: tuple[str, int], counted: Synchronized[int], bytes_per_second: float) -> None:
    """Serve ``folder`` until the process ends. The bytes of all replies to reads are added to ``counted``."""
    disk = _Disk(bytes_per_second)
    with socket.create_server(address) as server:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_serve_client, args=(connection, folder, counted, disk), daemon=True).start()


class _Disk:
    """A disk that is busy for as long as each read takes at its rate. Clients wait for each other's reads."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate, self._free_at, self._lock = bytes_per_second, 0.0, threading.Lock()

    def wait_for(self, nbytes: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / self._rate
            delay = self._free_at - time.monotonic()
        time.sleep(max(0.0, delay))


def _serve_client(connection: socket.socket, folder: Path, counted: Synchronized[int], disk: _Disk) -> None:
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while head := connection.recv(_REQUEST.size, socket.MSG_WAITALL):
            kind, offset, size, length = _REQUEST.unpack(head)
            path = folder / _receive(connection, length).decode().lstrip("/")
            try:
                data = _HANDLERS[kind](path, offset, size)
            except OSError as error:
                connection.sendall(_REPLY.pack(error.errno or errno.EIO, 0))
                continue
            if kind == b"r":
                with counted.get_lock():
                    counted.value += len(data)
                disk.wait_for(len(data))
            connection.sendall(_REPLY.pack(0, len(data)) + data)


def _stat(path: Path, _offset: int, _size: int) -> bytes:
    status = path.stat()
    return _STAT.pack(*(getattr(status, field) for field in _STAT_FIELDS))


def _list(path: Path, _offset: int, _size: int) -> bytes:
    return "\0".join(entry.name for entry in path.iterdir()).encode()


def _read(path: Path, offset: int, size: int) -> bytes:
    file = os.open(path, os.O_RDONLY)
    try:
        return os.pread(file, size, offset)
    finally:
        os.close(file)


_HANDLERS: dict[bytes, Callable[[Path, int, int], bytes]] = {b"s": _stat, b"l": _list, b"r": _read}


def _receive(connection: socket.socket, length: int) -> bytes:
    data = connection.recv(length, socket.MSG_WAITALL) if length else b""
    if len(data) != length:
        raise ConnectionError("the connection ended")
    return data


def mount_folder(mount_point: str, address: tuple[str, int]) -> None:
    """Mount the folder that a server serves, until it is unmounted or the process ends."""
    import mfusepy  # noqa: PLC0415 - an optional package, which loads libfuse

    idle: queue.SimpleQueue[socket.socket] = (
        queue.SimpleQueue()
    )  # libfuse's threads are new ones for Python in each call

    def request(kind: bytes, path: str, offset: int = 0, size: int = 0) -> bytes:
        encoded = path.encode()
        try:
            connection = idle.get_nowait()
        except queue.Empty:
            connection = socket.create_connection(address)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_REQUEST.pack(kind, offset, size, len(encoded)) + encoded)
        status, length = _REPLY.unpack(_receive(connection, _REPLY.size))
        data = _receive(connection, length)
        idle.put(connection)
        if status:
            raise mfusepy.FuseOSError(status)
        return data

    class Client(mfusepy.Operations):  # type: ignore[misc]  # the package has no types
        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            del fh
            return {**dict(zip(_STAT_FIELDS, _STAT.unpack(request(b"s", path)), strict=True)), "st_nlink": 1}

        def readdir(self, path: str, fh: int) -> Iterator[str]:
            del fh
            yield from (".", "..", *request(b"l", path).decode().split("\0"))

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            del fh
            return request(b"r", path, offset, size)

    mfusepy.FUSE(Client(), mount_point, foreground=True, ro=True, max_threads=8)
