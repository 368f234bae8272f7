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

from campaigns.kit import state, table, trial
from campaigns.kit.job import STORES, Job, Rank
from campaigns.kit.state import ViolationError
from campaigns.kit.trial import PATIENCE, SLACK, TIMEOUT, Case

#: The kills of one chain: a run that is killed repeatedly.
CHAIN = 5


@dataclass(frozen=True)
class Killed:
    """The outcome of a kill. ``seconds``: the time until the last other rank had raised; ``None`` if none was left."""

    reached: bool
    seconds: float | None = None
    committed: bool | None = None
    violation: str = ""


def at_point(case: Case, scratch: Path) -> Killed:
    """Kill a rank at a point. Return the outcome."""
    path = trial.make_run(scratch.parent / "template", scratch / "run")
    try:
        return _at_point(case, scratch, path)
    except ViolationError as error:
        return Killed(True, violation=str(error))


def _at_point(case: Case, scratch: Path, path: Path) -> Killed:
    with Job(case.size, case.store, scratch, trial.run, path, case, "die", backend=case.backend) as job:
        job.wait(lambda: job.is_over() or (job.is_over(case.victim) and (case.victim, "killed") in job.told), PATIENCE)
        killed = job.told.get((case.victim, "killed"))
        if killed is None:
            return Killed(False, violation=trial.missed(job, case))
        seconds, ends = trial.check_survivors(job, case, killed)
    committed = trial.check_disk(path, case, ends) if case.how else None
    check_resumed(path, scratch, str(case), 2 if committed else 1)
    return Killed(True, seconds, committed)


def check_resumed(path: Path, scratch: Path, what: str, step: int) -> None:
    """Check that a job on another number of ranks resumes from ``step`` and leaves no leftovers."""
    size = 1 + sum(map(ord, what)) % 3
    with Job(size, "agent", scratch, trial.resume, path) as job:
        job.wait(lambda: len(job.ends) == size, PATIENCE)
        found = {rank: end.result if not end.error else f"{end.error}: {end.message}" for rank, end in job.ends.items()}
    if found != dict.fromkeys(range(size), step):
        raise ViolationError(f"{what}: the job that resumes from step {step} got {found}")
    if state.visible(path) != {f"step_{step + 1}": step + 1} or state.hidden(path):
        raise ViolationError(f"{what}: after the next save there are {state.visible(path)} and {state.hidden(path)}")


def go_on(rank: Rank, path: Path, seed: int) -> None:
    """Save as fast as possible, in all ways, until killed, as one rank."""
    step = trial.load(path)
    rank.tell(f"at {step}")
    while True:
        step += 1
        how = ("new", "overwrite", "retention")[(step + seed) % 3]
        trial.save(path, step, how, background=step % 2 == 0, timeout=TIMEOUT)
        rank.tell(f"at {step}")


def chain(seed: int, scratch: Path, kills: int = CHAIN) -> list[Killed]:
    """Kill a run repeatedly at random moments, one rank or all at once; then let it continue undisturbed."""
    draw = random.Random(seed)
    folder = scratch / f"chain{seed}"
    folder.mkdir()
    path = trial.make_run(scratch / "template", folder / "run")
    done = 1
    found: list[Killed] = []
    try:
        for number in range(kills):
            size = draw.choice([2, 3])
            victims = [draw.randrange(size)] if number % 2 else list(range(size))
            killed, done = _at_random(path, draw, size, victims, done)
            found.append(killed)
        # The save that the last kill interrupted may be committed, although no rank returned.
        check_resumed(path, folder, f"chain {seed}", max(done, *state.visible(path).values()))
    except ViolationError as error:
        return [*found, Killed(True, violation=f"chain {seed}, after {len(found)} kills: {error}")]
    return found


