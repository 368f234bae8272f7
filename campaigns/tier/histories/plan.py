"""What happens in a history: its incarnations and their incidents, drawn from a seed before it begins."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from campaigns.common.job import STORES
from campaigns.tier.histories.moments import MOMENTS, PHASES, Moment

#: The letters of all hosts, and the most ranks of a job.
HOSTS, MOST_RANKS = "abcd", 4

LAYOUTS = ("plain", "ddp", "fsdp", "tp")

#: A number of saves of which none is drained.
NEVER = 10**6

#: What happens to an incarnation. After a stop, or if it goes on, it is alive while the next one runs.
KINDS = {
    "kill a rank": 4,
    "kill a host": 5,
    "kill all": 3,
    "stop a rank": 3,
    "stop a host": 2,
    "stop all": 3,
    "go on": 2,
    "end": 1,
}


@dataclass(frozen=True)
class TierOptions:
    """The options of the tier of one incarnation."""

    copies: int
    parity: int
    drain_every: int


@dataclass(frozen=True)
class Incident:
    """What happens, to which rank, and when.

    It happens when the victim reaches ``moment`` for the time number ``turn``; or, without one, ``seconds`` after the
    load has begun, or after it has ended if ``is_loaded``. ``is_patient``: the other ranks run until they fail; else they are killed
    soon. ``lost``: the hosts that are lost in addition. ``wakes_after``: the seconds of the next incarnation after which
    who was stopped goes on.
    """

    kind: str
    victim: int
    moment: Moment | None
    turn: int
    seconds: float
    is_loaded: bool
    is_patient: bool
    lost: str
    wakes_after: float

    @property
    def phase(self) -> str:
        """Where it happens."""
        if self.moment is not None:
            return self.moment.name
        return "at random" if self.is_loaded else "at random from the load on"


@dataclass(frozen=True)
class Incarnation:
    """One job of a history. ``hosts`` has a letter for the host of each rank."""

    number: int
    hosts: str
    layout: str
    options: TierOptions
    is_asynchronous: bool
    pause: float
    store: str
    incident: Incident

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.hosts)

    @property
    def survivable(self) -> int:
        """How many hosts may be lost once copies or parity are made."""
        distinct = set(self.hosts)
        if self.options.parity:
            is_even = len({self.hosts.count(host) for host in distinct}) == 1
            return int(is_even and len(distinct) > 1)
        return min(self.options.copies, len(distinct) - 1)


def draw_history(seed: int, length: int) -> list[Incarnation]:
    """Draw the incarnations of a history; the last one ends well."""
    draw = random.Random(seed)
    hosts = _draw_hosts(draw, HOSTS)
    incarnations: list[Incarnation] = []
    for number in range(length):
        incarnation = _draw_incarnation(draw, number, hosts, is_last=number == length - 1)
        incarnations.append(incarnation)
        hosts = _draw_next_hosts(draw, incarnation)
    return incarnations


def _draw_incarnation(draw: random.Random, number: int, hosts: str, *, is_last: bool) -> Incarnation:
    redundancy = draw.choice([(0, 0), (1, 0), (1, 0), (2, 0), (0, 2), (0, 3)])
    options = TierOptions(*redundancy, draw.choice([1, 2, 3, NEVER, NEVER]))
    layout = draw.choice(LAYOUTS)
    is_asynchronous, pause = draw.random() < 0.7, draw.choice([0.0, 0.005, 0.03])
    incident = _draw_incident(draw, number, hosts, options, is_last=is_last)
    return Incarnation(number, hosts, layout, options, is_asynchronous, pause, draw.choice(STORES), incident)


def _draw_incident(draw: random.Random, number: int, hosts: str, options: TierOptions, *, is_last: bool) -> Incident:
    kind = "end" if is_last else draw.choices(list(KINDS), list(KINDS.values()))[0]
    moment = _draw_moment(draw, number, hosts, options) if kind not in {"go on", "end"} and draw.random() < 0.7 else None
    if kind.startswith("stop") and moment is not None and not moment.is_ordered:
        moment = None
    victim = 0 if moment is not None and moment.point.rank_0_only else draw.randrange(len(hosts))
    lost = ""
    if kind == "kill all" and draw.random() < 0.6:
        distinct = sorted(set(hosts))
        lost = "".join(draw.sample(distinct, draw.choice([1, 1, min(2, len(distinct)), len(distinct)])))
    elif kind == "kill a host":
        lost = hosts[victim]
    return Incident(
        kind,
        victim,
        moment,
        turn=draw.choice([1, 1, 2, 3, 5]) if moment is not None and moment.phase in {"save", "drain"} else 1,
        seconds=draw.uniform(0.0, 0.6),
        is_loaded=draw.random() < 0.7,
        is_patient=draw.random() < 0.4,
        lost=lost,
        wakes_after=draw.uniform(0.0, 1.2),
    )


def _draw_moment(draw: random.Random, number: int, hosts: str, options: TierOptions) -> Moment:
    has = {""}
    if number:
        has.add("earlier")
    if options.drain_every != NEVER:
        has.add("drains")
    if (options.copies or options.parity) and len(set(hosts)) > 1:
        has |= {"redundancy", "parity"} if options.parity else {"redundancy"}
    moments = [moment for moment in MOMENTS if moment.needs in has]
    phase = draw.choice([phase for phase in PHASES if any(moment.phase == phase for moment in moments)])
    return draw.choice([moment for moment in moments if moment.phase == phase])


def _draw_hosts(draw: random.Random, among: Sequence[str]) -> str:
    """Draw the hosts of the ranks of a job, at most one host for each rank."""
    size = draw.choice([1, 2, 2, 3, 3, 4, 4])
    distinct = draw.sample(sorted(among), min(len(among), draw.randint(1, size)))
    return _spread(draw, distinct, size)


def _spread(draw: random.Random, distinct: Sequence[str], size: int) -> str:
    ranks = [*distinct, *(draw.choice(distinct) for _ in range(size - len(distinct)))]
    order = draw.sample(sorted(distinct), len(distinct))
    return "".join(sorted(ranks, key=order.index)) if draw.random() < 0.7 else "".join(draw.sample(ranks, size))


def _draw_next_hosts(draw: random.Random, before: Incarnation) -> str:
    """Draw the hosts of the next job: mostly those that are left, sometimes all, or others."""
    distinct = sorted(set(before.hosts))
    left = [host for host in distinct if host not in before.incident.lost] or distinct
    chosen = draw.choice([left, left, left, distinct, None])
    if chosen is None:
        return _draw_hosts(draw, HOSTS)
    more = [host for host in HOSTS if host not in chosen]
    if more and len(chosen) < MOST_RANKS and draw.random() < 0.3:
        chosen = [*chosen, draw.choice(more)]
    return _spread(draw, chosen, draw.randint(len(chosen), MOST_RANKS))
