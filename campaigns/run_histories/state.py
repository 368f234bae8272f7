"""The state of a history: its run directories and tiers, its jobs, and what they have saved."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from campaigns.run_histories.hosts import Hosts
from campaigns.run_histories.jobs import Job
from campaigns.run_histories.oracle import Content, World
from campaigns.run_histories.places import Found, Place, find_checkpoints


class ViolationError(Exception):
    """A promise is broken."""


@dataclass
class Tier:
    """The local tier of a host. ``acked`` is the newest checkpoint that a save has completed there."""

    path: Path
    acked: Content = ()


@dataclass
class Site:
    """A run directory, and what the oracle knows of it.

    ``worlds`` is ``None`` after two copies were merged: then the next load decides. ``is_removed``: the tiers may not
    know the run directory that is there now.
    """

    place: Place
    worlds: set[World] | None
    known: list[Found] = field(default_factory=list)
    tiers: dict[str, Tier] = field(default_factory=dict)
    is_removed: bool = False
    #: Then the numbers of different runs do not follow each other: a save into a tier does not wait for storage.
    had_tiers: bool = False
    #: It is a copy without history, or a copy of one.
    lacks_history: bool = False
    #: Jobs of both copies may have had the same number, so a checkpoint of the one can count as one of the other.
    is_merged: bool = False
    #: The runs that a tier may have gone on with in one of the copies: the next load of each decides.
    unsure_runs: frozenset[int] = frozenset()
    #: The contents that jobs have named last to go on from, by their runs, as far as that is certain.
    went_back: dict[int, Content] = field(default_factory=dict)

    @property
    def contents(self) -> set[Content]:
        """The contents of the checkpoints that were there at the last look."""
        return {found.content for found in self.known}


@dataclass
class Counts:
    """What has happened in some histories."""

    pairs: dict[tuple[str, str], int] = field(default_factory=dict)
    resumes: int = 0
    resumed: int = 0
    errors: dict[str, int] = field(default_factory=dict)

    def add(self, more: Counts) -> None:
        """Add what has happened in other histories."""
        for pair, count in more.pairs.items():
            self.pairs[pair] = self.pairs.get(pair, 0) + count
        for name, count in more.errors.items():
            self.errors[name] = self.errors.get(name, 0) + count
        self.resumes += more.resumes
        self.resumed += more.resumed


@dataclass
class State:
    """What a history has made so far. ``run_of`` are the runs of all contents that any job has begun to save.

    ``stopped`` are the jobs that wait to be woken, and ``pins`` the processes that pin a checkpoint. ``log`` says what
    was done.
    """

    counts: Counts
    hosts: Hosts
    sites: list[Site] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    stopped: list[Job] = field(default_factory=list)
    pins: list[tuple[Job, Content]] = field(default_factory=list)
    run_of: dict[Content, int] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def look(self, site: Site, removable: Collection[Content]) -> None:
        """Look at the checkpoints that are there: all others than these must still be."""
        found = find_checkpoints(site.place)
        missing = site.contents - {one.content for one in found} - set(removable)
        site.known = found
        if missing:
            raise ViolationError(f"{site.place.name} has lost {sorted(missing)}")

    def must(self, site: Site, host: str) -> set[Content]:
        """Return the checkpoints that a load with the tier of a host sees for certain."""
        tier = site.tiers.get(host)
        acked = {tier.acked} if tier is not None and tier.acked else set()
        return {found.content for found in find_checkpoints(site.place)} | acked

    def read_files(self, site: Site) -> dict[str, bytes]:
        """Return the contents of all files of a run directory and its tiers."""
        self.hosts.flush()
        tiers = {
            str(tier.path / name): data
            for host, tier in site.tiers.items()
            for name, data in self.hosts.read_files(host, tier.path).items()
        }
        return {**site.place.read_files(), **tiers}

    def pinned(self, site: Site) -> set[Content]:
        """Return the checkpoints of a run directory that are pinned."""
        return {content for job, content in self.pins if job.place.name == site.place.name}

    def challenge(self, site: Site, job: Job, run: int, *, certain: bool) -> None:
        """Note that a job has claimed a run, or, if that is not ``certain``, perhaps: others are superseded by that."""
        for other in [*self.jobs, *self.stopped]:
            if other is job or other.place.name != site.place.name:
                continue
            if run and other.run == run and certain:
                other.is_challenged = True
            elif other.run == run or other.tier is not None or not other.run:
                other.is_doubtful = True

    def site_of(self, job: Job) -> Site:
        """Return the run directory of a job."""
        return next(site for site in self.sites if site.place.name == job.place.name)

    def note(self, line: str) -> None:
        """Add a line to the log."""
        self.log.append(line)
