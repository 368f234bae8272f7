"""Chains of jobs that save into one run of an object store: each is killed, or stopped while the next one goes on.

After each job, all checkpoints that a tag names are downloaded and compared with the values of their step. None may be
a mixture, and what a rank reported as saved must be there. At the end a job goes on undisturbed, and a clean-up must
leave nothing but the checkpoints.
"""

from __future__ import annotations

import random
import re
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import rankless
from campaigns.common import interruption
from campaigns.common.job import Job, Rank
from campaigns.common.state import ViolationError
from campaigns.objects import oracle
from rankless.errors import TagExistsError
from rankless.storage.object_path import ObjectPath
from tests.helpers.small_parts import small_parts

#: The jobs of one chain, and the most seconds that a job saves before something happens to it.
JOBS, MOST_SECONDS = 6, 3.0

#: The timeout of the ranks, and the seconds after which a job counts as hanging.
_TIMEOUT, _HANGING = 10.0, 120.0

#: Errors that are mistakes of the library, also where the error of another rank only names them.
_MISTAKES = re.compile(r"\b(Assertion|Attribute|Index|Key|Name|Type|UnboundLocal|Value)Error\b")

#: Small parts, so that the files of a small checkpoint have several.
_PART = 64 * 2**10


@dataclass
class ChainResult:
    """The outcome of a chain: what happened how often, how many checkpoints were compared, and what was violated.

    ``failures`` are the errors of jobs that nothing had been done to.
    """

    events: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


def save_until_killed(rank: Rank, path: ObjectPath, draws: int, in_small_parts: bool) -> None:
    """Resume, and save as fast as possible, in all ways, as one rank."""
    with small_parts(_PART) if in_small_parts else nullcontext():
        step = interruption.load_latest(path) if rankless.has_checkpoint(path) else 0
        rank.send_message(f"at {step}")
        while True:
            step += 1
            save_kind = ("new", "overwrite", "retention")[(step + draws) % 3]
            interruption.save_step(path, step, save_kind, asynchronous=step % 2 == 0, timeout=_TIMEOUT)
            rank.send_message(f"at {step}")


def run_chain(
    seed: int,
    run: ObjectPath,
    direct: oracle.Run,
    scratch: Path,
    *,
    in_small_parts: bool,
    count_changes: Callable[[], int] = int,
) -> ChainResult:
    """Run the jobs of one chain, one after the other. ``direct`` is the run without a proxy, for the oracle."""
    result = ChainResult()
    chain = _Chain(result, random.Random(seed), run, direct, scratch, in_small_parts, count_changes)
    try:
        for _ in range(JOBS):
            chain.run_job()
            chain.check_visible()
        oracle.check_nothing_is_left(direct)
        chain.check_visible()
    except ViolationError as error:
        result.violations.append(f"chain {seed}: {error}; the tags are {oracle.describe_tags(direct)}")
    return result


