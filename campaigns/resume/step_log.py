"""The steps that are part of the final training, from the logs of all attempts, without those undone by a kill."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Step:
    """One step of one rank."""

    attempt: int
    rank: int
    step: int
    loss: str
    samples: tuple[int, ...]


def read_steps(run: Path) -> list[Step]:
    """Return all steps of all attempts, repeated ones too."""
    return sorted(_parse_logs(run), key=lambda one: (one.attempt, one.step, one.rank))


def _parse_logs(run: Path) -> Iterator[Step]:
    for log in run.glob("log.*"):
        _, attempt, rank = log.name.split(".")
        for line in log.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                entry = json.loads(line)
                yield Step(int(attempt), int(rank), entry["step"], entry["loss"], tuple(entry["samples"]))


def select_lasting_steps(steps: Sequence[Step]) -> list[Step]:
    """Return the steps that the last attempt builds on: for each number, those of the latest attempt that did it."""
    begins: dict[int, int] = {}
    for one in steps:
        begins[one.attempt] = min(one.step, begins.get(one.attempt, one.step))
    kept = []
    for one in steps:
        undone = any(attempt > one.attempt and begin <= one.step for attempt, begin in begins.items())
        kept += [] if undone else [one]
    return sorted(kept, key=lambda one: (one.step, one.rank))


def find_sample_problems(steps: Sequence[Step], samples: int, epochs: int) -> list[str]:
    """Report epochs in which a sample was not seen exactly once.

    Batches at the end belong to the next epoch.
    """
    stream = [sample for one in select_lasting_steps(steps) for sample in one.samples]
    found = []
    for epoch in range(epochs):
        seen = stream[epoch * samples : (epoch + 1) * samples]
        if sorted(seen) != list(range(samples)):
            twice = sorted({sample for sample in seen if seen.count(sample) > 1})
            never = sorted(set(range(samples)).difference(seen))
            found.append(f"epoch {epoch}: seen more than once: {twice}, never: {never}")
    return found


def find_loss_problems(steps: Sequence[Step], undisturbed: Sequence[Step]) -> list[str]:
    """Report steps, repeated ones too, whose loss is not that of an undisturbed run, bit for bit."""
    expected = {(one.rank, one.step): one for one in undisturbed}
    found = [
        f"attempt {one.attempt}, rank {one.rank}, step {one.step}: loss {one.loss}, samples {one.samples}"
        for one in steps
        if (one.rank, one.step) not in expected
        or (one.loss, one.samples) != (expected[one.rank, one.step].loss, expected[one.rank, one.step].samples)
    ]
    missing = sorted(expected.keys() - {(one.rank, one.step) for one in steps})
    if missing:
        found.append(f"{len(missing)} steps were never done, the first of them, by rank and step, {missing[0]}")
    return found
