"""The steps at which a ``Checkpointer`` saves: each multiple of a number, or a step after so much time.

Rank 0's clock counts, and all ranks must save at the same step. They meet for a decision only at some steps, every few
seconds: each decision says after how many further steps the next one is due. It is at half of the steps that the
remaining time seems to have, and at most :data:`_LOOK_SECONDS` and :data:`_MOST_STEPS` away, so that it is noticed if
the steps of a training begin to take longer. No thread watches the time, and other steps send nothing.

:class:`rankless.Checkpointer` asks it in :meth:`~rankless.Checkpointer.step`, :mod:`rankless.model_saves` for weights
alone: on all ranks, in the thread of the training. All ranks must use rank 0's number of steps to the next decision, or
some would wait for a vote that others do not hold.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Literal, Protocol, SupportsIndex

import msgspec

from rankless.errors import InvalidArgumentError, RanklessError
from rankless.observe.units import format_seconds
from rankless.ondisk.validation import check_integer
from rankless.run.journal import JournalEntry, read_journal

#: The seconds between two decisions, if steps take as long as before.
_LOOK_SECONDS = 5.0

#: The most steps between two decisions: from one step to the next, a training may become much slower.
_MOST_STEPS = 50

#: The seconds before the first save if the interval is computed: then its cost is known.
_FIRST_SECONDS = 120.0

#: The assumed rate of interruptions of a job that was not interrupted yet: once a day.
_ASSUMED_SECONDS_PER_FAILURE = 86400.0

#: The most of the time of a training that saves may take, if the interval is computed.
_MAX_OVERHEAD = 0.05

#: The longest interval that is computed, unless saves would take more than that part of the time: the journal may be
#: wrong, for example because of a clock.
_MOST_SECONDS = 4 * 3600.0

#: The most seconds between two entries of a journal that count as training.
_MOST_SECONDS_BETWEEN = 86400.0

#: The weight of the newest save in the average cost.
_NEWEST_WEIGHT = 0.3

#: A computed interval is logged again if it has changed by this factor.
_LOGGED_CHANGE = 1.5

_log = logging.getLogger("rankless")

#: Asks rank 0 for a decision, and gives it to all ranks: all of them call it.
Ask = Callable[[Callable[[], bytes]], bytes]


class Cadence(Protocol):
    """The interface of the objects that decide when to save. All ranks call each method at the same steps."""

    def is_due(self, step: int, ask: Ask) -> bool:
        """Return whether to save a step that was just completed."""

    def restart(self, seconds: float = 0.0) -> None:
        """Note that something was saved, which kept the training for ``seconds``, or that the training goes on."""


class EveryStep(msgspec.Struct, frozen=True):
    """Saves each step that is a multiple of a number; never if that is 0.

    For example, with 1000 it saves the steps 1000 and 2000.
    """

    number: int

    def is_due(self, step: int, ask: Ask) -> bool:
        """See :class:`Cadence`."""
        del ask
        return bool(self.number and step and step % self.number == 0)

    def restart(self, seconds: float = 0.0) -> None:
        """See :class:`Cadence`."""


class EveryInterval:
    """Saves at the step that is nearest to the end of an interval, which ``find_seconds`` returns on rank 0."""

    def __init__(self, find_seconds: Callable[[], float], clock: Callable[[], float] = time.monotonic) -> None:
        self._find_seconds, self._clock = find_seconds, clock
        #: The steps until the next decision, and those since the last one.
        self._until_decision, self._since_decision = 1, 0
        #: On rank 0, the times of the last save and of the last decision.
        self._saved_at = self._decided_at = clock()

    def is_due(self, step: int, ask: Ask) -> bool:
        """See :class:`Cadence`."""
        del step
        self._since_decision += 1
        if self._since_decision < self._until_decision:
            return False
        decision = msgspec.msgpack.decode(ask(lambda: msgspec.msgpack.encode(self._decide())), type=int)
        self._until_decision, self._since_decision = max(decision, 1), 0
        return decision == 0

    def _decide(self) -> int:
        """Return after how many steps the next decision is due; 0 to save now. Called on rank 0."""
        now = self._clock()
        seconds_per_step = max(now - self._decided_at, 1e-9) / self._since_decision
        self._decided_at = now
        remaining = self._saved_at + self._find_seconds() - now
        if remaining < seconds_per_step / 2:
            return 0
        steps = min(remaining / 2, _LOOK_SECONDS) / seconds_per_step
        steps = min(steps, _MOST_STEPS)
        # The first steps of a training take longer than others, or shorter: its data is read ahead.
        return max(1, min(int(steps), 2 * self._since_decision))

    def restart(self, seconds: float = 0.0) -> None:
        """See :class:`Cadence`."""
        del seconds
        self._saved_at = self._decided_at = self._clock()
        self._until_decision, self._since_decision = 1, 0


class CostOfSaves:
    """The interval between saves that costs a training least time, from the cost of its saves and how often it stops.

    The formula is by Young and Daly: the square root of twice the cost of a save times the seconds between two
    failures. Frequent saves cost time; after rare saves more steps have to be computed again. Saves take at most 5 % of
    the time. For example, a save that costs 2 seconds, with a failure every 10,000 seconds, is due every 200 seconds.
    """

    def __init__(self, run: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._began, self._cost = clock(), 0.0
        self._before: tuple[float, int] | None = None
        #: The interval that was logged last, in seconds.
        self._logged = 0.0

    def find_seconds(self) -> float:
        """Return the interval, on rank 0."""
        if not self._cost:
            return _FIRST_SECONDS
        seconds = best_interval(self._cost, self._seconds_per_failure())
        if not self._logged / _LOGGED_CHANGE < seconds < self._logged * _LOGGED_CHANGE:
            self._logged = seconds
            _log.info(
                "saves a checkpoint every %s: a save costs %s", format_seconds(seconds), format_seconds(self._cost)
            )
        return seconds

    def note(self, seconds: float) -> None:
        """Note for how long a save kept the training; 0 if there was none."""
        if seconds:
            self._cost += (_NEWEST_WEIGHT if self._cost else 1.0) * (seconds - self._cost)

    def _seconds_per_failure(self) -> float:
        if self._before is None:
            self._before = (0.0, 0)
            with suppress(RanklessError):  # the journal is for information: the assumption does well
                self._before = count_failures(read_journal(self._run))
        seconds, failures = self._before
        return (_ASSUMED_SECONDS_PER_FAILURE + seconds + self._clock() - self._began) / (1 + failures)


def best_interval(cost: float, seconds_per_failure: float) -> float:
    """Return the seconds between two saves that cost a training least time, if a save costs ``cost`` seconds.

    For example, 200 seconds if a save costs 2 seconds and a failure comes every 10,000 seconds.
    """
    return max(min(math.sqrt(2 * cost * seconds_per_failure), _MOST_SECONDS), cost / _MAX_OVERHEAD)


def count_failures(entries: Sequence[JournalEntry]) -> tuple[float, int]:
    """Return for how many seconds a run was trained, as far as its journal shows, and how often it was resumed.

    The time between the last save of a job and the next resume is not counted: the job may have waited in a queue.
    """
    seconds, failures, before = 0.0, 0, None
    for entry in sorted(entries, key=lambda entry: entry.time):
        if entry.kind == "resumed":
            failures += 1
        elif entry.kind == "saved" and before is not None:
            seconds += min(entry.time - before, _MOST_SECONDS_BETWEEN)
        if entry.kind in {"saved", "resumed"}:
            before = entry.time
    return seconds, failures


class ByCost(EveryInterval):
    """Saves at intervals that are computed: see :class:`CostOfSaves`."""

    def __init__(self, costs: CostOfSaves, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(costs.find_seconds, clock)
        self._costs = costs

    def restart(self, seconds: float = 0.0) -> None:
        """See :class:`Cadence`."""
        super().restart(seconds)
        self._costs.note(seconds)


def as_cadence(save_every: int | timedelta | Literal["auto"] | None, run: Path) -> Cadence:
    """Return the object that decides when to save, for the argument ``save_every``. Raises ``InvalidArgumentError``."""
    if save_every is None:
        return EveryStep(0)
    if isinstance(save_every, timedelta):
        seconds = save_every.total_seconds()
        if seconds <= 0:
            raise InvalidArgumentError(f"save_every must be a time above 0; got {save_every!r}")
        return EveryInterval(lambda: seconds)
    if save_every == "auto":
        return ByCost(CostOfSaves(run))
    if not isinstance(save_every, SupportsIndex):
        raise InvalidArgumentError(
            f"save_every must be a number of steps, a datetime.timedelta or 'auto'; got {save_every!r:.40}"
        )
    return EveryStep(check_integer("save_every", save_every, smallest=1))
