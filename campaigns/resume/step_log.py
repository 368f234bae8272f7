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
    return sorted(_parse_logs(run), key=lambda entry: (entry.attempt, entry.step, entry.rank))


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
    for entry in steps:
        begins[entry.attempt] = min(entry.step, begins.get(entry.attempt, entry.step))
    kept = []
    for entry in steps:
        undone = any(attempt > entry.attempt and begin <= entry.step for attempt, begin in begins.items())
        kept += [] if undone else [entry]
    return sorted(kept, key=lambda entry: (entry.step, entry.rank))


def find_sample_problems(steps: Sequence[Step], samples: int, epochs: int) -> list[str]:
    """Report epochs in which a sample was not seen exactly once.

    Batches at the end belong to the next epoch.
    """
    stream = [sample for entry in select_lasting_steps(steps) for sample in entry.samples]
    problems = []
    for epoch in range(epochs):
        seen = stream[epoch * samples : (epoch + 1) * samples]
        if sorted(seen) != list(range(samples)):
            twice = sorted({sample for sample in seen if seen.count(sample) > 1})
            never = sorted(set(range(samples)).difference(seen))
            problems.append(f"epoch {epoch}: seen more than once: {twice}, never: {never}")
    return problems


def find_loss_problems(steps: Sequence[Step], undisturbed: Sequence[Step]) -> list[str]:
    """Report steps, repeated ones too, whose loss is not that of an undisturbed run, bit for bit."""
    expected = {(entry.rank, entry.step): entry for entry in undisturbed}
    problems = [
        f"attempt {entry.attempt}, rank {entry.rank}, step {entry.step}: loss {entry.loss}, samples {entry.samples}"
        for entry in steps
        if (entry.rank, entry.step) not in expected
        or (entry.loss, entry.samples)
        != (expected[entry.rank, entry.step].loss, expected[entry.rank, entry.step].samples)
    ]
    missing = sorted(expected.keys() - {(entry.rank, entry.step) for entry in steps})
    if missing:
        problems.append(f"{len(missing)} steps were never done, the first of them, by rank and step, {missing[0]}")
    return problems