@dataclass
class _Chain:
    """A chain of jobs.

    ``latest`` are the steps that the latest checkpoint may have: the last one that a rank has reported as saved, or the
    next one, whose save was cut. Where two jobs have saved at the same time, the last one of either may be the latest.
    The other one may have left a tag of a later step: a job that resumes from the latest may not save that tag.
    ``count_changes`` returns how often the proxy has changed bytes.
    """

    result: ChainResult
    draw: random.Random
    run: ObjectPath
    direct: oracle.Run
    scratch: Path
    in_small_parts: bool
    count_changes: Callable[[], int]
    latest: frozenset[int] = frozenset({0})
    may_find_tags: bool = False

    def run_job(self) -> None:
        """Start a job and disturb it."""
        size, draws = self.draw.choice([1, 2, 3]), self.draw.randrange(3)
        changes = self.count_changes()
        with self._start_job(size, draws) as job:
            begun = self._wait_for_start(job, size)
            if begun is None:
                return
            self._check_resumed(begun, self.latest, changes)
            job.wait_until(lambda: bool(job.outcomes), self.draw.uniform(0.0, MOST_SECONDS))
            victims = self.draw.choice([[self.draw.randrange(size)], list(range(size))])
            if self.draw.random() < 1 / 3:
                others = self._stop_and_wake(job, victims, draws)
            else:
                self._kill(job, victims)
                others = frozenset[int]()
            self.latest = others | _end_job(job)

    def check_visible(self) -> None:
        """Download all checkpoints. Raise ``ViolationError`` if one is not whole, or the latest one is not the last."""
        found, latest = oracle.read_checkpoints(self.direct)
        self.result.events["compared"] += len(found)
        if found.get(latest, 0) not in self.latest:
            raise ViolationError(f"step {[*self.latest]} was saved last, but {latest!r} is the latest of {found}")

    def _check_resumed(self, begun: int, expected: frozenset[int], changes: int) -> None:
        """Raise ``ViolationError`` if a job has not resumed from the latest checkpoint.

        A load whose bytes were changed on their way takes an older checkpoint. The latest one must still be whole.
        """
        if begun in expected:
            return
        tags = oracle.describe_tags(self.direct)
        if self.count_changes() == changes or not tags:
            raise ViolationError(f"a job resumed from step {begun}, although the latest is of {[*expected]}: {tags}")
        oracle.read_checkpoints(self.direct)
        self.result.events["resumed from an older one, because bytes were changed"] += 1
        self.may_find_tags = True

    def _start_job(self, size: int, draws: int) -> Job:
        return Job(size, "agent", self.scratch, save_until_killed, self.run, draws, self.in_small_parts)

    def _kill(self, job: Job, victims: Sequence[int]) -> None:
        for victim in victims:
            job.send_signal(victim, signal.SIGKILL)
        self.result.events["killed"] += 1
        self._note_failures("had failed before", job)
        if not job.wait_until(lambda: job.have_ended(*victims), _HANGING):
            raise ViolationError(f"the other ranks hang after {victims} were killed")

    def _stop_and_wake(self, job: Job, victims: Sequence[int], draws: int) -> frozenset[int]:
        """Stop ranks while another job resumes the run and saves, then wake them.

        Return the steps that the last checkpoint of the other job may have.
        """
        for victim in victims:
            job.send_signal(victim, signal.SIGSTOP)
        job.wait_until(lambda: False, 0.2)  # receive what it has sent before it stopped
        last, changes = max(_read_reported_steps(job)), self.count_changes()
        with self._start_job(2, draws) as other:
            begun = self._wait_for_start(other, 2)
            if begun is None:
                return frozenset()
            if begun < last:
                self._check_resumed(begun, frozenset({last, last + 1}), changes)
            self.may_find_tags = True
            other.wait_until(lambda: bool(other.outcomes), self.draw.uniform(0.5, MOST_SECONDS))
            for victim in victims:
                job.send_signal(victim, signal.SIGCONT)
            other.wait_until(lambda: bool(other.outcomes), self.draw.uniform(0.0, MOST_SECONDS))
            self.result.events["stopped and woken"] += 1
            return _end_job(other)

    def _wait_for_start(self, job: Job, size: int) -> int | None:
        """Return the step from which a job resumes; ``None`` if it could not, because its connections broke."""
        job.wait_until(lambda: len(job.messages) >= size or bool(job.outcomes), _HANGING)
        if job.outcomes:
            _check_errors(job)
            self._note_failures("failed at the start", job)
            return None
        if len(job.messages) < size:
            raise ViolationError("a job hangs while it resumes")
        return min(_read_reported_steps(job))

    def _note_failures(self, event: str, job: Job) -> None:
        expected = {TagExistsError.__name__} if self.may_find_tags else set[str]()
        failures = {f"{end.error}: {end.message}" for end in job.outcomes.values() if end.error not in expected}
        self.result.events[event] += bool(failures)
        self.result.events["found a tag of another job"] += bool(job.outcomes) and not failures
        self.result.failures += failures


def _end_job(job: Job) -> frozenset[int]:
    """Kill all ranks, receive all that they have sent, and check it. Return the steps that the last save may have."""
    for rank in range(job.size):
        job.send_signal(rank, signal.SIGKILL)
    if not job.wait_until(job.have_ended, _HANGING):
        raise ViolationError("the pipes of killed ranks stay open")
    _check_errors(job)
    last = max(_read_reported_steps(job))
    return frozenset({last, last + 1})


def _check_errors(job: Job) -> None:
    for rank, outcome in job.outcomes.items():
        if not outcome.is_typed or _MISTAKES.search(outcome.message):
            raise ViolationError(f"rank {rank} ended with {outcome.error}: {outcome.message}")


def _read_reported_steps(job: Job) -> list[int]:
    return [int(message.removeprefix("at ")) for _, message in job.messages if message.startswith("at ")]
