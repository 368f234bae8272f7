"""``python -m campaigns.kill``: kills ranks of a job (SIGKILL) at every point of a save and a load, and at random.

It proves "Killed and stopped ranks" of ``docs/failure-model.md``. After each kill:

- The other ranks raise an error that names the dead rank, or the store that died with it, within the timeout and two
seconds. It is one error, type and message, if rank 0 lives; one type if rank 0 is the dead rank.

- Every visible checkpoint is old or new, bit for bit.

- A job that is started again, on another number of ranks, resumes from the latest checkpoint.

Runs that are killed at random are killed five times in a row. There an error may come one timeout later, because the
call before may have to end first. It exits with 1 on any violation.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from campaigns.common import case_runner, interruption, state
from campaigns.common.interruption import MAX_SECONDS, SLACK, TIMEOUT, Case
from campaigns.common.job import STORES, Job, Rank
from campaigns.common.state import ViolationError

#: The kills of one chain: a run that is killed repeatedly.
KILLS_PER_RUN = 5


@dataclass(frozen=True)
class KillOutcome:
    """The outcome of a kill. ``seconds``: the time until the last other rank had raised; ``None`` if none was left."""

    reached: bool
    seconds: float | None = None
    committed: bool | None = None
    violation: str = ""


def kill_at_point(case: Case, scratch: Path) -> KillOutcome:
    """Kill a rank at a point. Return the outcome."""
    path = interruption.create_run(scratch.parent / "template", scratch / "run")
    try:
        return _kill_and_check(case, scratch, path)
    except ViolationError as error:
        return KillOutcome(True, violation=str(error))


def _kill_and_check(case: Case, scratch: Path, path: Path) -> KillOutcome:
    with interruption.start_job(case, scratch, path, "kill_process") as job:
        job.wait_until(
            lambda: job.have_ended() or (job.have_ended(case.victim) and (case.victim, "killed") in job.messages),
            MAX_SECONDS,
        )
        killed = job.messages.get((case.victim, "killed"))
        if killed is None:
            return KillOutcome(False, violation=interruption.describe_missed_point(job, case))
        seconds, ends = interruption.check_survivors(job, case, killed)
    committed = interruption.check_checkpoints(path, case, ends) if case.save_kind else None
    check_resumed_run(path, scratch, str(case), 2 if committed else 1)
    return KillOutcome(True, seconds, committed)


def check_resumed_run(path: Path, scratch: Path, description: str, step: int) -> None:
    """Check that a job on another number of ranks resumes from ``step`` and leaves no leftovers."""
    size = 1 + sum(map(ord, description)) % 3
    with Job(size, "agent", scratch, interruption.resume_and_save, path) as job:
        job.wait_until(lambda: len(job.outcomes) == size, MAX_SECONDS)
        results = {
            rank: end.result if not end.error else f"{end.error}: {end.message}" for rank, end in job.outcomes.items()
        }
    if results != dict.fromkeys(range(size), step):
        raise ViolationError(f"{description}: the job that resumes from step {step} got {results}")
    checkpoints, leftovers = state.read_checkpoints(path), state.list_hidden_names(path)
    if checkpoints != {f"step_{step + 1}": step + 1} or leftovers:
        raise ViolationError(f"{description}: after the next save there are {checkpoints} and {leftovers}")


def save_until_killed(rank: Rank, path: Path, seed: int) -> None:
    """Save as fast as possible, in all ways, until killed, as one rank."""
    step = interruption.load_latest(path)
    rank.send_message(f"at {step}")
    while True:
        step += 1
        save_kind = ("new", "overwrite", "retention")[(step + seed) % 3]
        interruption.save_step(path, step, save_kind, asynchronous=step % 2 == 0, timeout=TIMEOUT)
        rank.send_message(f"at {step}")


def kill_repeatedly(seed: int, scratch: Path, kills: int = KILLS_PER_RUN) -> list[KillOutcome]:
    """Kill a run repeatedly at random moments, one rank or all at once; then let it continue undisturbed."""
    draw = random.Random(seed)
    folder = scratch / f"chain{seed}"
    folder.mkdir()
    path = interruption.create_run(scratch / "template", folder / "run")
    done = 1
    outcomes: list[KillOutcome] = []
    try:
        for number in range(kills):
            size = draw.choice([2, 3])
            victims = [draw.randrange(size)] if number % 2 else list(range(size))
            killed, done = _kill_at_random(path, draw, size, victims, done)
            outcomes.append(killed)
        # The save that the last kill interrupted may be committed, although no rank returned.
        check_resumed_run(path, folder, f"chain {seed}", max(done, *state.read_checkpoints(path).values()))
    except ViolationError as error:
        return [*outcomes, KillOutcome(True, violation=f"chain {seed}, after {len(outcomes)} kills: {error}")]
    return outcomes


def _kill_at_random(
    path: Path, draw: random.Random, size: int, victims: Sequence[int], done: int
) -> tuple[KillOutcome, int]:
    scratch = path.parent
    hosts = draw.choice(interruption.HOSTS)
    with Job(size, draw.choice(STORES), scratch, save_until_killed, path, draw.randrange(3), hosts=hosts) as job:
        job.wait_until(lambda: len(job.messages) >= size or bool(job.outcomes), MAX_SECONDS)
        if job.outcomes or not job.messages:
            raise ViolationError(f"the run could not resume after step {done}: {job.outcomes}")
        begun = min(_read_reported_steps(job))
        job.wait_until(lambda: bool(job.outcomes), draw.uniform(0.0, 0.7))
        since = min(job.send_signal(victim, signal.SIGKILL) for victim in victims)
        job.wait_until(lambda: job.have_ended(*victims), MAX_SECONDS)
        seconds = _check_others(job, size, victims, since)
        reached = max(_read_reported_steps(job))
    # A rank reports a step when its save has returned on all ranks.
    if not done - 1 <= begun <= reached:
        raise ViolationError(f"it resumed from step {begun}, although step {done} was saved")
    if max(state.read_checkpoints(path).values()) < reached:
        raise ViolationError(f"step {reached} was saved, but the checkpoints are {state.read_checkpoints(path)}")
    return KillOutcome(True, seconds), reached


def _read_reported_steps(job: Job) -> list[int]:
    return [int(message.removeprefix("at ")) for _, message in job.messages if message.startswith("at ")]


def _check_others(job: Job, size: int, victims: Sequence[int], since: float) -> float | None:
    others = [rank for rank in range(size) if rank not in victims]
    for rank in others:
        end = job.outcomes.get(rank)
        if end is None:
            raise ViolationError(f"rank {rank} of {size} hangs after rank {victims[0]} was killed")
        if not (end.is_typed and interruption.names_rank(end.message, victims[0])):
            raise ViolationError(
                f"rank {victims[0]} of {size} was killed, and {rank} raised {end.error}: {end.message}"
            )
        # Rank 0 waits for the dead rank at the end of a save, and again in its next call.
        if end.time - since > 2 * TIMEOUT + SLACK:
            raise ViolationError(f"rank {rank} of {size} raised {end.time - since:.1f} s after a kill: {end.message}")
    ends = [job.outcomes[rank] for rank in others]
    if not interruption.is_same_error(ends, victims[0]):
        errors = [(end.error, end.message) for end in ends]
        raise ViolationError(
            f"rank {victims[0]} of {size} was killed, and the others did not raise one error: {errors}"
        )
    return max((end.time - since for end in ends), default=None)


def main() -> int:
    """Run the campaign, and print tables."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.kill", description=__doc__)
    parser.add_argument("--scratch", type=Path, help="directory of the runs (default: a temporary one)")
    parser.add_argument("--together", type=int, default=4, help="number of jobs that run at a time (default: 4)")
    parser.add_argument(
        "--chains", type=int, default=12, help=f"runs that are killed {KILLS_PER_RUN} times (default: 12)"
    )
    parser.add_argument("--only", default="", help="only points whose names contain this text")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        scratch = Path(folder)
        interruption.create_run(scratch / "template", scratch / "first")
        started = time.monotonic()
        results = case_runner.run_cases(
            list(interruption.select_cases(options.only)), partial(_run_numbered_case, scratch), options.together
        )
        kills = [(call, case, killed) for (call, _, case), killed in results]
        chains = list(
            case_runner.run_cases(range(options.chains), partial(kill_repeatedly, scratch=scratch), options.together)
        )
        print_report(kills, [killed for _, outcomes in chains for killed in outcomes])
        print(f"{time.monotonic() - started:.0f} s")
        violations = interruption.find_unreached_points((call, case, killed.reached) for call, case, killed in kills)
        violations += [killed.violation for *_, killed in kills] + [
            outcome.violation for _, outcomes in chains for outcome in outcomes
        ]
        return case_runner.report_violations([violation for violation in violations if violation])