def _at_random(path: Path, draw: random.Random, size: int, victims: Sequence[int], done: int) -> tuple[Killed, int]:
    scratch = path.parent
    with Job(size, draw.choice(STORES), scratch, go_on, path, draw.randrange(3)) as job:
        job.wait(lambda: len(job.told) >= size or bool(job.ends), PATIENCE)
        if job.ends or not job.told:
            raise ViolationError(f"the run could not resume after step {done}: {job.ends}")
        begun = min(_steps(job))
        job.wait(lambda: bool(job.ends), draw.uniform(0.0, 0.7))
        since = min(job.signal(victim, signal.SIGKILL) for victim in victims)
        job.wait(lambda: job.is_over(*victims), PATIENCE)
        seconds = _check_others(job, size, victims, since)
        reached = max(_steps(job))
    # A rank reports a step when its save has returned on all ranks.
    if not done - 1 <= begun <= reached:
        raise ViolationError(f"it resumed from step {begun}, although step {done} was saved")
    if max(state.visible(path).values()) < reached:
        raise ViolationError(f"step {reached} was saved, but the checkpoints are {state.visible(path)}")
    return Killed(True, seconds), reached


def _steps(job: Job) -> list[int]:
    return [int(what.removeprefix("at ")) for _, what in job.told if what.startswith("at ")]


def _check_others(job: Job, size: int, victims: Sequence[int], since: float) -> float | None:
    others = [rank for rank in range(size) if rank not in victims]
    for rank in others:
        end = job.ends.get(rank)
        if end is None:
            raise ViolationError(f"rank {rank} of {size} hangs after rank {victims[0]} was killed")
        if not (end.typed and trial.names(end.message, victims[0])):
            raise ViolationError(
                f"rank {victims[0]} of {size} was killed, and {rank} raised {end.error}: {end.message}"
            )
        # Rank 0 waits for the dead rank at the end of a save, and again in its next call.
        if end.when - since > 2 * TIMEOUT + SLACK:
            raise ViolationError(f"rank {rank} of {size} raised {end.when - since:.1f} s after a kill: {end.message}")
    ends = [job.ends[rank] for rank in others]
    if not trial.is_one_error(ends, victims[0]):
        said = [(end.error, end.message) for end in ends]
        raise ViolationError(f"rank {victims[0]} of {size} was killed, and the others did not raise one error: {said}")
    return max((end.when - since for end in ends), default=None)


def main() -> int:
    """Run the campaign, and print tables."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.kill", description=__doc__)
    parser.add_argument("--scratch", type=Path, help="directory of the runs (default: a temporary one)")
    parser.add_argument("--together", type=int, default=4, help="number of jobs that run at a time (default: 4)")
    parser.add_argument("--chains", type=int, default=12, help=f"runs that are killed {CHAIN} times (default: 12)")
    parser.add_argument("--only", default="", help="only points whose names contain this text")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        scratch = Path(folder)
        trial.make_run(scratch / "template", scratch / "first")
        started = time.monotonic()
        results = table.run(list(trial.numbered(options.only)), partial(_numbered, scratch), options.together)
        found = [(call, case, killed) for (call, _, case), killed in results]
        chains = list(table.run(range(options.chains), partial(chain, scratch=scratch), options.together))
        report(found, [killed for _, one in chains for killed in one])
        print(f"{time.monotonic() - started:.0f} s")
        violations = trial.unreached((call, case, killed.reached) for call, case, killed in found)
        violations += [killed.violation for *_, killed in found] + [one.violation for _, all_ in chains for one in all_]
        return table.verdict([violation for violation in violations if violation])


def _numbered(scratch: Path, numbered: tuple[str, int, Case]) -> Killed:
    call, number, case = numbered
    folder = scratch / f"{call}{number}"
    folder.mkdir()
    return at_point(case, folder)


def report(found: Iterable[tuple[str, Case, Killed]], at_random: Sequence[Killed]) -> None:
    """Print the outcomes of the kills."""
    rows: dict[tuple[str, str], list[Killed]] = {}
    for name, case, killed in found:
        rows.setdefault((name, case.point.name), []).append(killed)
    body = [(f"{call}: {point}", *_summary(killed)) for (call, point), killed in rows.items()]
    body.append(("at random, one rank or all", *_summary(at_random)))
    print(table.markdown(("killed when", "kills", "committed", "slowest error, s"), body))
    count = Counter(killed.reached for killed in [*(one for _, _, one in found), *at_random])
    print(f"\n{count[True]} kills; {count[False]} cases in which the rank did not reach the point")


def _summary(killed: Sequence[Killed]) -> tuple[object, ...]:
    seconds = [one.seconds for one in killed if one.seconds is not None]
    committed = sum(bool(one.committed) for one in killed)
    return sum(one.reached for one in killed), committed, f"{max(seconds):.2f}" if seconds else "-"


if __name__ == "__main__":
    sys.exit(main())
