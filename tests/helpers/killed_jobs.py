"""Jobs of one rank in processes of their own, which are killed at the end of a function."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from campaigns.common.fork_server import CONTEXT

_TIMEOUT = 60.0


def run_killed_job(function: Callable[..., Any], *args: Any) -> Any:
    """Return what ``function(*args)`` returns in a process that is killed right after; raise its error."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_run_and_die, args=(theirs, function, args))
    process.start()
    theirs.close()
    try:
        if not ours.poll(_TIMEOUT):
            raise TimeoutError(f"a job has not ended within {_TIMEOUT} s")
        result = ours.recv()
    finally:
        process.kill()
        process.join()
    if isinstance(result, BaseException):
        raise result
    return result


def _run_and_die(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    try:
        result = function(*args)
    except Exception as error:  # noqa: BLE001 - raised by the test
        result = error
    pipe.send(result)
    os.kill(os.getpid(), signal.SIGKILL)
