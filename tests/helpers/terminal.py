"""A pseudo terminal, and a program that has it."""

from __future__ import annotations

import codecs
import os
import pty
import re
import select
import subprocess
import sys


class Terminal:
    """A program on a terminal of 80 columns, and what it has written."""

    def __init__(self, *command: str) -> None:
        self._ours, theirs = pty.openpty()
        env = {key: value for key, value in os.environ.items() if key not in {"COLUMNS", "NO_COLOR"}}
        env |= {"TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            start_new_session=True,
            preexec_fn=_controlling,  # noqa: PLW1509 - Ctrl-C reaches the program that has the terminal
        )
        os.close(theirs)
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


def _controlling() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    fcntl.ioctl(0, termios.TIOCSWINSZ, (24).to_bytes(2, "little") + (80).to_bytes(2, "little") + bytes(4))
