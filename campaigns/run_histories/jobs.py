"""The campaign's side of a job: it is forked, asked, killed, stopped and woken."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from campaigns.run_histories.oracle import Content
from campaigns.run_histories.places import Place
from campaigns.run_histories.trainer import Reply, Trainer, Trap, run_job

_CONTEXT = mp.get_context("fork")

#: The seconds after which a job counts as hanging, and between two looks.
_TIMEOUT, _POLL = 60.0, 0.001


class HangError(Exception):
    """A job does not answer."""


class Job:
    """A process that trains. ``content`` and ``run`` are those of its state, as the oracle knows them.

    ``run`` is 0 as long as it has loaded and saved nothing. ``is_challenged``: another job may have continued its run.
    """

    def __init__(self, number: int, place: Place, tier: Path | None, host: str, drain_every: int) -> None:
        self.number, self.place, self.tier, self.host = number, place, tier, host
        self.content: Content = ()
        self.run = 0
        self.is_challenged = self.is_doubtful = self.has_claimed = self.has_lost_tier = False
        self.awaited: Any = None
        self._pipe, theirs = _CONTEXT.Pipe()
        make = partial(Trainer, place, tier, host, drain_every)
        self._process = _CONTEXT.Process(target=run_job, args=(theirs, make))
        self._process.start()
        theirs.close()

    def send(self, name: str, *args: Any, trap: Trap | None = None, **options: Any) -> None:
        """Let it begin a command."""
        self._pipe.send((name, args, options, trap))

    def wait(self) -> Reply | str:
        """Return the reply, or ``"killed"`` or ``"stopped"``. Raises ``HangError``."""
        ends = time.monotonic() + _TIMEOUT
        while time.monotonic() < ends:
            with suppress(EOFError, ConnectionResetError):
                if self._pipe.poll(_POLL):
                    return self._pipe.recv()  # type: ignore[no-any-return]
            pid, status = os.waitpid(self._pid, os.WNOHANG | os.WUNTRACED)
            if pid and os.WIFSTOPPED(status):
                return "stopped"
            if pid:
                self._process = None  # type: ignore[assignment]
                if status != signal.SIGKILL:
                    raise HangError(f"job {self.number} has ended with the status {status}")
                return "killed"
        raise HangError(f"job {self.number} does not answer")

    def ask(self, name: str, *args: Any, trap: Trap | None = None, **options: Any) -> Reply | str:
        """Let it do a command, and wait."""
        self.send(name, *args, trap=trap, **options)
        return self.wait()

    @property
    def _pid(self) -> int:
        if self._process is None or self._process.pid is None:
            raise HangError(f"job {self.number} has ended")
        return self._process.pid

    def wake(self) -> Reply | str:
        """Let a stopped job go on, and wait."""
        os.kill(self._pid, signal.SIGCONT)
        return self.wait()

    def kill(self) -> None:
        """Kill it, if it lives."""
        if self._process is not None:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._process = None  # type: ignore[assignment]
        self._pipe.close()
