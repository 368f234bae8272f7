"""What happens in a history: its incarnations and their incidents, drawn from a seed before it begins."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    load has begun, or after it has ended if ``is_loaded``. ``is_patient``: the other ranks run until they fail; else
    they are killed soon. ``lost``: the hosts that are lost in addition. ``wakes_after``: the seconds of the next
    incarnation after which who was stopped goes on.
    """

    kind: str
    victim: int = 0
    moment: Moment | None = None
    turn: int = 1
    seconds: float = 0.0
    is_loaded: bool = True
    is_patient: bool = True
    lost: str = ""
    wakes_after: float = 0.0

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

    def __str__(self) -> str:
        options, incident = self.options, self.incident
        mode = "asynchronous" if self.is_asynchronous else "synchronous"
        loses = f", loses {incident.lost}" if incident.lost else ""
        return (
            f"{self.number}: {self.layout} on hosts {self.hosts}, {mode}, {options.copies} copies, parity "
            f"{options.parity}, drains 1 of {options.drain_every}: {incident.kind}, rank {incident.victim}, "
            f"{incident.phase}, turn {incident.turn}{loses}"
        )

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


def draw_history(seed: int, length: int, only: str = "") -> list[Incarnation]:
    """Draw the incarnations of a history; the last one ends well.

    ``only``: incidents happen at moments whose names contain this text, if the incarnation can reach one.
    """
    draw = random.Random(seed)
    hosts = _draw_hosts(draw, HOSTS)
    incarnations: list[Incarnation] = []
    for number in range(length):
        job = _draw_job(draw, number, hosts)
        incarnation = replace(job, incident=_draw_incident(draw, job, only, is_last=number == length - 1))
        incarnations.append(incarnation)
        hosts = _draw_next_hosts(draw, incarnation)
    return incarnations


def _draw_job(draw: random.Random, number: int, hosts: str) -> Incarnation:
    """Draw an incarnation that ends well."""
    redundancy = draw.choice([(0, 0), (1, 0), (1, 0), (2, 0), (0, 2), (0, 3)])
    options = TierOptions(*redundancy, draw.choice([1, 2, 3, NEVER, NEVER]))
    layout = draw.choice(LAYOUTS)
    is_asynchronous, pause = draw.random() < 0.7, draw.choice([0.0, 0.005, 0.03])
    return Incarnation(number, hosts, layout, options, is_asynchronous, pause, draw.choice(STORES), Incident("end"))


def _draw_incident(draw: random.Random, job: Incarnation, only: str, *, is_last: bool) -> Incident:
    if is_last:
        return job.incident
    hosts = job.hosts
    kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
    has_moment = kind not in {"go on", "end"} and (draw.random() < 0.7 or bool(only))
    moment = _draw_moment(draw, job, only) if has_moment else None
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


def _draw_moment(draw: random.Random, job: Incarnation, only: str) -> Moment | None:
    has = {""}
    if job.number:
        has.add("earlier")
    if job.options.drain_every != NEVER:
        has.add("drains")
    if (job.options.copies or job.options.parity) and len(set(job.hosts)) > 1:
        has |= {"redundancy", "parity"} if job.options.parity else {"redundancy"}
    moments = [moment for moment in MOMENTS if moment.needs in has and only in moment.name]
    phases = [phase for phase in PHASES if any(moment.phase == phase for moment in moments)]
    if not phases:
        return None
    phase = draw.choice(phases)
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
