"""Code in processes of its own that have torch and rankless from the start: they are forked from a server.

Importing both costs seconds of CPU time, and a fork milliseconds. Code ends as a program does: the interpreter waits
for threads, calls the functions of ``atexit`` and is taken down, 0.3 s of CPU time. A command is only left, with
``os._exit``. A test about imports or about the start of the interpreter uses ``subprocess`` instead.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Self

from campaigns.common.fork_server import CONTEXT


class ForkedProcess:
    """A call of a function, with the methods of ``subprocess.Popen``; it is killed at the end of a ``with`` block.

    ``environment`` is added to that of this process. A change of this process's own would be that of the server, too,
    if the server starts just then, and so of all processes that other tests fork.
    """

    def __init__(
        self, function: Callable[..., object], *args: Any, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        ours, theirs = CONTEXT.Pipe(duplex=False)
        self._errors = tempfile.NamedTemporaryFile("r")  # noqa: SIM115 - closed by __exit__
        place = (theirs, self._errors.name, Path.cwd(), {**os.environ, **environment})
        self._process = CONTEXT.Process(target=_call, args=(*place, function, args))
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


def start_code(
    code: str, *arguments: str | Path, environment: Mapping[str, str] = MappingProxyType({})
) -> ForkedProcess:
    """Start ``python -c code arguments`` with further variables in its environment."""
    return ForkedProcess(execute, code, *map(str, arguments), environment=environment)


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
    folder: Path,
    environment: dict[str, str],
    function: Callable[..., object],
    args: tuple[Any, ...],
) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(stdout.fileno(), 1)
    stdout.close()
    with Path(errors).open("w") as file:
        os.dup2(file.fileno(), 2)
    # Those of the server were made for other kinds of files.
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    function(*args)


def execute(code: str, *arguments: str) -> None:
    """Do what ``python -c`` does, with the exit status as well; ``multiprocessing`` would call ``os._exit``."""
    gc.freeze()  # or the last collection goes through all that torch consists of
    sys.argv = ["-c", *arguments]
    sys.modules["__main__"] = ModuleType("__main__")
    # Prints an error, and ends the process itself if that is a SystemExit.
    failed = ctypes.pythonapi.PyRun_SimpleString(code.encode())
    ctypes.pythonapi.Py_Exit(1 if failed else 0)


def _run_main(*command: str) -> None:
    from rankless.cli.entry import main

    sys.argv = ["rankless", *command]
    main()
