"""Commands that run one after the other, each for a limited time, and what became of each."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

#: The least seconds for which it makes sense to start a command.
_LEAST_SECONDS = 5.0


@dataclass(frozen=True)
class Stage:
    """A command, and the most seconds that it may take."""

    name: str
    command: tuple[str, ...]
    seconds: float
    needs_accelerator: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of a stage: ``passed``, ``failed``, ``out of time`` or ``not run``, and why it did not begin."""

    name: str
    result: str
    seconds: float = 0.0
    reason: str = ""


def run_stages(
    stages: Iterable[Stage], environment: Mapping[str, str], has_accelerator: bool, deadline: float
) -> Iterator[Outcome]:
    """Run stages until the deadline, a time of ``time.monotonic``. Yield the outcome of each, also if it is not run."""
    for stage in stages:
        left = deadline - time.monotonic()
        if stage.needs_accelerator and not has_accelerator:
            yield Outcome(stage.name, "not run", reason="there is no accelerator")
        elif left < min(_LEAST_SECONDS, stage.seconds):
            yield Outcome(stage.name, "out of time", reason="it was not begun")
        else:
            print(f"\n== {stage.name}", flush=True)
            yield run_stage(stage, environment, min(left, stage.seconds))


def run_stage(stage: Stage, environment: Mapping[str, str], seconds: float) -> Outcome:
    """Run the command of a stage. When its time is up, kill it and all processes that it started."""
    started = time.monotonic()
    process = subprocess.Popen(stage.command, env=environment, start_new_session=True)
    try:
        result = "failed" if process.wait(seconds) else "passed"
    except subprocess.TimeoutExpired:
        result = "out of time"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return Outcome(stage.name, result, time.monotonic() - started)
