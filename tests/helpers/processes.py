"""Code in processes of its own that have torch and rankless from the start: they are forked from a server.

Importing both costs seconds of CPU time, and a fork milliseconds. A test about imports, the start or the end of the
interpreter (``atexit``, threads that it waits for, its exit status) uses ``subprocess`` instead.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from campaigns.common.fork_server import CONTEXT


class ForkedProcess:
    """A call of a function, with the methods of ``subprocess.Popen``; it is killed at the end of a ``with`` block."""

    def __init__(self, function: Callable[..., object], *args: Any) -> None:
        ours, theirs = CONTEXT.Pipe(duplex=False)
        self._errors = tempfile.NamedTemporaryFile("r")  # noqa: SIM115 - closed by __exit__
        place = (theirs, self._errors.name, dict(os.environ))
        self._process = CONTEXT.Process(target=_call, args=(*place, function, args), daemon=True)
        self._process.start()
        theirs.close()
        self.args = args
        self.stdout = os.fdopen(os.dup(ours.fileno()))
        ours.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.join()
        self.stdout.close()
        self._errors.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, or a signal's number, negated."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return what is written to standard output and standard error until the end, up to 64 kB of the former."""
        self.wait(timeout)
        return self.stdout.read(), self._errors.read()

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_code(code: str, *arguments: str | Path) -> ForkedProcess:
    """Start ``python -c code arguments``."""
    return ForkedProcess(_execute, code, *map(str, arguments))


def run_code(code: str, *arguments: str | Path, check: bool = False) -> subprocess.CompletedProcess[str]:
    """Run ``python -c code arguments``, and return its output and its exit status."""
    with start_code(code, *arguments) as process:
        result = _complete(process)
    if check:
        assert result.returncode == 0, result.stderr
    return result


def start_command(*command: str | Path) -> ForkedProcess:
    """Start ``python -m rankless command``."""
    return ForkedProcess(_run_main, *map(str, command))


def run_command(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run ``python -m rankless command``, and return its output and its exit status."""
    with start_command(*command) as process:
        return _complete(process)


def _complete(process: ForkedProcess) -> subprocess.CompletedProcess[str]:
    out, errors = process.communicate(60)
    return subprocess.CompletedProcess(process.args, process.wait(), out, errors)


def _call(
    stdout: Connection,
    errors: str,
    environment: dict[str, str],
    function: Callable[..., object],
    args: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(stdout.fileno(), 1)
    stdout.close()
    with Path(errors).open("w") as file:
        os.dup2(file.fileno(), 2)
    # Those of the server were made for other kinds of files.
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    function(*args)


def _execute(code: str, *arguments: str) -> None:
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<code of a test>", "exec"), {"__name__": "__main__"})  # noqa: S102


def _run_main(*command: str) -> None:
    from rankless.cli.entry import main

    sys.argv = ["rankless", *command]
    main()
