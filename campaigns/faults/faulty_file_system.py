"""A faulty file system: the n-th call of this process about a directory fails.

It replaces the functions of ``os`` and ``io`` (and ``renameat2``) through which all disk access goes.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from unittest import mock

from rankless.storage import atomic_rename

#: The errors of each call: no space if it allocates some, no permission if it changes something, an I/O error. Calls
#: that only read get no permission errors, because these would be permanent and not a fault.
ERRORS: dict[str, tuple[str, ...]] = {
    "open": ("EACCES", "EIO"),
    "create": ("ENOSPC", "EACCES", "EIO"),
    "mkdir": ("ENOSPC", "EPERM", "EIO"),
    "ftruncate": ("ENOSPC", "EIO"),
    "pwrite": ("ENOSPC", "EIO", "short", "nothing"),
    "write": ("ENOSPC", "EIO"),
    "preadv": ("EIO", "short"),
    "read": ("EIO",),
    "fsync": ("EIO", "ENOSPC"),
    "close": ("EIO",),
    "rename": ("EACCES", "ENOSPC", "EIO"),
    "renameat2": ("EACCES", "ENOSPC", "EIO"),
    "unlink": ("EPERM", "EIO"),
    "rmdir": ("EPERM", "EIO"),
    "statvfs": ("EACCES", "EIO"),
    "stat": ("EIO",),
    "lstat": ("EIO",),
    "fstat": ("EIO",),
    "listdir": ("EACCES", "EIO"),
    "scandir": ("EACCES", "EIO"),
    "flock": ("EIO",),
    "fcntl": ("EIO",),
}

#: The faults of calls that move bytes.
_PARTIAL_FAULTS, _MOVES = {"short", "nothing"}, {"pwrite", "preadv"}


@dataclass
class FaultyFileSystem:
    """Counts calls about ``root``, and lets the n-th (from 0) fail with ``fault``; if ``forever``, all later ones too.

    A ``fault`` is the name of an error number, ``"short"`` (half of the bytes are moved), ``"nothing"`` (none are), or
    a function to call before the call. ``injected``: a call had the fault.
    """

    root: Path
    nth: int = -1
    fault: str | Callable[[], object] = ""
    forever: bool = False
    injected: bool = False
    calls: list[str] = field(default_factory=list)
    _names: dict[int, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def install(self) -> Iterator[Self]:
        """Route this process's disk access through it."""
        with ExitStack() as stack:
            for name in ("mkdir", "rename", "unlink", "rmdir", "stat", "lstat", "listdir", "scandir", "statvfs"):
                stack.enter_context(mock.patch.object(os, name, self._wrap_path_call(name, getattr(os, name))))
            for name in ("ftruncate", "fsync", "fstat", "pwrite", "preadv"):
                stack.enter_context(mock.patch.object(os, name, self._wrap_descriptor_call(name, getattr(os, name))))
            for name in ("flock", "fcntl"):
                stack.enter_context(
                    mock.patch.object(fcntl, name, self._wrap_descriptor_call(name, getattr(fcntl, name)))
                )
            stack.enter_context(mock.patch.object(os, "open", self._wrap_open(os.open)))
            stack.enter_context(mock.patch.object(os, "close", self._wrap_close(os.close)))
            stack.enter_context(mock.patch.object(io, "open", self._wrap_io_open(io.open)))
            renameat2 = self._wrap_path_call("renameat2", atomic_rename._renameat2)
            stack.enter_context(mock.patch.object(atomic_rename, "_renameat2", renameat2))
            yield self

    def _count_call(self, call: str) -> str:
        """Count a call. Return its fault, if any."""
        with self._lock:
            number = len(self.calls)
            self.calls.append(call)
        if self.nth < 0 or number < self.nth or (number > self.nth and not self.forever):
            return ""
        if self.fault in _PARTIAL_FAULTS and call not in _MOVES:
            self.nth = number + 1  # threads have changed the order: the next call that moves bytes gets the fault
            return ""
        self.injected = True
        if isinstance(self.fault, str):
            return self.fault
        self.nth = -1
        self.fault()
        return ""

    def _raise_fault(self, call: str) -> str:
        """Count a call, and raise its error, if any. Return another kind of fault."""
        fault = self._count_call(call)
        if fault in {"", "short", "nothing"}:
            return fault
        raise OSError(number := getattr(errno, fault), os.strerror(number))

    def _resolve_path(self, path: Any, dir_fd: int | None) -> str:
        """Return the path that a call is about; empty if it is not below the root."""
        if isinstance(path, int):
            return self._names.get(path, "")
        name = os.fsdecode(path)
        if dir_fd is not None:
            name = os.path.join(self._names.get(dir_fd, ""), name)  # noqa: PTH118 - as the system takes it
        return name if name == str(self.root) or name.startswith(f"{self.root}/") else ""

    def _wrap_path_call(self, call: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: Any = ".", *args: Any, dir_fd: int | None = None, **options: Any) -> Any:
            if self._resolve_path(path, dir_fd):
                self._raise_fault(call)
            if dir_fd is not None:
                options["dir_fd"] = dir_fd
            return real(path, *args, **options)

        return wrapped

    def _wrap_descriptor_call(self, call: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(fd: int, *args: Any) -> Any:
            if fd not in self._names:
                return real(fd, *args)
            fault = self._raise_fault(call)
            if fault == "nothing":
                return 0
            return real(fd, *(_halve_arguments(call, args) if fault == "short" else args))

        return wrapped

    def _wrap_open(self, real: Callable[..., int]) -> Callable[..., int]:
        def wrapped(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            name = self._resolve_path(path, dir_fd)
            if name:
                self._raise_fault("create" if flags & os.O_CREAT else "open")
            fd = real(path, flags, mode, dir_fd=dir_fd)
            if name:
                self._names[fd] = name
            return fd

        return wrapped

    def _wrap_close(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def wrapped(fd: int) -> None:
            known = self._names.pop(fd, "")
            real(fd)  # the file is closed even if the call fails
            if known:
                self._raise_fault("close")

        return wrapped

    def _wrap_io_open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if not self._resolve_path(path, None):
                return real(path, mode, *args, **options)
            if isinstance(path, int):  # its open was counted
                return _FaultyFile(real(path, mode, *args, **options), self)
            self._raise_fault("open" if mode == "rb" else "create")
            file = real(path, mode, *args, **options)
            self._names[file.fileno()] = str(path)
            return _FaultyFile(file, self)

        return wrapped


def _halve_arguments(call: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return half of the bytes; in whole sectors if possible, because direct I/O moves no less."""
    data, offset = args
    whole = data[0] if call == "preadv" else data
    size = len(whole) // 2
    half = whole[: size // 512 * 512 or max(1, size)]
    return ([half] if call == "preadv" else half), offset


class _FaultyFile:
    """A file object whose writes and reads each count as a call."""

    def __init__(self, file: Any, faulty: FaultyFileSystem) -> None:
        self._file, self._faulty = file, faulty

    def write(self, data: Any) -> int:
        self._faulty._raise_fault("write")
        return int(self._file.write(data))

    def read(self, *size: int) -> Any:
        self._faulty._raise_fault("read")
        return self._file.read(*size)

    def flush(self) -> None:
        self._file.flush()

    def tell(self) -> int:
        return int(self._file.tell())

    def fileno(self) -> int:
        return int(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._file.closed:
            return
        self._faulty._names.pop(self._file.fileno(), "")
        self._file.close()
        self._faulty._raise_fault("close")
