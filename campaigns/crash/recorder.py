"""Recorder of this process's operations on files below a directory. It wraps the system calls.

Calls that the recorder does not know are refused, never missed: replaying a history must give the same directory, byte
for byte.
"""

from __future__ import annotations

import builtins
import fcntl
import io
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import monotonic_ns
from types import TracebackType
from typing import Any, Self
from unittest import mock

from campaigns.crash.operations import (
    Clone,
    Create,
    Exchange,
    Link,
    Log,
    Operation,
    Remove,
    Rename,
    Resize,
    Sync,
    Write,
)
from rankless.storage import atomic_rename, links_and_clones

_RECORDED = ("open", "write", "pwrite", "ftruncate", "fsync", "link", "mkdir", "rename", "unlink", "rmdir")
_REFUSED = (
    *("writev", "pwritev", "truncate", "posix_fallocate", "sendfile", "copy_file_range", "splice", "fdatasync"),
    *("replace", "remove", "chmod", "symlink", "mknod", "mkfifo"),
)

_EXCHANGE = 2  # RENAME_EXCHANGE


class Recorder:
    """A context manager that records the operations of all threads below ``root`` in :attr:`log`."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._patches = ExitStack()
        self._really = {name: getattr(os, name) for name in (*_RECORDED, *_REFUSED)}
        self._really |= {"io.open": io.open, "renameat2": atomic_rename._renameat2, "ioctl": fcntl.ioctl}
        self._operations: list[Operation] = []
        self._begun: dict[int, int] = {}
        self._ended: dict[int, int] = {}

    def __enter__(self) -> Self:
        for name in _RECORDED:
            self._patch(os, name, getattr(self, f"_{name}"))
        for name in _REFUSED:
            self._patch(os, name, self._make_refusal(name))
        self._patch(io, "open", self._open_file)
        self._patch(builtins, "open", self._open_file)
        self._patch(atomic_rename, "_renameat2", self._renameat2)
        self._patch(fcntl, "ioctl", self._ioctl)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patches.close()

    @property
    def log(self) -> Log:
        """The recorded operations."""
        return Log(_read_inode(self._root), tuple(self._operations), self._begun, self._ended)

    def begin_step(self, step: int) -> None:
        """Note that a step of the scenario begins."""
        self._begun[step] = monotonic_ns()

    def end_step(self, step: int) -> None:
        """Note that the step is acknowledged on this rank."""
        self._ended[step] = monotonic_ns()

    def _patch(self, target: object, name: str, function: Callable[..., Any]) -> None:
        self._patches.enter_context(mock.patch.object(target, name, function))

    def _call_timed(self, name: str, *arguments: Any, **options: Any) -> tuple[tuple[int, int], Any]:
        """Make a call. Return when it began and ended, and its result."""
        begin = monotonic_ns()
        result = self._really[name](*arguments, **options)
        return (begin, monotonic_ns()), result

    def _locate_entry(self, path: Any, dir_fd: int | None = None) -> tuple[int, str] | None:
        """Return the directory and the name of an entry below the root."""
        base = Path() if dir_fd is None else _read_path(dir_fd)
        full = (base / os.fsdecode(path)).absolute()
        return (_read_inode(full.parent), full.name) if self._root in full.parents else None

    def _find_node(self, fd: int) -> int | None:
        """Return the number of the open file or directory below the root."""
        return os.fstat(fd).st_ino if _read_path(fd).is_relative_to(self._root) else None

    def _find_own_node(self, fd: int) -> int | None:
        """Return the number of an open file that is about to be changed, which no other checkpoint must share."""
        node = self._find_node(fd)
        if node is not None and os.fstat(fd).st_nlink > 1:
            raise PermissionError(f"{_read_path(fd)} belongs to another checkpoint, too, and must not be changed")
        return node

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        place = self._locate_entry(path, dir_fd)
        makes = place is not None and bool(flags & os.O_CREAT) and not _read_inode(path, dir_fd)
        span, fd = self._call_timed("open", path, flags, mode, dir_fd=dir_fd)
        if makes and place:
            self._operations.append(Create(*span, *place, os.fstat(fd).st_ino, is_folder=False))
        elif place and flags & os.O_TRUNC:
            self._operations.append(Resize(*span, os.fstat(fd).st_ino, 0))
        return int(fd)

    def _write(self, fd: int, data: Any) -> int:
        node = self._find_own_node(fd)
        appends = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND
        offset = 0 if node is None else os.lseek(fd, 0, os.SEEK_END if appends else os.SEEK_CUR)
        span, n = self._call_timed("write", fd, data)
        if node is not None:
            self._operations.append(Write(*span, node, offset, bytes(memoryview(data).cast("B")[:n])))
        return int(n)

    def _pwrite(self, fd: int, data: Any, offset: int) -> int:
        node = self._find_own_node(fd)
        span, n = self._call_timed("pwrite", fd, data, offset)
        if node is not None:
            self._operations.append(Write(*span, node, offset, bytes(memoryview(data).cast("B")[:n])))
        return int(n)

    def _ftruncate(self, fd: int, size: int) -> None:
        node = self._find_own_node(fd)
        span, _ = self._call_timed("ftruncate", fd, size)
        if node is not None:
            self._operations.append(Resize(*span, node, size))

    def _link(self, source: Any, target: Any, **options: Any) -> None:
        place, node = self._locate_entry(target), _read_inode(source)
        span, _ = self._call_timed("link", source, target, **options)
        if place:
            self._operations.append(Link(*span, *place, node))

    def _ioctl(self, fd: int, request: int, argument: Any = 0) -> Any:
        node = self._find_own_node(fd) if request == links_and_clones.CLONE_RANGE else None
        span, result = self._call_timed("ioctl", fd, request, argument)
        if node is not None:
            source, start, size, _ = links_and_clones.CLONE_ARGUMENT.unpack(argument)
            self._operations.append(Clone(*span, node, os.fstat(source).st_ino, start, start + size))
        return result

    def _fsync(self, fd: Any) -> None:
        number = fd if isinstance(fd, int) else fd.fileno()
        node = self._find_node(number)
        span, _ = self._call_timed("fsync", number)
        if node is not None:
            self._operations.append(Sync(*span, node))

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        place = self._locate_entry(path, dir_fd)
        span, _ = self._call_timed("mkdir", path, mode, dir_fd=dir_fd)
        if place:
            self._operations.append(Create(*span, *place, _read_inode(path, dir_fd), is_folder=True))

    def _rename(
        self, source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        places = self._locate_entry(source, src_dir_fd), self._locate_entry(target, dst_dir_fd)
        node = _read_inode(source, src_dir_fd)
        if places[1] and _read_inode(target, dst_dir_fd):
            raise NotImplementedError(f"the recorder knows no rename over {target}, which is there")
        span, _ = self._call_timed("rename", source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        if places[0] and places[1]:
            self._operations.append(Rename(*span, *places[0], node, *places[1]))

    def _renameat2(self, source: Path, target: Path, flags: int) -> bool:
        places, nodes = (
            (self._locate_entry(source), self._locate_entry(target)),
            (_read_inode(source), _read_inode(target)),
        )
        span, done = self._call_timed("renameat2", source, target, flags)
        if done and places[0] and places[1] and flags == _EXCHANGE:
            self._operations.append(Exchange(*span, *places[0], nodes[0], *places[1], nodes[1]))
        elif done and places[0] and places[1]:
            self._operations.append(Rename(*span, *places[0], nodes[0], *places[1]))
        return bool(done)

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove("unlink", path, dir_fd)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove("rmdir", path, dir_fd)

    def _remove(self, how: str, path: Any, dir_fd: int | None) -> None:
        place, node = self._locate_entry(path, dir_fd), _read_inode(path, dir_fd)
        span, _ = self._call_timed(how, path, dir_fd=dir_fd)
        if place:
            self._operations.append(Remove(*span, *place, node))

    def _open_file(self, file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        """Open a file object of the recorder, because Python's own file objects do not write through ``os``."""
        if isinstance(file, int) or not self._locate_entry(file) or not set(mode) & set("wax+"):
            return self._really["io.open"](file, mode, *arguments, **options)
        if mode not in {"xb", "wb"}:
            raise NotImplementedError(f"the recorder knows no files opened with mode {mode!r}")
        return io.BufferedWriter(_RecordedFile(file, mode))

    def _make_refusal(self, name: str) -> Callable[..., Any]:
        def refuse(*arguments: Any, **options: Any) -> Any:
            paths = [argument for argument in arguments if isinstance(argument, (str, bytes, os.PathLike))]
            if any(map(self._locate_entry, paths)) or (isinstance(arguments[0], int) and self._find_node(arguments[0])):
                raise NotImplementedError(f"the recorder knows no os.{name}")
            return self._really[name](*arguments, **options)

        return refuse


class _RecordedFile(io.FileIO):
    """A file that is opened and written through the recorded functions of ``os``."""

    def __init__(self, path: Any, mode: str) -> None:
        super().__init__(path, mode, opener=lambda name, flags: os.open(name, flags, 0o666))

    def write(self, data: Any) -> int:
        """See :meth:`io.RawIOBase.write`."""
        return os.write(self.fileno(), data)


def _read_path(fd: int) -> Path:
    return Path(f"/proc/self/fd/{fd}").readlink()


def _read_inode(path: Any, dir_fd: int | None = None) -> int:
    """Return the inode of a path; 0 if it does not exist."""
    try:
        return os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return 0
