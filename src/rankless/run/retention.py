"""Retention policies: rules that select the checkpoints of a run to keep, combined with ``|``.

A save checks a policy on each rank in its first vote, and rank 0 applies it after the commit
(:func:`rankless.run.cleanup.expired_checkpoints`). All ranks must pass equal policies, which are compared by their
``repr``. For example, ``KeepLast(2) | KeepEvery(1000)`` keeps the two newest checkpoints, and step 1000, 2000 and so
on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rankless.errors import InvalidArgumentError
from rankless.run.checkpoint_info import CheckpointInfo

_DAY_SECONDS = 86_400.0


class Retention:
    """A policy that selects the checkpoints to keep. The newest one is always kept."""

    def select_kept(self, checkpoints: Sequence[CheckpointInfo], now: float) -> set[str]:
        """Return the ids of the checkpoints to keep.

        ``checkpoints`` are sorted from the oldest to the newest. ``now`` is the time in seconds since 1970.
        """
        raise NotImplementedError

    def select_by_merit(self, checkpoints: Sequence[CheckpointInfo]) -> set[str]:
        """Return the ids of the checkpoints that are kept however many newer ones follow, and at any later time.

        A policy keeps them for their step, metric or tag. The newer ones have no metrics yet.
        """
        return self.select_kept(checkpoints, math.inf)

    def check_requirements(self, step: float | None, metrics: Mapping[str, float]) -> None:
        """Raise ``InvalidArgumentError`` if a save lacks a step or metric that the policy needs."""

    def __repr__(self) -> str:
        """Return the class and its attributes: ranks compare their policies by this text.

        For example, ``KeepLast(number=2)``.
        """
        settings = (f"{name}={value!r}" for name, value in sorted(vars(self).items()))
        return f"{type(self).__qualname__}({', '.join(settings)})"

    def __or__(self, other: Retention) -> Retention:
        """Return a policy that keeps the checkpoints that either policy keeps."""
        return AnyOf(self, other)


@dataclass(frozen=True)
class AnyOf(Retention):
    """Keeps the checkpoints that at least one of two policies keeps."""

    first: Retention
    second: Retention

    def select_kept(self, checkpoints: Sequence[CheckpointInfo], now: float) -> set[str]:
        """See :class:`Retention`."""
        return self.first.select_kept(checkpoints, now) | self.second.select_kept(checkpoints, now)

    def select_by_merit(self, checkpoints: Sequence[CheckpointInfo]) -> set[str]:
        """See :class:`Retention`."""
        return self.first.select_by_merit(checkpoints) | self.second.select_by_merit(checkpoints)

    def check_requirements(self, step: float | None, metrics: Mapping[str, float]) -> None:
        """See :class:`Retention`."""
        self.first.check_requirements(step, metrics)
        self.second.check_requirements(step, metrics)


@dataclass(frozen=True)
class KeepLast(Retention):
    """Keeps the newest ``number`` checkpoints. Abandoned ones are older than all others.

    For example, with ``KeepLast(2)`` a save of ``step_30`` removes ``step_10``, and keeps ``step_20``.
    """

    number: int

    def __post_init__(self) -> None:
        _check_count("KeepLast", self.number)

    def select_kept(self, checkpoints: Sequence[CheckpointInfo], now: float) -> set[str]:
        """See :class:`Retention`."""
        del now
        return {info.id for info in checkpoints[-self.number :]}

    def select_by_merit(self, checkpoints: Sequence[CheckpointInfo]) -> set[str]:
        """See :class:`Retention`. No checkpoint stays among the newest for ever."""
        del checkpoints
        return set()


@dataclass(frozen=True)
class KeepEvery(Retention):
    """Keeps checkpoints if their step is a multiple of ``steps``. For fractions rounding errors are ignored.

    For example, ``KeepEvery(1000)`` keeps the steps 1000 and 2000, and not 1500.
    """

    steps: float

    def __post_init__(self) -> None:
        _check_positive("KeepEvery", self.steps)

    def select_kept(self, checkpoints: Sequence[CheckpointInfo], now: float) -> set[str]:
        """See :class:`Retention`."""
        del now
        return {info.id for info in checkpoints if info.step is not None and _is_multiple(info.step, self.steps)}

    def check_requirements(self, step: float | None, metrics: Mapping[str, float]) -> None:
        """See :class:`Retention`."""
        del metrics
        if step is None:
            raise InvalidArgumentError("KeepEvery needs the step of every checkpoint: pass step=")


@dataclass(frozen=True)
class KeepBest(Retention):
    """Keeps the ``number`` best checkpoints by a metric, and of equal ones the newer.

    ``mode`` says whether lower (``"min"``) or higher (``"max"``) values are better. Checkpoints without the metric, and
    abandoned ones, are not kept by this policy. For example, ``KeepBest("loss", 3)`` keeps the three checkpoints with
    the lowest loss.

    By default each save must have the metric. With ``required=False`` it need not: then an evaluator can add the metric
    later, with :func:`rankless.add_metrics`.
    """

    metric: str
    number: int = 1
    mode: Literal["min", "max"] = "min"
    required: bool = True

    def __post_init__(self) -> None:
        _check_count("KeepBest", self.number)
        if self.mode not in {"min", "max"}:
            raise InvalidArgumentError(f"mode must be 'min' or 'max'; got {self.mode!r}")

    def select_kept(self, checkpoints: Sequence[CheckpointInfo], now: float) -> set[str]:
        """See :class:`Retention`."""
        del now
        return {info.id for info in sort_by_metric(checkpoints, self.metric, self.mode)[: self.number]}

    def check_requirements(self, step: float | None, metrics: Mapping[str, float]) -> None:
        """See :class:`Retention`."""
        del step
        if self.required and self.metric not in metrics:
            raise InvalidArgumentError(
                f"KeepBest needs {self.metric!r} of every checkpoint: pass metrics=, or "
                "KeepBest(..., required=False) if an evaluator adds it later"
            )


@dataclass(frozen=True)
class KeepNewerThan(Retention):
    """Keeps checkpoints that are not older than so many days and hours, by the clock of the rank that saved them."""

    days: float = 0.0
    hours: float = 0.0

    def __post_init__(self) -> None:
        _check_positive("KeepNewerThan", self.days + self.hours)

    def select_kept(self, checkpoints: Sequence[CheckpointInfo], now: float) -> set[str]:
        """See :class:`Retention`."""
        oldest = now - _DAY_SECONDS * (self.days + self.hours / 24)
        return {info.id for info in checkpoints if info.time >= oldest}


def sort_by_metric(checkpoints: Sequence[CheckpointInfo], metric: str, mode: str) -> list[CheckpointInfo]:
    """Return the checkpoints that have a finite value of a metric, the best one first, of equal ones the newest.

    Checkpoints that the run has abandoned, and corrupt ones, are left out. ``checkpoints`` are sorted from the oldest
    to the newest. ``mode`` is ``"min"`` or ``"max"``. Policies, tags and lists have the same order from here.
    """
    sign = 1 if mode == "min" else -1
    measured = [
        (sign * value, -position, info)
        for position, info in enumerate(checkpoints)
        if info.status == "complete" and info.is_current
        if (value := info.metrics.get(metric)) is not None and math.isfinite(value)
    ]
    return [info for *_, info in sorted(measured, key=lambda entry: entry[:2])]


class KeepTags(Retention):
    """Keeps the checkpoints with the given tags."""

    def __init__(self, *tags: str) -> None:
        if not tags or not all(isinstance(tag, str) for tag in tags):
            raise InvalidArgumentError("KeepTags needs the tags to keep, as one or more strings")
        self.tags = frozenset(tags)

    def select_kept(self, checkpoints: Sequence[CheckpointInfo], now: float) -> set[str]:
        """See :class:`Retention`."""
        del now
        return {info.id for info in checkpoints if info.tag in self.tags}

    def __repr__(self) -> str:
        return f"KeepTags({', '.join(map(repr, sorted(self.tags)))})"


def as_policy(keep: object) -> Retention | None:
    """Return the policy for the argument ``keep``, or ``None`` if all checkpoints are kept.

    Raises ``InvalidArgumentError`` if it is neither a number nor a policy.
    """
    if keep is None or isinstance(keep, Retention):
        return keep
    if isinstance(keep, int) and not isinstance(keep, bool):
        return KeepLast(keep)
    raise InvalidArgumentError(f"keep must be a number or a policy such as KeepLast(5); got {keep!r}")


def _is_multiple(step: float, steps: float) -> bool:
    """Return whether ``step`` is a multiple of ``steps`` up to rounding: 0.3 is a multiple of 0.1."""
    if isinstance(step, int) and isinstance(steps, int):
        return step % steps == 0
    quotient = step / steps
    if not math.isfinite(quotient):
        return False
    # Sums of many small steps are off by some parts in 10**10. The tolerance must not reach the next multiple.
    return abs(round(quotient) * steps - step) <= min(1e-9 * abs(step), 1e-3 * steps)


def _check_count(policy: str, number: object) -> None:
    _check_positive(policy, number)
    if not isinstance(number, int):
        raise InvalidArgumentError(f"{policy} takes a whole number above 0, not {number!r}")


def _check_positive(policy: str, number: object) -> None:
    if isinstance(number, bool) or not isinstance(number, int | float) or not number > 0:
        raise InvalidArgumentError(f"{policy} takes a number above 0, not {number!r}: one checkpoint is always kept")
