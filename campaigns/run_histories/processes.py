"""The process of a job, as the campaign sees it: it is asked, killed, stopped and woken."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from campaigns.run_histories.trainer import Reply, Trainer, Trap, run_job

_CONTEXT = mp.get_context("fork")

#: The seconds between two looks at a process.
_POLL = 0.01

#: A command of a trainer: its name, its arguments, its options, and the trap on its way.
Command = tuple[str, tuple[Any, ...], dict[str, Any], Trap | None]


class HangError(Exception):
    """A job does not answer."""


class JobProcess(Protocol):
    """The process of a job."""

    def send(self, command: Command) -> None:
        """Let it begin a command."""

    def wait(self) -> Reply | str:
        """Return the reply, or ``"killed"`` or ``"stopped"``. Raises ``HangError``."""

    def wake(self) -> None:
        """Let it go on after a stop."""

    def kill(self) -> None:
        """Kill it, if it lives."""


class ForkedProcess:
    """A :class:`JobProcess` that is a child of this one. It counts as hanging after ``seconds`` without an answer."""

    def __init__(self, number: int, make: Callable[[], Trainer], seconds: float) -> None:
        self._number, self._seconds, self._is_closed = number, seconds, False
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=run_job, args=(theirs, make))
        self._process.start()
        theirs.close()

    def send(self, command: Command) -> None:
        """See :class:`JobProcess`."""
        self._pipe.send(command)

    def wait(self) -> Reply | str:
        """See :class:`JobProcess`."""
        ends = time.monotonic() + self._seconds
        while time.monotonic() < ends:
            with suppress(EOFError, ConnectionResetError):
                if self._pipe.poll(_POLL):
                    return self._pipe.recv()  # type: ignore[no-any-return]
            if _has_stopped(self._pid):
                return "stopped"
            if not self._process.is_alive():
                status = self._process.exitcode
                self._close()
                if status != -signal.SIGKILL:
                    raise HangError(f"job {self._number} has ended with the status {status}")
                return "killed"
        raise HangError(f"job {self._number} does not answer")

    @property
    def _pid(self) -> int:
        if self._is_closed or self._process.pid is None:
            raise HangError(f"job {self._number} has ended")
        return self._process.pid

    def wake(self) -> None:
        """See :class:`JobProcess`."""
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        """See :class:`JobProcess`."""
        if not self._is_closed:
            self._process.kill()
            self._process.join()
            self._close()

    def _close(self) -> None:
        """Close the process and the pipe: a campaign starts thousands, and each fork copies what is open."""
        self._process.close()
        self._pipe.close()
        self._is_closed = True


def _has_stopped(pid: int) -> bool:
    """Return whether a child has stopped since the last look, and leave its end to ``multiprocessing``."""
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG) is not None
    return False
