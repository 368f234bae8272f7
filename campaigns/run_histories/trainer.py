"""The process of a job: it resumes, saves and reads as it is asked to, and is killed or stopped at one of its calls."""

from __future__ import annotations

import atexit
import errno
import faulthandler
import os
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

import rankless
from campaigns.run_histories.oracle import Content
from campaigns.run_histories.places import Place
from rankless.cli.main import app
from rankless.storage import posix

#: The most steps of a content.
LENGTH = 64

#: A number of saves of which none is drained.
NEVER = 10**9

#: The calls at which a trap counts: those to the file system, and requests to a store.
_CALLS = frozenset(
    {
        *("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir", "os.link"),
        *("os.truncate", "os.utime", "http.client.send", "shutil.rmtree"),
    }
)

#: The calls that change something, and fail on a file system that is read-only.
_CHANGES = frozenset({"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate"})


@dataclass(frozen=True)
class Trap:
    """What happens to a job at its call number ``at`` from now on: ``kill`` or ``stop``.

    It does not happen in a request with ``spared`` in its head, but at the next call.
    """

    action: str
    at: int
    spared: bytes = b""


@dataclass(frozen=True)
class Reply:
    """The end of a command: the content that was loaded or saved, or the type of the error and its message."""

    content: Content = ()
    error: str = ""
    message: str = ""
    warnings: tuple[str, ...] = ()


class _Tripwire:
    """Counts the calls of this process, and springs the trap."""

    def __init__(self) -> None:
        self.trap: Trap | None = None
        self.read_only = ""
        self._count = 0
        self._in_spared = False
        sys.addaudithook(self._note)

    def arm(self, trap: Trap | None) -> None:
        """Count from now on."""
        self.trap, self._count = trap, 0

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in _CALLS or (event == "open" and _is_of_python(args[0])):
            return
        if self.read_only and self._changes_run(event, args):
            raise OSError(errno.EROFS, "Read-only file system")
        if self.trap is None:
            return
        self._count += 1
        if event == "http.client.send" and self._is_spared(bytes(args[1]), self.trap.spared):
            return
        if self._count > self.trap.at:
            action, self.trap = self.trap.action, None
            os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)

    def _is_spared(self, data: bytes, spared: bytes) -> bool:
        """Return whether this is the head of a request that must not be interrupted, or its body."""
        head, is_head, _ = data.partition(b"\r\n\r\n")
        if is_head and b" HTTP/1.1\r\n" in head:
            self._in_spared = bool(spared) and spared in head.lower()
        return self._in_spared

    def _changes_run(self, event: str, args: tuple[Any, ...]) -> bool:
        changes = event in _CHANGES or (event == "open" and bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)))
        return changes and isinstance(args[0], str | Path) and str(args[0]).startswith(self.read_only)


def _is_of_python(path: object) -> bool:
    return isinstance(path, str) and (path.endswith((".py", ".pyc", ".so")) or path.startswith((sys.prefix, "/proc")))


class Trainer:
    """What the job can do. Each method is a command. ``host`` is taken for the boot id; ``""`` leaves the kernel's."""

    def __init__(self, place: Place, tier: Path | None, host: str, drain_every: int) -> None:
        if host:
            posix._BOOT_ID = _BootId(host)  # type: ignore[assignment]
        os.environ.update(place.environment)
        self._place, self._tier, self._drain_every = place, tier, drain_every
        self._directory = self._open()

    def _open(self, **options: Any) -> rankless.RunDirectory:
        local = None if self._tier is None else rankless.LocalTier(self._tier, drain_every=self._drain_every)
        return rankless.RunDirectory(self._place.path(), local=local, timeout=20.0, **options)

    def resume(self, tag: str | None = None, *, again: bool | None = None) -> Content:
        """Load as a job that goes on from there. With a tag, the second time, load what the run went on to."""
        return self._restore(self._directory, tag, resume=True, again=again)

    def resume_second(self) -> Content:
        """Resume by another object of this process, which is that of the job from now on."""
        self._directory = self._open()
        return self.resume()

    def save(self, content: Content, **options: Any) -> Content:
        """Save a content, under the tag of its length."""
        tag = options.pop("tag", f"s{len(content)}")
        self._directory.save(tag, {"content": _encode(content)}, step=len(content), **options).wait_local()
        if self._tier is not None:
            self._directory.wait()
        return content

    def read(self) -> Content:
        """Do all that changes nothing: list, load for an evaluation, open."""
        rankless.list_checkpoints(self._place.path())
        content = self._restore(self._open(), None, resume=False)
        if (
            self._tier is None
            and _decode(torch.as_tensor(rankless.open(self._place.path())["model/content"])) != content
        ):
            raise ValueError("open() and restore() disagree")
        return content

    def pin(self, tag: str) -> Content:
        """Pin a checkpoint until this process ends."""
        self._pin = rankless.pin(self._place.path(), tag)
        return _decode(torch.as_tensor(self._pin.__enter__()["model/content"]))

    def drain(self, *, adopt: bool) -> Content:
        """Write what the tier has into the run directory, after its job."""
        rankless.drain(self._place.path(), self._tier or "", adopt=adopt)
        return ()

    def command(self, *args: str) -> Content:
        """Run a command of the command line on the run directory."""
        result = CliRunner().invoke(app, [args[0], str(self._place.path()), *args[1:]])
        if result.exit_code:
            raise rankless.StateError(result.output)
        return ()

    def fork(self) -> Content:
        """Fork a child that ends as a program does, and wait for it."""
        child = os.fork()
        if not child:
            try:
                atexit._run_exitfuncs()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        return ()

    def _restore(self, directory: rankless.RunDirectory, tag: str | None, **options: Any) -> Content:
        state = {"content": torch.full((LENGTH,), -1, dtype=torch.int64)}
        directory.restore(tag, state, **options)
        directory.wait()
        return _decode(state["content"])


class _BootId:
    """The file that tells hosts apart."""

    def __init__(self, host: str) -> None:
        self._host = host

    def read_text(self, *_: Any, **__: Any) -> str:
        """Return its text."""
        return f"host {self._host}"


def _encode(content: Content) -> torch.Tensor:
    return torch.tensor((*content, *(0,) * (LENGTH - len(content))), dtype=torch.int64)


def _decode(steps: torch.Tensor) -> Content:
    return tuple(int(step) for step in steps if step)


def run_job(pipe: Connection, make: Callable[[], Trainer]) -> None:
    """Answer commands until the pipe ends. Each is a name, its arguments, and a trap."""
    faulthandler.enable()
    warnings.simplefilter("always")
    tripwire, trainer = _Tripwire(), None
    while True:
        try:
            name, args, options, trap = pipe.recv()
        except EOFError:
            return
        tripwire.read_only = options.pop("read_only", "")
        with warnings.catch_warnings(record=True) as caught:
            tripwire.arm(trap)
            try:
                trainer = trainer or make()
                reply = Reply(getattr(trainer, name)(*args, **options))
            except Exception as error:  # noqa: BLE001 - the history says whether it is right
                reply = Reply((), type(error).__name__, str(error))
            tripwire.arm(None)
        pipe.send(Reply(reply.content, reply.error, reply.message, tuple(str(one.message) for one in caught)))
