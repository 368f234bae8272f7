"""``python -m campaigns.stop``: stops a rank (SIGSTOP) at every point of a save and of a load, and wakes it later.

It proves "Killed and stopped ranks" of ``docs/failure-model.md``. While the rank is stopped, the others raise an error
that names it, or the store in its process, within the timeout and two seconds. In half of the cases another job then
continues in the same directory. The woken rank ends too, with a typed error or with its result. Checkpoints of the
other job are untouched, and all visible ones are whole. It exits with 1 on any violation.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from campaigns.common import case_runner, interruption, state
from campaigns.common.interruption import MAX_SECONDS, SLACK, TIMEOUT, Case
from campaigns.common.job import Job, Rank, RankOutcome
from campaigns.common.state import ViolationError

#: The step that another job saves meanwhile.
OTHER_STEP = 5


@dataclass(frozen=True)
class StopOutcome:
    """The outcome. ``seconds``: until the last other rank had ended; ``woken``: how the victim ended, and how fast."""

    reached: bool
    seconds: float = 0.0
    committed: bool = False
    woken: str = ""
    woken_seconds: float = 0.0
    violation: str = ""


def stop_at_point(case: Case, scratch: Path, *, meanwhile: bool) -> StopOutcome:
    """Stop a rank at a point, let another job continue if ``meanwhile``, wake the rank. Return the outcome."""
    path = interruption.create_run(scratch.parent / "template", scratch / "run")
    try:
        return _stop_and_check(case, scratch, path, meanwhile=meanwhile)
    except ViolationError as error:
        return StopOutcome(True, violation=str(error))


def _stop_and_check(case: Case, scratch: Path, path: Path, *, meanwhile: bool) -> StopOutcome:
    victim = case.victim
    with interruption.start_job(case, scratch, path, "stop_process") as job:
        job.wait_until(
            lambda: job.have_ended() or (job.have_ended(victim) and (victim, "stopped") in job.messages), MAX_SECONDS
        )
        stopped = job.messages.get((victim, "stopped"))
        if stopped is None:
            return StopOutcome(False, violation=interruption.describe_missed_point(job, case))
        seconds, ends = interruption.check_survivors(job, case, stopped)
        before = interruption.check_checkpoints(path, case, ends) if case.save_kind else None
        if meanwhile:
            _run_other_job(path, scratch, case, 2 if before else 1)
        woken = job.send_signal(victim, signal.SIGCONT)
        if not job.wait_until(lambda: victim in job.outcomes, MAX_SECONDS):
            raise ViolationError(f"{case}: the woken rank hangs")
        end = job.outcomes[victim]
    if end.error and not end.is_typed:
        raise ViolationError(f"{case}: the woken rank raised {end.error}: {end.message}")
    if end.time - woken > TIMEOUT + SLACK:
        raise ViolationError(f"{case}: the woken rank took {end.time - woken:.1f} s: {end.error} {end.message}")
    committed = _check_checkpoints(path, case, [*ends, end], meanwhile=meanwhile)
    return StopOutcome(True, seconds, committed, end.error or "done", end.time - woken)


def _run_other_job(path: Path, scratch: Path, case: Case, step: int) -> None:
    """Let another job load, and replace the checkpoint that the stopped rank may be about to replace."""
    with Job(2, "agent", scratch, save_as_other_job, path, case.save_kind or "overwrite", step) as other:
        other.wait_until(lambda: len(other.outcomes) == 2, MAX_SECONDS)
        wrong = [end for end in other.outcomes.values() if end.error]
    if wrong or len(other.outcomes) != 2:
        raise ViolationError(f"{case}: another job could not continue meanwhile: {wrong}")


def save_as_other_job(rank: Rank, path: Path, save_kind: str, step: int) -> None:
    """Load the latest checkpoint and save a later step in the same way, as one rank of the other job."""
    del rank
    if interruption.load_latest(path) != step:
        raise ViolationError(f"{path} has another step than {step}")
    interruption.save_step(path, OTHER_STEP, save_kind)


def _check_checkpoints(path: Path, case: Case, ends: list[RankOutcome], *, meanwhile: bool) -> bool:
    """Check that all checkpoints are whole and the other job's is the latest. Return whether the save is committed."""
    if not case.save_kind:
        return False
    if not meanwhile:
        return interruption.check_checkpoints(path, case, ends, woken=True)
    there = state.read_checkpoints(path)
    if OTHER_STEP not in there.values():
        raise ViolationError(f"{case}: the checkpoint of another job is missing: {there}")
    if (latest := interruption.load_latest(path)) != OTHER_STEP:
        raise ViolationError(f"{case}: the latest is step {latest}, not the one of another job: {there}")
    return 2 in there.values()


def main() -> int:
    """Run the campaign, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.stop", description=__doc__)
    parser.add_argument("--scratch", type=Path, help="directory of the runs (default: a temporary one)")
    parser.add_argument("--together", type=int, default=4, help="number of jobs that run at a time (default: 4)")
    parser.add_argument("--only", default="", help="only points whose names contain this text")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        scratch = Path(folder)
        interruption.create_run(scratch / "template", scratch / "first")
        started = time.monotonic()
        results = case_runner.run_cases(
            list(interruption.select_cases(options.only)), partial(_run_numbered_case, scratch), options.together
        )
        stops = [(call, case, stopped) for (call, _, case), stopped in results]
        print_report(stops)
        print(f"{time.monotonic() - started:.0f} s")
        violations = interruption.find_unreached_points((call, case, stopped.reached) for call, case, stopped in stops)
        return case_runner.report_violations(
            violations + [stopped.violation for *_, stopped in stops if stopped.violation]
        )


def _run_numbered_case(scratch: Path, numbered: tuple[str, int, Case]) -> StopOutcome:
    call, number, case = numbered
    folder = scratch / f"{call}{number}"
    folder.mkdir()
    return stop_at_point(case, folder, meanwhile=number % 2 == 1)


def print_report(stops: Iterable[tuple[str, Case, StopOutcome]]) -> None:
    """Print the outcomes by point."""
    rows: dict[tuple[str, str], list[StopOutcome]] = {}
    for name, case, stopped in stops:
        rows.setdefault((name, case.point.name), []).append(stopped)
    body = []
    for (name, point), outcomes in rows.items():
        reached = [outcome for outcome in outcomes if outcome.reached]
        woken = sorted({outcome.woken for outcome in reached if outcome.woken})
        slowest = [
            f"{max((number(outcome) for outcome in reached), default=0):.2f}"
            for number in (_get_seconds, _get_woken_seconds)
        ]
        committed = sum(outcome.committed for outcome in reached)
        body.append((f"{name}: {point}", len(reached), committed, *slowest, ", ".join(woken)))
    head = ("stopped when", "stops", "committed", "others' error, s", "woken's end, s", "the woken rank's ends")
    print(case_runner.format_table(head, body))
    print(f"\n{sum(outcome.reached for *_, outcome in stops)} stops")


def _get_seconds(outcome: StopOutcome) -> float:
    return outcome.seconds


def _get_woken_seconds(outcome: StopOutcome) -> float:
    return outcome.woken_seconds


if __name__ == "__main__":
    sys.exit(main())
