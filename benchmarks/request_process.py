"""A process that does what it is asked for on its standard input, and times itself: another environment or version."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from benchmarks.measure import SelfTimed

#: The directory in which ``python -m benchmarks.NAME`` works.
ROOT = Path(__file__).parents[1]


class RequestProcess:
    """A process that answers the line ``WORK PATH`` with seconds. Its first line says that it is ready."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        self._command = command
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True)

    def wait_until_ready(self) -> str:
        """Wait for the first line, and return it."""
        return self._read_answer()

    def send(self, work: str, path: Path) -> None:
        """Request an action."""
        if self._process.stdin is not None:
            print(work, path, file=self._process.stdin, flush=True)

    def receive(self) -> SelfTimed:
        """Wait for the end of the action. Return the seconds that it took by the process's own clock."""
        return SelfTimed(float(self._read_answer()))

    def request(self, work: str, path: Path) -> SelfTimed:
        """Request an action, and wait for its end."""
        self.send(work, path)
        return self.receive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def _read_answer(self) -> str:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise ChildProcessError(f"{' '.join(self._command)} has ended; what it wrote above says why")
        return line.strip()
