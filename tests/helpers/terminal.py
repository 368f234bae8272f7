"""A pseudo terminal, and a program that has it."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from tests.helpers.processes import ForkedProcess, execute


class Terminal:
    """A program on a terminal of 80 columns, and what it has written."""

    def __init__(self, ours: int, process: subprocess.Popen[bytes] | ForkedProcess) -> None:
        self._ours, self.process = ours, process
        self.raw = ""
        # A character may come in two reads.
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def read(self, seconds: float = 180.0) -> bool:
        """Take in what has been written; ``False`` at the end."""
        if not select.select([self._ours], [], [], seconds)[0]:
            raise TimeoutError(self.raw)
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # the other end is closed
            data = b""
        self.raw += self._decoder.decode(data)
        return bool(data)

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def end(self) -> int:
        while self.read():
            pass
        os.close(self._ours)
        return self.process.wait(30)

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.raw).replace("\r\n", "\n")


@contextmanager
def code_on_terminal(code: str, *arguments: str) -> Iterator[Terminal]:
    """Run ``python -c code arguments`` in a process that is forked from a server."""
    ours, theirs = pty.openpty()
    with Connection(theirs) as sent:
        process = ForkedProcess(_execute, sent, code, *arguments)
    with process:
        yield Terminal(ours, process)


def start_on_terminal(*command: str) -> Terminal:
    """Start ``python command`` in an interpreter of its own."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=_environment(),
        start_new_session=True,
        preexec_fn=_control,  # noqa: PLW1509 - Ctrl-C reaches the program that has the terminal
    )
    os.close(theirs)
    return Terminal(ours, process)


def _environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in {"COLUMNS", "NO_COLOR"}}
    return {**kept, "TERM": "xterm-256color"}


def _execute(terminal: Connection, code: str, *arguments: str) -> None:
    environment = _environment()
    os.environ.clear()
    os.environ.update(environment)
    os.setsid()
    for descriptor in range(3):
        os.dup2(terminal.fileno(), descriptor)
    terminal.close()
    _control()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    execute(code, *arguments)


def _control() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    fcntl.ioctl(0, termios.TIOCSWINSZ, (24).to_bytes(2, "little") + (80).to_bytes(2, "little") + bytes(4))
