"""The campaign's side of a job: what the oracle knows of it, and its process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from campaigns.run_histories.oracle import Content
from campaigns.run_histories.places import Place
from campaigns.run_histories.processes import JobProcess
from campaigns.run_histories.trainer import Reply, Trap


class Job:
    """A job that trains. ``content`` and ``run`` are those of its state, as the oracle knows them.

    ``host`` is that of its tier, or ``""``. ``run`` is 0 as long as it has loaded and saved nothing.
    ``is_challenged``: another job may have continued its run. ``removable`` are the checkpoints that its last save may
    remove, and ``held`` those that it may remove as soon as they are not pinned any more.
    """

    def __init__(self, number: int, place: Place, tier: Path | None, host: str, process: JobProcess) -> None:
        self.number, self.place, self.tier, self.host = number, place, tier, host
        self.content: Content = ()
        self.run = 0
        self.is_challenged = self.is_doubtful = self.has_claimed = self.has_lost_tier = False
        self.removable: set[Content] = set()
        self.held: set[Content] = set()
        self.awaited: Any = None
        self._process = process

    def send(self, name: str, *args: Any, trap: Trap | None = None, **options: Any) -> None:
        """Let it begin a command."""
        if trap is not None and trap.action == "stop":
            trap = replace(trap, spared=self.place.spared)
        self._process.send((name, args, options, trap))

    def wait(self) -> Reply | str:
        """Return the reply, or ``"killed"`` or ``"stopped"``. Raises ``HangError``."""
        return self._process.wait()

    def ask(self, name: str, *args: Any, trap: Trap | None = None, **options: Any) -> Reply | str:
        """Let it do a command, and wait."""
        self.send(name, *args, trap=trap, **options)
        return self.wait()

    def wake(self) -> Reply | str:
        """Let a stopped job go on, and wait."""
        self._process.wake()
        return self.wait()

    def kill(self) -> None:
        """Kill it, if it lives."""
        self._process.kill()
