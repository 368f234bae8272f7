"""Disturbs a training again and again until it is done, and reports problems."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import rankless
from campaigns.resume import step_log
from campaigns.resume.job import Job
from campaigns.resume.training import TrainingConfig

#: The ways in which an attempt ends.
KILLED, STOPPED, DONE = "killed", "told to stop", "done"

#: The most steps of an attempt before it is disturbed, and the most seconds between a step and a kill.
_STEPS, _SECONDS = 16, 0.03


@dataclass(frozen=True)
class Attempt:
    """An attempt: the number of ranks, the way it ended, and the step after which it did."""

    size: int
    end: str
    step: int


@dataclass(frozen=True)
class Outcome:
    """The outcome of a disturbed training."""

    attempts: list[Attempt]
    problems: list[str]


def interrupt_on_same_ranks(plan: TrainingConfig, size: int, moments: random.Random) -> Outcome:
    """Disturb a training on one number of ranks: each step must equal that of an undisturbed one, bit for bit."""
    expected = _train_uninterrupted(replace(plan, run=plan.run.with_name("undisturbed")), size)
    attempts, problems = _train_interrupted(plan, repeat(size), moments)
    return Outcome(attempts, problems + step_log.find_loss_problems(step_log.read_steps(plan.run), expected))


def interrupt_on_changing_ranks(plan: TrainingConfig, sizes: Iterator[int], moments: random.Random) -> Outcome:
    """Disturb a training that resumes on other numbers of ranks: each epoch must have every sample once."""
    attempts, problems = _train_interrupted(plan, sizes, moments)
    steps = step_log.read_steps(plan.run)
    return Outcome(attempts, problems + step_log.find_sample_problems(steps, plan.samples, plan.epochs))


def _train_uninterrupted(plan: TrainingConfig, size: int) -> list[step_log.Step]:
    plan.run.mkdir(parents=True)
    with Job(plan, 0, size) as job:
        if set(job.join_ranks()) != {0}:
            raise RuntimeError("the undisturbed training has failed")
    return step_log.read_steps(plan.run)


def _train_interrupted(
    plan: TrainingConfig, sizes: Iterator[int], moments: random.Random
) -> tuple[list[Attempt], list[str]]:
    plan.run.mkdir(parents=True)
    attempts: list[Attempt] = []
    problems: list[str] = []
    for number, size in enumerate(sizes):
        with Job(plan, number, size) as job:
            end = _interrupt_job(job, size, moments)
            codes = job.join_ranks()
        steps = [entry for entry in step_log.read_steps(plan.run) if entry.attempt == number]
        attempts.append(Attempt(size, end, max((entry.step for entry in steps), default=0)))
        if end != KILLED:
            problems += [f"attempt {number}: {problem}" for problem in _find_end_problems(plan, codes, steps)]
        if plan.done.exists() or problems:
            break
    return attempts, problems


def _interrupt_job(job: Job, size: int, moments: random.Random) -> str:
    """Kill a job or tell it to stop at a random moment, unless it is done before. Return which."""
    if moments.random() < 0.5:
        if not job.wait_for_step(moments.randint(1, _STEPS)):
            return DONE
        job.request_stop(moments.randrange(size))
        return STOPPED
    if not job.wait_for_step(moments.randint(0, _STEPS)):
        return DONE
    time.sleep(moments.uniform(0, _SECONDS))
    job.kill()
    return KILLED


def _find_end_problems(plan: TrainingConfig, codes: Sequence[int | None], steps: Sequence[step_log.Step]) -> list[str]:
    """Report ranks that did not exit well and after the same step.

    Unless that step was the last, there must be a checkpoint of it.
    """
    last = {rank: max(entry.step for entry in steps if entry.rank == rank) for rank in {entry.rank for entry in steps}}
    problems = [f"the ranks' processes ended with {codes}"] if set(codes) != {0} else []
    problems += [f"the ranks stopped after different steps: {last}"] if len(set(last.values())) > 1 else []
    saved = [info.step for info in rankless.list_checkpoints(plan.run)]
    if not plan.done.exists() and saved[-1:] != [max(last.values(), default=0)]:
        problems.append(f"the ranks stopped after step {last}, and the checkpoints are of steps {saved}")
    return problems
