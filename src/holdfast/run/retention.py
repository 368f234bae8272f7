"""Which checkpoints of a run are kept: small policies, put together with ``|`` (kept by either)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.errors import InvalidArgumentError
from holdfast.run.scan import CheckpointInfo

_DAY = 86_400.0


class Retention:
    """Decides which checkpoints are kept. The newest one always is."""

    def kept(self, checkpoints: Sequence[CheckpointInfo], now: float) -> set[str]:
        """The ids of those kept, of checkpoints from the oldest to the newest. ``now``: seconds since 1970."""
        raise NotImplementedError

    def check(self, step: float | None, metrics: Mapping[str, float]) -> None:
        """Raise ``InvalidArgumentError`` where a save lacks a number that the policy needs."""

    def __or__(self, other: Retention) -> Retention:
        """Keep what either keeps."""
        return AnyOf(self, other)


@dataclass(frozen=True)
class AnyOf(Retention):
    """What one of two policies keeps."""

    first: Retention
    second: Retention

    def kept(self, checkpoints: Sequence[CheckpointInfo], now: float) -> set[str]:
        """See :class:`Retention`."""
        return self.first.kept(checkpoints, now) | self.second.kept(checkpoints, now)

    def check(self, step: float | None, metrics: Mapping[str, float]) -> None:
        """See :class:`Retention`."""
        self.first.check(step, metrics)
        self.second.check(step, metrics)


@dataclass(frozen=True)
class KeepLast(Retention):
    """The newest ``number``."""

    number: int

    def __post_init__(self) -> None:
        _check_count("KeepLast", self.number)

    def kept(self, checkpoints: Sequence[CheckpointInfo], now: float) -> set[str]:
        """See :class:`Retention`."""
        del now
        return {one.id for one in checkpoints[-self.number :]}


@dataclass(frozen=True)
class KeepEvery(Retention):
    """Those whose step is a multiple of ``steps``; of fractions, such as 0.1, up to rounding."""

    steps: float

    def __post_init__(self) -> None:
        _positive("KeepEvery", self.steps)

    def kept(self, checkpoints: Sequence[CheckpointInfo], now: float) -> set[str]:
        """See :class:`Retention`."""
        del now
        return {info.id for info in checkpoints if info.step is not None and _is_multiple(info.step, self.steps)}

    def check(self, step: float | None, metrics: Mapping[str, float]) -> None:
        """See :class:`Retention`."""
        del metrics
        if step is None:
            raise InvalidArgumentError("KeepEvery needs the step of every checkpoint: pass step=")


@dataclass(frozen=True)
class KeepBest(Retention):
    """The ``number`` best by a metric; where several are equal, the newer ones. Those without it are not among them."""

    metric: str
    number: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        _check_count("KeepBest", self.number)
        if self.mode not in {"min", "max"}:
            raise InvalidArgumentError(f"mode is 'min' or 'max', not {self.mode!r}")

    def kept(self, checkpoints: Sequence[CheckpointInfo], now: float) -> set[str]:
        """See :class:`Retention`."""
        del now
        sign = 1 if self.mode == "min" else -1
        measured = [
            (sign * value, -place, one.id)
            for place, one in enumerate(checkpoints)
            if (value := one.metrics.get(self.metric)) is not None and math.isfinite(value)
        ]
        return {identity for _, _, identity in sorted(measured)[: self.number]}

    def check(self, step: float | None, metrics: Mapping[str, float]) -> None:
        """See :class:`Retention`."""
        del step
        if self.metric not in metrics:
            raise InvalidArgumentError(f"KeepBest needs {self.metric!r} of every checkpoint: pass metrics=")


@dataclass(frozen=True)
class KeepNewerThan(Retention):
    """Those not older than so many days and hours, by the clock of the rank that saved them."""

    days: float = 0.0
    hours: float = 0.0

    def __post_init__(self) -> None:
        _positive("KeepNewerThan", self.days + self.hours)

    def kept(self, checkpoints: Sequence[CheckpointInfo], now: float) -> set[str]:
        """See :class:`Retention`."""
        oldest = now - _DAY * (self.days + self.hours / 24)
        return {one.id for one in checkpoints if one.time >= oldest}


class KeepTags(Retention):
    """Those with certain tags."""

    def __init__(self, *tags: str) -> None:
        if not tags or not all(isinstance(tag, str) for tag in tags):
            raise InvalidArgumentError("KeepTags takes the tags to keep")
        self.tags = frozenset(tags)

    def kept(self, checkpoints: Sequence[CheckpointInfo], now: float) -> set[str]:
        """See :class:`Retention`."""
        del now
        return {one.id for one in checkpoints if one.tag in self.tags}

    def __repr__(self) -> str:
        return f"KeepTags({', '.join(map(repr, sorted(self.tags)))})"


def as_policy(num_kept_ckpts: object, keep: object) -> Retention | None:
    """What the arguments of a save say: a number of checkpoints, or a policy; nothing where all are kept."""
    if num_kept_ckpts is not None and keep is not None:
        raise InvalidArgumentError("pass num_kept_ckpts or keep, not both")
    given = num_kept_ckpts if keep is None else keep
    if given is None or isinstance(given, Retention):
        return given
    if isinstance(given, int) and not isinstance(given, bool):
        return KeepLast(given)
    raise InvalidArgumentError(f"what is kept is a number or a policy such as KeepLast(5), not {given!r}")


def _is_multiple(step: float, of: float) -> bool:
    """Whether a step is a multiple, as people mean it: 0.3 is one of 0.1, though its remainder is not 0."""
    if isinstance(step, int) and isinstance(of, int):
        return step % of == 0
    quotient = step / of
    if not math.isfinite(quotient):
        return False
    # Sums of many small steps are off by some parts in 10**10; and no tolerance may reach the next multiple.
    return abs(round(quotient) * of - step) <= min(1e-9 * abs(step), 1e-3 * of)


def _check_count(what: str, number: object) -> None:
    _positive(what, number)
    if not isinstance(number, int):
        raise InvalidArgumentError(f"{what} takes a whole number above 0, not {number!r}")


def _positive(what: str, number: object) -> None:
    if isinstance(number, bool) or not isinstance(number, int | float) or not number > 0:
        raise InvalidArgumentError(f"{what} takes a number above 0, not {number!r}: one checkpoint is always kept")
