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

from campaigns.kit import state, table, trial
from campaigns.kit.job import End, Job, Rank
from campaigns.kit.state import ViolationError
from campaigns.kit.trial import PATIENCE, SLACK, TIMEOUT, Case

#: The step that another job saves meanwhile.
OTHER = 5


@dataclass(frozen=True)
class Stopped:
    """The outcome. ``seconds``: until the last other rank had ended; ``woken``: how the victim ended, and how fast."""

    reached: bool
    seconds: float = 0.0
    committed: bool = False
    woken: str = ""
    woken_seconds: float = 0.0
    violation: str = ""


def at_point(case: Case, scratch: Path, *, meanwhile: bool) -> Stopped:
    """Stop a rank at a point, let another job continue if ``meanwhile``, wake the rank. Return the outcome."""
    path = trial.make_run(scratch.parent / "template", scratch / "run")
    try:
        return _at_point(case, scratch, path, meanwhile=meanwhile)
    except ViolationError as error:
        return Stopped(True, violation=str(error))


def _at_point(case: Case, scratch: Path, path: Path, *, meanwhile: bool) -> Stopped:
    victim = case.victim
    with Job(case.size, case.store, scratch, trial.run, path, case, "stop", backend=case.backend) as job:
        job.wait(lambda: job.is_over() or (job.is_over(victim) and (victim, "stopped") in job.told), PATIENCE)
        stopped = job.told.get((victim, "stopped"))
        if stopped is None:
            return Stopped(False, violation=trial.missed(job, case))
        seconds, ends = trial.check_survivors(job, case, stopped)
        before = trial.check_disk(path, case, ends) if case.how else None
        if meanwhile:
            _let_another_go_on(path, scratch, case, 2 if before else 1)
        woken = job.signal(victim, signal.SIGCONT)
        if not job.wait(lambda: victim in job.ends, PATIENCE):
            raise ViolationError(f"{case}: the woken rank hangs")
        end = job.ends[victim]
    if end.error and not end.typed:
        raise ViolationError(f"{case}: the woken rank raised {end.error}: {end.message}")
    if end.when - woken > TIMEOUT + SLACK:
        raise ViolationError(f"{case}: the woken rank took {end.when - woken:.1f} s: {end.error} {end.message}")
    committed = _check_disk(path, case, [*ends, end], meanwhile=meanwhile)
    return Stopped(True, seconds, committed, end.error or "done", end.when - woken)


def _let_another_go_on(path: Path, scratch: Path, case: Case, step: int) -> None:
    """Let another job load, and replace the checkpoint that the stopped rank may be about to replace."""
    with Job(2, "agent", scratch, go_on, path, case.how or "overwrite", step) as other:
        other.wait(lambda: len(other.ends) == 2, PATIENCE)
        wrong = [end for end in other.ends.values() if end.error]
    if wrong or len(other.ends) != 2:
        raise ViolationError(f"{case}: another job could not continue meanwhile: {wrong}")


def go_on(rank: Rank, path: Path, how: str, step: int) -> None:
    """Load the latest checkpoint and save a later step in the same way, as one rank of the other job."""
    del rank
    if trial.load(path) != step:
        raise ViolationError(f"{path} has another step than {step}")
    trial.save(path, OTHER, how)


def _check_disk(path: Path, case: Case, ends: list[End], *, meanwhile: bool) -> bool:
    """Check that all checkpoints are whole and the other job's is the latest. Return whether the save is committed."""
    if not case.how:
        return False
    if not meanwhile:
        return trial.check_disk(path, case, ends, woken=True)
    there = state.visible(path)
    if OTHER not in there.values():
        raise ViolationError(f"{case}: the checkpoint of another job is missing: {there}")
    if (latest := trial.load(path)) != OTHER:
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
        trial.make_run(scratch / "template", scratch / "first")
        started = time.monotonic()
        results = table.run(list(trial.numbered(options.only)), partial(_numbered, scratch), options.together)
        found = [(call, case, stopped) for (call, _, case), stopped in results]
        report(found)
        print(f"{time.monotonic() - started:.0f} s")
        violations = trial.unreached((call, case, stopped.reached) for call, case, stopped in found)
        return table.verdict(violations + [stopped.violation for *_, stopped in found if stopped.violation])


def _numbered(scratch: Path, numbered: tuple[str, int, Case]) -> Stopped:
    call, number, case = numbered
    folder = scratch / f"{call}{number}"
    folder.mkdir()
    return at_point(case, folder, meanwhile=number % 2 == 1)


def report(found: Iterable[tuple[str, Case, Stopped]]) -> None:
    """Print the outcomes by point."""
    rows: dict[tuple[str, str], list[Stopped]] = {}
    for name, case, stopped in found:
        rows.setdefault((name, case.point.name), []).append(stopped)
    body = []
    for (name, point), all_ in rows.items():
        reached = [one for one in all_ if one.reached]
        woken = sorted({one.woken for one in reached if one.woken})
        slowest = [f"{max((number(one) for one in reached), default=0):.2f}" for number in (_seconds, _woken_seconds)]
        committed = sum(one.committed for one in reached)
        body.append((f"{name}: {point}", len(reached), committed, *slowest, ", ".join(woken)))
    head = ("stopped when", "stops", "committed", "others' error, s", "woken's end, s", "the woken rank's ends")
    print(table.markdown(head, body))
    print(f"\n{sum(one.reached for *_, one in found)} stops")


def _seconds(one: Stopped) -> float:
    return one.seconds


def _woken_seconds(one: Stopped) -> float:
    return one.woken_seconds


if __name__ == "__main__":
    sys.exit(main())
