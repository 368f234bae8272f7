"""One random history of a run: jobs, readers, copies and faults, each followed by what the oracle checks."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from campaigns.run_histories.jobs import HangError, Job
from campaigns.run_histories.oracle import (
    Content,
    Head,
    World,
    claimed,
    latest_of,
    owner_of,
    saved,
    saved_in_place,
    worlds_that_load,
)
from campaigns.run_histories.places import BucketPlace, Found, Place, find_checkpoints
from campaigns.run_histories.trainer import NEVER, Reply, Trap

#: The most jobs that live at a time, run directories, and pins.
_MOST_JOBS, _MOST_SITES, _MOST_PINS = 5, 3, 2

#: The calls of a command among which a trap is drawn: most commands have fewer.
_CALLS = 80

#: The starts of a crash loop, and of a long one.
_STARTS, _MANY_STARTS = 4, 100

#: The errors of a job that another one has replaced.
_SUPERSEDED = frozenset({"SupersededError", "StateError", "TagExistsError"})


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


class History:
    """A history. ``run`` makes it, and raises ``ViolationError``; ``log`` says what was done."""

    def __init__(self, make: Callable[[str], Place], base: Path, seed: int, counts: Counts) -> None:
        self.random = random.Random(seed)
        self.log: list[str] = []
        self._make, self._base, self._counts = make, base, counts
        self._names = self._steps = self._numbers = 0
        self._sites = [Site(make(self._next_name()), {()})]
        self._jobs: list[Job] = []
        self._stopped: list[Job] = []
        self._pins: list[tuple[Job, Content]] = []
        self._run_of: dict[Content, int] = {}
        self._last_start: tuple[Site, str, str | None, Content] | None = None

    def run(self, length: int) -> None:
        """Do so many random events, and then what must succeed after the last fault."""
        before = ""
        try:
            for _ in range(length):
                event = self.random.choice(self._list_applicable())
                self._counts.pairs[before, event] = self._counts.pairs.get((before, event), 0) + 1
                self.log.append(f"-- {event}")
                _EVENTS[event](self)
                if any(site.worlds is not None and not site.worlds for site in self._sites):
                    raise ViolationError("the oracle knows no world in which this may happen")
                before = event
            self._check_progress()
        except HangError as error:
            raise ViolationError(str(error)) from error
        finally:
            for job in [*self._jobs, *self._stopped, *(job for job, _ in self._pins)]:
                job.kill()
            for site in self._sites:
                site.place.remove()

    # ----------------------------------------------------------------------------------------------------------------
    # What can happen

    def _list_applicable(self) -> list[str]:
        has_known = any(site.known for site in self._sites)
        conditions = {
            _NEED_JOB: bool(self._idle()),
            _START_JOB: len(self._jobs) + len(self._stopped) < _MOST_JOBS,
            _NEED_CHECKPOINT: has_known,
            _NEED_ROOM: len(self._sites) < _MOST_SITES,
            frozenset({"wake"}): bool(self._stopped),
            frozenset({"unpin"}): bool(self._pins),
            frozenset({"pin"}): has_known and len(self._pins) < _MOST_PINS,
            frozenset({"merge copies"}): len(self._sites) > 1,
            frozenset({"remove tier", "drain"}): any(site.tiers for site in self._sites),
            frozenset({"same command"}): self._last_start is not None,
        }
        lacking = frozenset[str]().union(*(names for names, holds in conditions.items() if not holds))
        return [name for name in _EVENTS if name not in lacking]

    def start(self) -> None:
        """Start a job without a tier."""
        self._resume(self._new_job(self._any_site()))

    def start_with_tier(self) -> None:
        """Start a job with the tier of the first host."""
        self._resume(self._new_job(self._any_site(), "a"))

    def start_on_another_host(self) -> None:
        """Start a job with the tier of another host."""
        self._resume(self._new_job(self._any_site(), "b"))

    def resume_tag(self) -> None:
        """Start a job that names the checkpoint to go on from."""
        site = self._any_site(with_known=True)
        self._resume(self._new_job(site, self.random.choice(["", "", "a"])), self.random.choice(site.known).tag)

    def same_command(self) -> None:
        """Start the last command again. A tag goes back only once."""
        if self._last_start is None:
            return
        site, host, tag, _ = self._last_start
        self._resume(self._new_job(site, host), tag)

    def save_without_load(self) -> None:
        """Save from a job that has loaded nothing."""
        job = self._new_job(self._any_site())
        self._jobs.append(job)
        self._save(job)

    def save(self) -> None:
        """Save once."""
        self._save(self._any_job())

    def save_twice(self) -> None:
        """Save twice."""
        job = self._any_job()
        self._save(job)
        if job in self._jobs:
            self._save(job)

    def overwrite(self) -> None:
        """Replace the checkpoint that was saved last."""
        job = self._any_job()
        self._save(job, overwrite=bool(job.content) and job.tier is None)

    def retain(self) -> None:
        """Save, and keep few."""
        self._save(self._any_job(), keep=self.random.choice([1, 2, 3]))

    def kill_idle(self) -> None:
        """Kill a job between two commands."""
        job = self._any_job()
        job.kill()
        self._jobs.remove(job)
        self._note(f"job {job.number} is killed")

    def kill_in_save(self) -> None:
        """Kill a job in a save."""
        self._save(self._any_job(), trap=self._trap("kill"), keep=self.random.choice([None, None, 1]))

    def stop_in_save(self) -> None:
        """Stop a job in a save."""
        self._save(self._any_job(), trap=self._trap("stop"), keep=self.random.choice([None, None, 1]))

    def kill_in_resume(self) -> None:
        """Kill a job that starts."""
        self._resume(self._new_job(self._any_site(), self.random.choice(["", "a"])), trap=self._trap("kill"))

    def stop_in_resume(self) -> None:
        """Stop a job that starts."""
        self._resume(self._new_job(self._any_site(), self.random.choice(["", "a"])), trap=self._trap("stop"))

    def wake(self) -> None:
        """Wake a stopped job."""
        job = self._stopped.pop(self.random.randrange(len(self._stopped)))
        self._jobs.append(job)
        self._note(f"job {job.number} wakes up")
        judge, job.awaited = job.awaited, None
        judge(job.wake(), has_slept=True)

    def crash_loop(self) -> None:
        """Start a job again and again, and kill it before it saves."""
        site, host = self._any_site(), self.random.choice(["", "", "a"])
        many = self.random.random() < 0.01
        for _ in range(_MANY_STARTS if many else _STARTS):
            job = self._new_job(site, host)
            self._resume(job, trap=self._trap("kill") if self.random.random() < 0.7 else None)
            if job in self._jobs:
                job.kill()
                self._jobs.remove(job)

    def two_launchers(self) -> None:
        """Start two jobs at once, and let both save at once."""
        site, host = self._any_site(), self.random.choice(["", "", "a"])
        pair = [self._new_job(site, host), self._new_job(site, "b" if host else "")]
        for job in pair:
            job.send("resume")
        replies = [job.wait() for job in pair]
        before, worlds = [*self._jobs], site.worlds
        results = set()
        for order in ([0, 1], [1, 0]):
            site.worlds, self._jobs = worlds, [*before]
            for place in order:
                self._judge_resume(site, pair[place], None, replies[place], has_slept=True)
            results |= site.worlds or set()
        site.worlds = results or worlds
        for job in pair:
            job.is_doubtful, job.is_challenged = True, False
        self._save_at_once(site, [job for job in pair if job in self._jobs], has_tier=bool(host))

    def _save_at_once(self, site: Site, savers: Sequence[Job], *, has_tier: bool) -> None:
        contents = [(*job.content, self._next_step()) for job in savers]
        for job, content in zip(savers, contents, strict=True):
            job.send("save", content, tag=self._tag(job, content))
        for job, content, reply in [(job, content, job.wait()) for job, content in zip(savers, contents, strict=True)]:
            self._judge_save(site, job, content, reply, removable=set(), has_slept=True)
        if site.worlds is not None and len({job.run for job in savers}) == 2:
            site.worlds |= {claimed(world, savers[0].run, savers[0].content, savers[0].number) for world in site.worlds}
        if len(savers) == 2 and not has_tier and savers[0].run and savers[0].run == savers[1].run:
            good = [job for job, content in zip(savers, contents, strict=True) if job.content == content]
            if len(good) != 1:
                raise ViolationError(f"{len(good)} of two jobs at once have saved")
            if site.worlds is not None:
                site.worlds = {world for world in site.worlds if owner_of(world, good[0].run) == good[0].number}

    def read(self) -> None:
        """Read as an evaluation does: nothing may change."""
        site = self._any_site()
        host = self.random.choice(["", *site.tiers])
        job = self._new_job(site, host)
        sums = self._sum(site)
        reply = job.ask("read")
        job.kill()
        if changed := self._sum(site).items() ^ sums.items():
            raise ViolationError(f"a reader has changed {sorted({name for name, _ in changed})}")
        must = self._must(site, host)
        if isinstance(reply, str):
            raise ViolationError(f"a reader was {reply}")
        self._note(f"read: {reply.content} {reply.error} {reply.message}")
        if reply.error:
            if site.contents and not self._may_fail(site, host, reply):
                raise ViolationError(f"a reader failed: {reply.error}: {reply.message}")
        elif site.worlds is not None and not any(
            worlds_that_load(site.worlds, reply.content, must, any_run=site.had_tiers)
        ):
            raise ViolationError(f"a reader got {reply.content}")

    def pin(self) -> None:
        """Pin a checkpoint, as an evaluation does for as long as it runs."""
        site = self._any_site(with_known=True)
        found = self.random.choice(site.known)
        job = self._new_job(site)
        reply = job.ask("pin", found.tag)
        if isinstance(reply, str) or reply.content != found.content:
            job.kill()
            if isinstance(reply, Reply) and reply.error == "CheckpointReplacedError":  # a dead job was removing it
                return
            raise ViolationError(f"{found.tag} could not be pinned: {reply}")
        self._pins.append((job, found.content))
        self._note(f"{found.tag} is pinned in {site.place.name}")

    def unpin(self) -> None:
        """End an evaluation."""
        job, _ = self._pins.pop(self.random.randrange(len(self._pins)))
        job.kill()

    def remove_tier(self) -> None:
        """Remove the folder of a tier."""
        site = self.random.choice([site for site in self._sites if site.tiers])
        host = self.random.choice(list(site.tiers))
        tier = site.tiers.pop(host)
        shutil.rmtree(tier.path, ignore_errors=True)
        for job in [*self._jobs, *self._stopped]:
            if job.tier == tier.path:
                job.is_doubtful = job.has_lost_tier = True
        self._note(f"the tier {tier.path.name} is removed")

    def remove_run(self) -> None:
        """Remove a run directory after its jobs have ended."""
        site = self._any_site(with_known=True)
        self._end_jobs(site)
        site.place.remove()
        site.worlds, site.known = {()}, []
        site.is_removed = site.had_tiers
        self._note(f"{site.place.name} is removed")

    def copy(self) -> None:
        """Copy a run directory while its jobs do nothing."""
        site = self._any_site(with_known=True)
        copy = Site(site.place.copy(self._next_name()), site.worlds, had_tiers=site.had_tiers)
        self._note(f"{site.place.name} is copied to {copy.place.name}")
        self._add_copy(site, copy)

    def copy_without_history(self) -> None:
        """Copy a run directory without its history: then all checkpoints are current."""
        site = self._any_site(with_known=True)
        if isinstance(site.place, BucketPlace):
            place: Place = site.place.copy(self._next_name())
            site.place.server.call("remove", f"{place.name}/.history/")
        else:
            place = site.place.copy(self._next_name(), hidden=False)
        newest = {self._run_of[found.content]: found.content for found in find_checkpoints(place)}
        heads = tuple(Head(run, content, -1) for run, content in reversed(list(newest.items())))
        by_number = {self._run_of[found.content]: found.sequence for found in site.known}
        world = tuple(sorted(heads, key=lambda head: -by_number.get(head.run, 0)))
        self._note(f"{site.place.name} is copied to {place.name} without its history")
        self._add_copy(site, Site(place, {world}, had_tiers=site.had_tiers))

    def copy_while_saving(self) -> None:
        """Copy a run directory while a job is in the middle of a save."""
        job = self._any_job()
        site = self._site_of(job)
        self._save(job, trap=self._trap("stop"))
        copy = Site(site.place.copy(self._next_name()), site.worlds, had_tiers=site.had_tiers)
        self._note(f"{site.place.name} is copied to {copy.place.name}")
        self._add_copy(site, copy)

    def move(self) -> None:
        """Rename a run directory after its jobs have ended."""
        site = self._any_site(with_known=True)
        self._end_jobs(site)
        before = site.place.name
        site.place = site.place.move(self._next_name())
        self._note(f"{before} is moved to {site.place.name}")

    def merge(self) -> None:
        """Copy one copy of a run over another one: what the other has stays."""
        source, target = self.random.sample(self._sites, 2)
        self._end_jobs(target)
        source.place.copy(target.place.name)
        target.worlds, target.is_removed = None, target.had_tiers
        # The pointer of an overwrite in the one has a higher number than that of the same tag in the other.
        self._look(target, target.contents if isinstance(target.place, BucketPlace) else set())
        self._note(f"{source.place.name} is merged into {target.place.name}")

    def roll_back(self) -> None:
        """Go back by the command."""
        site = self._any_site(with_known=True)
        found = self.random.choice(site.known)
        job = self._new_job(site)
        reply = job.ask("command", "rollback", found.tag)
        job.kill()
        if isinstance(reply, str) or reply.error:
            raise ViolationError(f"rollback to {found.tag}: {reply}")
        run = self._run_of[found.content]
        if site.worlds is not None:
            site.worlds = {claimed(world, run, found.content, job.number) for world in site.worlds}
        self._challenge(site, job, run, certain=True)
        self._note(f"{site.place.name} is rolled back to {found.content}")
        self._look(site, set())

    def prune(self) -> None:
        """Remove all but the newest by the command."""
        site = self._any_site(with_known=True)
        kept = self.random.choice([1, 2])
        job = self._new_job(site)
        reply = job.ask("command", "prune", "--keep", str(kept))
        job.kill()
        if isinstance(reply, str) or reply.error:
            raise ViolationError(f"prune: {reply}")
        self._note(f"{site.place.name} is pruned to {kept}")
        before = site.contents
        self._look(site, before - self._pinned(site))
        if site.worlds is not None:
            latest = {world: latest_of(world, before) for world in site.worlds}
            site.worlds = {world for world, found in latest.items() if not found or found[1] in site.contents}
            if not site.worlds:
                raise ViolationError(f"prune has removed the latest checkpoint, which was one of {latest.values()}")

    def drain(self) -> None:
        """Write what a tier has into the run directory."""
        site = self.random.choice([site for site in self._sites if site.tiers])
        host = self.random.choice(list(site.tiers))
        adopts = self.random.random() < 0.5
        job = self._new_job(site, host)
        reply = job.ask("drain", adopt=adopts)
        job.kill()
        if isinstance(reply, str):
            raise ViolationError(f"a drain was {reply}")
        before = site.contents
        self._look(site, set())
        self._note(f"drain {'--adopt ' if adopts else ''}of host {host}: {reply.error} {reply.message}")
        for content in site.contents - before:
            run = self._run_of[content]
            if site.is_removed and site.worlds is not None:
                site.worlds = {claimed(world, run, content, -1) for world in site.worlds} | site.worlds

    def fork(self) -> None:
        """Fork a child of a job, which ends at once: nothing may change."""
        job = self._any_job()
        site = self._site_of(job)
        sums = self._sum(site)
        reply = job.ask("fork")
        if isinstance(reply, str) or reply.error or self._sum(site) != sums:
            raise ViolationError(f"a forked child has changed something: {reply}")

    def second_object(self) -> None:
        """Resume by a second object of the process of a job."""
        job = self._any_job()
        site = self._site_of(job)
        self._jobs.remove(job)
        self._judge_resume(site, job, None, job.ask("resume_second"))

    def start_read_only(self) -> None:
        """Start a job while its run directory cannot be written."""
        site = self._any_site()
        if isinstance(site.place, BucketPlace):
            return
        job = self._new_job(site)
        self._judge_resume(site, job, None, job.ask("resume", read_only=str(site.place.path())), claims=False)

    # ----------------------------------------------------------------------------------------------------------------
    # What must be so

    def _resume(self, job: Job, tag: str | None = None, trap: Trap | None = None) -> None:
        site = self._site_of(job)
        reply = job.ask("resume", tag, again=False if tag else None, trap=trap)
        self._judge_resume(site, job, tag, reply)
        if trap is None and job in self._jobs:
            self._last_start = (site, job.host if job.tier else "", tag, job.content)

    def _judge_resume(
        self, site: Site, job: Job, tag: str | None, reply: Reply | str, *, has_slept: bool = False, claims: bool = True
    ) -> None:
        """Check what a job has loaded. ``has_slept``: others may have gone on between its begin and its end."""
        host = job.host if job.tier else ""
        must = self._must(site, host)
        self._look(site, set())
        named = next((found.content for found in site.known if found.tag == tag), ())
        self._note(
            f"job {job.number}{' with tier ' + host if host else ''} in {site.place.name} resumes {tag}: {reply}"
        )
        if isinstance(reply, str):
            self._note_cut_resume(site, job, named, must, tag, reply)
            return
        certain = not has_slept and not job.is_doubtful
        if certain and must and not site.is_removed:
            self._counts.resumes += 1
            self._counts.resumed += not reply.error
        if reply.error:
            self._judge_failed_resume(site, job, tag, reply, has_slept=has_slept)
            return
        self._jobs.append(job)
        if tag and reply.content == named and not any("went back to" in warning for warning in reply.warnings):
            run = self._run_of[named]
            site.worlds = {claimed(world, run, named, job.number) for world in site.worlds or {()}}
        else:
            site.worlds = self._worlds_after(site, job, reply.content, must, keeps=has_slept or not claims)
        run = self._run_of[reply.content]
        job.content, job.run, job.is_challenged, job.is_doubtful = reply.content, run, False, has_slept
        job.has_claimed = claims
        if claims:
            self._challenge(site, job, run, certain=certain)

    def _worlds_after(
        self, site: Site, job: Job, content: Content, must: Collection[Content], *, keeps: bool
    ) -> set[World]:
        """Return what is possible after a load of the latest checkpoint. ``keeps``: perhaps it has claimed nothing."""
        if content not in self._run_of:
            raise ViolationError(f"a resume got {content}, which was never saved")
        run = self._run_of[content]
        if site.worlds is None:
            return {(Head(run, content, job.number),)}
        fits = list(worlds_that_load(site.worlds, content, must, any_run=site.had_tiers))
        if not fits and not job.is_doubtful and not keeps:
            raise ViolationError(f"a resume got {content}, and should be one of {self._describe(site, must)}")
        new = {claimed(world, run, content, job.number) for world, fitting in fits if fitting == run}
        return new | (site.worlds if keeps else set())

    def _judge_failed_resume(self, site: Site, job: Job, tag: str | None, reply: Reply, *, has_slept: bool) -> None:
        host = job.host if job.tier else ""
        self._counts.errors[reply.error] = self._counts.errors.get(reply.error, 0) + 1
        is_empty = reply.error == "EmptyRunError" and (not self._must(site, host) or has_slept)
        if is_empty and not tag:
            job.is_challenged = False
            self._challenge(site, job, 0, certain=False)
            self._jobs.append(job)
            return
        job.kill()
        is_late = has_slept and (reply.error in _SUPERSEDED or job.has_lost_tier)
        is_gone = reply.error == "NoCheckpointError" and bool(tag)
        if not (is_empty or is_late or is_gone or self._may_fail(site, host, reply)):
            raise ViolationError(f"a resume failed: {reply.error}: {reply.message}")

    def _note_cut_resume(
        self, site: Site, job: Job, named: Content, must: Collection[Content], tag: str | None, reply: str
    ) -> None:
        worlds = site.worlds or set()
        more = set()
        for world in worlds:
            if named:
                more.add(claimed(world, self._run_of[named], named, job.number))
            for head in world:
                possible = {known for known in must if head.content[: len(known)] == known} | {head.content}
                more |= {claimed(world, head.run, content, job.number) for content in possible if content}
        if site.worlds is not None:
            site.worlds = worlds | more
        for other in [*self._jobs, *self._stopped]:
            other.is_doubtful |= other.place.name == site.place.name
        if reply == "stopped":
            job.is_doubtful = True
            job.awaited = lambda reply, has_slept: self._judge_awakened(site, job, tag, reply, has_slept=has_slept)
            self._stopped.append(job)

    def _judge_awakened(self, site: Site, job: Job, tag: str | None, reply: Reply | str, *, has_slept: bool) -> None:
        self._jobs.remove(job)
        self._judge_resume(site, job, tag, reply, has_slept=has_slept)

    def _save(self, job: Job, *, overwrite: bool = False, keep: int | None = None, trap: Trap | None = None) -> None:
        site = self._site_of(job)
        content = (*(job.content[:-1] if overwrite else job.content), self._next_step())
        if len(content) > 60:
            return
        options: dict[str, int] = {"overwrite": True} if overwrite else {}
        keep = None if job.tier else keep
        if keep:
            options["keep"] = keep
        removable: set[Content] = set()
        if keep and not job.is_challenged:
            run = job.run or job.number
            of_run = {known for known in site.contents if self._run_of[known] == run}
            line = sorted((known for known in of_run if content[: len(known)] == known), key=len)
            removable |= of_run - set(line[len(line) - keep + 1 :])
        removable -= self._pinned(site)
        if overwrite:
            tag = self._tag(job, content)
            removable |= {found.content for found in site.known if found.tag == tag}
        reply = job.ask("save", content, tag=self._tag(job, content), trap=trap, **options)
        self._judge_save(site, job, content, reply, removable=removable)

    def _judge_save(
        self,
        site: Site,
        job: Job,
        content: Content,
        reply: Reply | str,
        *,
        removable: set[Content],
        has_slept: bool = False,
    ) -> None:
        run = job.run or job.number
        self._run_of[content] = run
        self._note(
            f"job {job.number} in {site.place.name} saves {content}, "
            f"{'challenged' if job.is_challenged else 'doubtful' if job.is_doubtful else 'sure'}: {reply}"
        )
        self._look(site, set() if job.is_challenged and has_slept else removable)
        if isinstance(reply, str):
            self._note_cut_save(site, job, content, reply, removable)
            return
        if reply.error:
            self._counts.errors[reply.error] = self._counts.errors.get(reply.error, 0) + 1
            self._judge_failed_save(site, job, content, reply)
            return
        if job.tier is None and not has_slept:
            self._check_saved(site, job, content)
        if not job.is_challenged and site.worlds is not None:
            site.worlds = self._worlds_with(site.worlds, job, content, has_slept=has_slept)
        self._note_saved(site, job, content)

    def _check_saved(self, site: Site, job: Job, content: Content) -> None:
        """Check what holds when a save without a tier has returned."""
        if job.is_challenged:
            raise ViolationError(f"job {job.number} was superseded, and has saved {content}")
        if content not in site.contents:
            raise ViolationError(f"{content} was saved, and is not there")
        if not site.had_tiers and site.known[-1].content != content:
            raise ViolationError(f"the highest sequence number is not that of {content}, which was saved last")

    @staticmethod
    def _worlds_with(worlds: set[World], job: Job, content: Content, *, has_slept: bool) -> set[World]:
        """Return what is possible after a save."""
        run = job.run or job.number
        own = {world for world in worlds if owner_of(world, run) in {job.number, None}}
        others = set() if job.tier is None and not has_slept else worlds - own
        if not own and not others:  # it claims with this save, after a load that could not
            own = {claimed(world, run, content, job.number) for world in worlds}
        after = {saved(world, run, content, job.number) for world in own}
        if has_slept:  # its sequence number may be lower than that of another run, which was saved meanwhile
            after |= {saved_in_place(world, run, content, job.number) for world in own}
        return after | others

    def _note_saved(self, site: Site, job: Job, content: Content) -> None:
        run = job.run or job.number
        if job.run and not job.has_claimed:
            self._challenge(site, job, run, certain=True)
        job.content, job.run, job.has_claimed = content, run, True
        for other in [*self._jobs, *self._stopped]:
            if other.run == run and other.place.name == site.place.name and not other.has_claimed:
                other.is_challenged |= job.tier is None
                other.is_doubtful = True
        for tier in site.tiers.values():
            if tier.path == job.tier:
                tier.acked = content

    def _judge_failed_save(self, site: Site, job: Job, content: Content, reply: Reply) -> None:
        is_superseded = (job.is_challenged or job.is_doubtful) and reply.error in _SUPERSEDED
        is_tier = job.tier is not None and reply.error in {"StateError", "StorageError", "SupersededError"}
        if not is_superseded and not (is_tier and (job.is_doubtful or job.run == 0 or site.is_removed)):
            raise ViolationError(f"a save of job {job.number} failed: {reply.error}: {reply.message}")
        if (content in site.contents or job.tier) and site.worlds is not None:  # it may only not be drained
            site.worlds |= {saved(world, job.run or job.number, content, job.number) for world in site.worlds}

    def _note_cut_save(self, site: Site, job: Job, content: Content, reply: str, removable: set[Content]) -> None:
        run = job.run or job.number
        if job in self._jobs:
            self._jobs.remove(job)
        if site.worlds is not None and not job.is_challenged:
            own = {world for world in site.worlds if owner_of(world, run) in {job.number, None}}
            after = {saved(world, run, content, job.number) for world in own}
            if content in site.contents and not job.is_doubtful:
                site.worlds = after | (site.worlds - own)
            elif job.tier is not None or content in site.contents:
                site.worlds |= after
            if job.content and not job.has_claimed:
                site.worlds |= {claimed(world, run, job.content, job.number) for world in site.worlds}
            if job.run == 0:
                site.worlds |= after
        for other in [*self._jobs, *self._stopped]:
            if other.place.name == site.place.name and not (job.has_claimed and other.has_claimed):
                other.is_doubtful = True
        if reply == "stopped":
            job.awaited = lambda reply, has_slept: self._judge_save(
                site, job, content, reply, removable=removable, has_slept=has_slept
            )
            self._stopped.append(job)

    def _may_fail(self, site: Site, host: str, reply: Reply) -> bool:
        """Return whether a load is right to fail: the table of the history names the error."""
        if site.is_removed and reply.error in {"InvalidArgumentError", "TagExistsError"}:
            return True
        if reply.error not in {"StateError", "NoCheckpointError", "SupersededError", "EmptyRunError"}:
            return False
        if site.worlds is None or site.is_removed:
            return True
        existing = self._must(site, host)
        return not existing or any(latest_of(world, existing) is None for world in site.worlds)

    def _challenge(self, site: Site, job: Job, run: int, *, certain: bool) -> None:
        for other in [*self._jobs, *self._stopped]:
            if other is job or other.place.name != site.place.name:
                continue
            if run and other.run == run and certain:
                other.is_challenged = True
            elif other.run == run or other.tier is not None or not other.run:
                other.is_doubtful = True

    def _check_progress(self) -> None:
        """After the last fault, a job resumes, saves twice, and the next one resumes that."""
        for job in [*self._jobs, *self._stopped]:
            job.kill()
        self._jobs, self._stopped = [], []
        self.log.append("-- progress")
        for site in self._sites:
            if site.is_removed and site.tiers:
                continue
            job = self._new_job(site)
            self._resume(job)
            if job not in self._jobs:
                continue
            self._save(job)
            self._save(job)
            after = self._new_job(site)
            self._resume(after)
            if after not in self._jobs or after.content != job.content:
                raise ViolationError(f"after the last fault, {job.content} was saved, and {after.content} resumed")

    # ----------------------------------------------------------------------------------------------------------------
    # Helpers

    def _look(self, site: Site, removable: Collection[Content]) -> None:
        """Look at the checkpoints that are there: all others than these must still be."""
        found = find_checkpoints(site.place)
        missing = site.contents - {one.content for one in found} - set(removable)
        site.known = found
        if missing:
            raise ViolationError(f"{site.place.name} has lost {sorted(missing)}")

    def _must(self, site: Site, host: str) -> set[Content]:
        """Return the checkpoints that a load with the tier of a host sees for certain."""
        tier = site.tiers.get(host)
        acked = {tier.acked} if tier is not None and tier.acked else set()
        return {found.content for found in find_checkpoints(site.place)} | acked

    def _describe(self, site: Site, must: Collection[Content]) -> list[str]:
        return [f"{latest_of(world, must)} of {world}" for world in site.worlds or ()]

    def _sum(self, site: Site) -> dict[str, bytes]:
        """Return the contents of all files of a run directory and its tiers."""
        files = [file for tier in site.tiers.values() for file in tier.path.rglob("*") if file.is_file()]
        return {**site.place.read_files(), **{str(file): file.read_bytes() for file in files}}

    def _pinned(self, site: Site) -> set[Content]:
        return {content for job, content in self._pins if job.place.name == site.place.name}

    def _add_copy(self, site: Site, copy: Site) -> None:
        copy.known = find_checkpoints(copy.place)
        if lost := site.contents - copy.contents:
            raise ViolationError(f"the copy lacks {lost}")
        self._sites.append(copy)

    def _end_jobs(self, site: Site) -> None:
        for jobs in (self._jobs, self._stopped):
            for job in [job for job in jobs if job.place.name == site.place.name]:
                job.kill()
                jobs.remove(job)
        for job, content in [pin for pin in self._pins if pin[0].place.name == site.place.name]:
            job.kill()
            self._pins.remove((job, content))

    def _new_job(self, site: Site, host: str = "") -> Job:
        self._numbers += 1
        tier = None
        if host:
            site.had_tiers = True
            path = self._base / f"tier-{self._sites.index(site)}-{host}"
            tier = site.tiers.setdefault(host, Tier(path)).path
        return Job(self._numbers, site.place, tier, host or "a", self.random.choice([1, 2, NEVER]))

    def _any_site(self, *, with_known: bool = False) -> Site:
        return self.random.choice([site for site in self._sites if site.known or not with_known])

    def _any_job(self) -> Job:
        return self.random.choice(self._idle())

    def _idle(self) -> list[Job]:
        return [job for job in self._jobs if len(job.content) < 58]

    def _site_of(self, job: Job) -> Site:
        return next(site for site in self._sites if site.place.name == job.place.name)

    def _tag(self, job: Job, content: Content) -> str:
        return f"r{job.run or job.number}s{len(content)}"

    def _trap(self, action: str) -> Trap:
        return Trap(action, self.random.randrange(_CALLS))

    def _next_step(self) -> int:
        self._steps += 1
        return self._steps

    def _next_name(self) -> str:
        self._names += 1
        return f"run{self.random.getrandbits(48):012x}"

    def _note(self, line: str) -> None:
        self.log.append(line)


_EVENTS: dict[str, Callable[[History], None]] = {
    "start": History.start,
    "start with tier": History.start_with_tier,
    "start on another host": History.start_on_another_host,
    "resume(tag)": History.resume_tag,
    "same command": History.same_command,
    "save without load": History.save_without_load,
    "save": History.save,
    "save twice": History.save_twice,
    "overwrite": History.overwrite,
    "retention": History.retain,
    "kill": History.kill_idle,
    "kill in save": History.kill_in_save,
    "stop in save": History.stop_in_save,
    "kill in resume": History.kill_in_resume,
    "stop in resume": History.stop_in_resume,
    "wake": History.wake,
    "crash loop": History.crash_loop,
    "two launchers": History.two_launchers,
    "reader": History.read,
    "pin": History.pin,
    "unpin": History.unpin,
    "remove tier": History.remove_tier,
    "remove run": History.remove_run,
    "copy": History.copy,
    "copy without history": History.copy_without_history,
    "copy while saving": History.copy_while_saving,
    "move": History.move,
    "merge copies": History.merge,
    "rollback": History.roll_back,
    "prune": History.prune,
    "drain": History.drain,
    "fork": History.fork,
    "second object": History.second_object,
    "read-only": History.start_read_only,
}

#: The names of the events.
EVENTS: Iterable[str] = tuple(_EVENTS)

_NEED_JOB = frozenset(
    {
        *("save", "save twice", "overwrite", "retention", "kill", "kill in save", "stop in save"),
        *("copy while saving", "fork", "second object"),
    }
)
_NEED_CHECKPOINT = frozenset({"resume(tag)", "rollback", "prune", "copy", "copy without history", "move", "remove run"})
_NEED_ROOM = frozenset({"copy", "copy without history", "copy while saving"})
_START_JOB = frozenset(
    {
        *("start", "start with tier", "start on another host", "resume(tag)", "same command", "save without load"),
        *("stop in resume", "two launchers", "read-only"),
    }
)
