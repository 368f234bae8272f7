"""Timing in rounds of all contenders, so that noise of the machine affects all of them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

#: The pause, in seconds, before each run, because disks are faster for a moment after a rest.
REST = 1.0


@dataclass(frozen=True)
class SelfTimed:
    """The result of a run that timed itself, because only a part counts or another process ran it."""

    seconds: float


@dataclass(frozen=True)
class Contender:
    """A function to time, which may return its own :class:`SelfTimed`; ``prepare`` runs before it, untimed."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Figure:
    """The measurements of all rounds."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """Half the interquartile range, relative to the median; 0 for fewer than three rounds."""
        if len(self.rounds) < 3 or not self.median:  # noqa: PLR2004 - quartiles of two are no spread
            return 0.0
        first, _, third = statistics.quantiles(self.rounds, n=4)
        return (third - first) / 2 / self.median


@dataclass(frozen=True)
class Table:
    """One case: a figure of each contender. ``limits`` are contenders that no program can beat on this machine."""

    title: str
    unit: str
    figures: Mapping[str, Figure]
    limits: tuple[str, ...] = ()
    note: str = ""


@dataclass
class Clock:
    """The wall and CPU seconds of each contender in each round."""

    wall: dict[str, list[float]]
    processor: dict[str, list[float]]

    @classmethod
    def start(cls, contenders: Mapping[str, Contender]) -> Self:
        """Return a clock without measurements."""
        return cls({name: [] for name in contenders}, {name: [] for name in contenders})

    def time_contender(self, name: str, contender: Contender) -> None:
        """Run a contender once."""
        contender.prepare()
        time.sleep(REST)
        started, worked = time.perf_counter(), time.process_time()
        result = contender.run()
        taken = time.perf_counter() - started
        self.wall[name].append(result.seconds if isinstance(result, SelfTimed) else taken)
        self.processor[name].append(time.process_time() - worked)

    def build_table(self, title: str, limits: tuple[str, ...] = (), note: str = "") -> Table:
        """Return the wall seconds of each contender, in the given order."""
        return Table(title, "s", _build_figures(self.wall), limits, note)

    def build_processor_table(self, title: str, gigabytes: float) -> Table:
        """Return the CPU seconds for each gigabyte."""
        per_gigabyte = {name: [seconds / gigabytes for seconds in rounds] for name, rounds in self.processor.items()}
        return Table(title, "CPU s/GB", _build_figures(per_gigabyte))


def measure_seconds(work: Callable[[], object], rounds: int = 5) -> float:
    """Return the median time of a short function."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def time_interleaved(contenders: Mapping[str, Contender], rounds: int) -> Clock:
    """Time each contender once a round, in random order, because a disk is affected by the previous writer.

    A first round, with imports and allocations of the first use, does not count.
    """
    order = random.Random(0)
    rehearsal, clock = Clock.start(contenders), Clock.start(contenders)
    for number in range(rounds + 1):
        for name in order.sample(list(contenders), len(contenders)):
            (clock if number else rehearsal).time_contender(name, contenders[name])
    return clock


def _build_figures(rounds: Mapping[str, list[float]]) -> dict[str, Figure]:
    return {name: Figure(tuple(seconds)) for name, seconds in rounds.items()}
