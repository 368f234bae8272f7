"""Timing: every contender in turn, several rounds, so that a noisy machine is noisy for all of them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

#: Seconds before each run, for disks that give more for a moment after a rest.
REST = 1.0


@dataclass(frozen=True)
class Timing:
    """Seconds of each round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """Half the range between the quartiles, as a part of the median."""
        first, _, third = statistics.quantiles(self.rounds, n=4)
        return (third - first) / 2 / self.median


@dataclass(frozen=True)
class Contender:
    """Something to time; ``prepare`` runs before it, outside of the clock."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


def interleaved(contenders: Mapping[str, Contender], rounds: int) -> dict[str, Timing]:
    """Time each contender once a round, in a drawn order: a disk remembers who wrote before."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(contenders), len(contenders)):
            contenders[name].prepare()
            time.sleep(REST)
            started = time.perf_counter()
            contenders[name].run()
            seconds[name].append(time.perf_counter() - started)
    return {name: Timing(tuple(found)) for name, found in seconds.items()}