def _run_numbered_case(scratch: Path, numbered: tuple[str, int, Case]) -> KillOutcome:
    call, number, case = numbered
    folder = scratch / f"{call}{number}"
    folder.mkdir()
    return kill_at_point(case, folder)


def print_report(kills: Iterable[tuple[str, Case, KillOutcome]], at_random: Sequence[KillOutcome]) -> None:
    """Print the outcomes of the kills."""
    rows: dict[tuple[str, str], list[KillOutcome]] = {}
    for name, case, killed in kills:
        rows.setdefault((name, case.point.name), []).append(killed)
    body = [(f"{call}: {point}", *_summarize_kills(killed)) for (call, point), killed in rows.items()]
    body.append(("at random, one rank or all", *_summarize_kills(at_random)))
    print(case_runner.format_table(("killed when", "kills", "committed", "slowest error, s"), body))
    count = Counter(killed.reached for killed in [*(killed for _, _, killed in kills), *at_random])
    print(f"\n{count[True]} kills; {count[False]} cases in which the rank did not reach the point")


def _summarize_kills(killed: Sequence[KillOutcome]) -> tuple[object, ...]:
    seconds = [outcome.seconds for outcome in killed if outcome.seconds is not None]
    committed = sum(bool(outcome.committed) for outcome in killed)
    return sum(outcome.reached for outcome in killed), committed, f"{max(seconds):.2f}" if seconds else "-"


if __name__ == "__main__":
    sys.exit(main())
