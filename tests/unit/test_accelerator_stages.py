"""Tests that the stages of ``make accelerator`` end in time, and that its exit status tells what became of them."""

import os
import sys
import time
from pathlib import Path

import pytest

from campaigns.accelerator.__main__ import NO_ACCELERATOR, OUT_OF_TIME, exit_status
from campaigns.accelerator.stages import Outcome, Stage, run_stages

#: Starts a process, writes its id, and does not end. A shell does it at once, also on a busy machine.
SLEEPING = 'sleep 600 & echo $! > "$0"; wait'


def stage(name: str, code: str, *arguments: str, seconds: float = 60.0, needs_accelerator: bool = False) -> Stage:
    return Stage(name, (sys.executable, "-c", code, *arguments), seconds, needs_accelerator)


def is_running(pid: int) -> bool:
    """Whether a process exists that is not a zombie, which has no command line."""
    command = Path(f"/proc/{pid}/cmdline")
    return command.exists() and bool(command.read_bytes())


def test_each_stage_has_an_outcome() -> None:
    stages = [
        stage("good", "pass"),
        stage("bad", "raise SystemExit(5)"),
        stage("on a device", "pass", needs_accelerator=True),
    ]
    outcomes = list(run_stages(stages, os.environ, has_accelerator=False, deadline=time.monotonic() + 60))
    assert [(outcome.name, outcome.result) for outcome in outcomes] == [
        ("good", "passed"),
        ("bad", "failed"),
        ("on a device", "not run"),
    ]
    assert outcomes[2].reason == "there is no accelerator"


def test_a_stage_that_takes_too_long_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    slow = Stage("slow", ("sh", "-c", SLEEPING, str(pid)), 10.0, needs_accelerator=False)
    (outcome,) = run_stages([slow], os.environ, has_accelerator=True, deadline=time.monotonic() + 60)
    assert outcome.result == "out of time"
    ends = time.monotonic() + 30
    while is_running(int(pid.read_text())):
        assert time.monotonic() < ends, "a process of the stage was left"
        time.sleep(0.05)


def test_no_stage_begins_when_no_time_is_left() -> None:
    (outcome,) = run_stages([stage("late", "pass")], os.environ, has_accelerator=True, deadline=time.monotonic() + 1)
    assert (outcome.result, outcome.reason) == ("out of time", "it was not begun")


@pytest.mark.parametrize(
    ("results", "has_accelerator", "status"),
    [
        (["passed", "passed"], True, 0),
        (["passed", "failed", "not run"], False, 1),
        (["failed", "out of time"], True, 1),
        (["passed", "not run"], False, NO_ACCELERATOR),
        (["passed", "out of time", "not run"], False, OUT_OF_TIME),
        (["not run", "out of time"], False, OUT_OF_TIME),
    ],
)
def test_the_exit_status_tells_what_became_of_the_stages(
    results: list[str], has_accelerator: bool, status: int
) -> None:
    assert exit_status([Outcome("a", result) for result in results], has_accelerator) == status
