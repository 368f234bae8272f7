"""One random history of a run: the events that can happen to it. After each, the judge says whether it may be so."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from campaigns.run_histories.draws import Draw
from campaigns.run_histories.hosts import Hosts
from campaigns.run_histories.jobs import Job
from campaigns.run_histories.judge import Judge
from campaigns.run_histories.oracle import (
    Content,
    Head,
    claimed,
    latest_of,
    owner_of,
    worlds_that_load,
)
from campaigns.run_histories.places import BucketPlace, Place, find_checkpoints
from campaigns.run_histories.processes import HangError
from campaigns.run_histories.state import Counts, Site, State, Tier, ViolationError
from campaigns.run_histories.trainer import NEVER, Reply, Trap

#: The most jobs that live at a time, run directories, and pins.
_MOST_JOBS, _MOST_SITES, _MOST_PINS = 5, 3, 2

#: The steps of a job that saves no more: a content has room for few more.
_MOST_STEPS = 58

#: The calls of a command among which a trap is drawn: most commands have fewer.
_CALLS = 80

#: The starts of a crash loop, and of a long one.
_STARTS, _MANY_STARTS = 4, 100


class History:
    """A history. ``run`` makes it, and raises ``ViolationError``; ``log`` says what was done, ``events`` which events.

    ``make`` makes its run directories. The tiers are in ``base``, on the host of each.
    """

    def __init__(self, make: Callable[[str], Place], hosts: Hosts, base: Path, seed: int, counts: Counts) -> None:
        self.random = random.Random(seed)
        self._base, self._state = base, State(counts, hosts)
        self._judge = Judge(self._state)
        self._steps = self._numbers = 0
        self.events: list[str] = []
        self._state.sites.append(Site(make(self._next_name()), {()}))
        self._last_start: tuple[Site, str, str | None] | None = None

    @property
    def log(self) -> list[str]:
        """What was done, in words."""
        return self._state.log

    def run(self, length: int, draw: Draw) -> None:
        """Do so many events, and then what must succeed after the last fault."""
        before = ""
        try:
            for _ in range(length):
                event = draw(before, self._list_applicable())
                self.events.append(event)
                self._state.counts.pairs[before, event] = self._state.counts.pairs.get((before, event), 0) + 1
                self._state.log.append(f"-- {event}")
                _EVENTS[event](self)
                if any(site.worlds is not None and not site.worlds for site in self._state.sites):
                    raise ViolationError("the oracle knows no world in which this may happen")
                before = event
            self._check_progress()
        except HangError as error:
            raise ViolationError(str(error)) from error
        finally:
            for job in [*self._state.jobs, *self._state.stopped, *(job for job, _ in self._state.pins)]:
                job.kill()
            for site in self._state.sites:
                site.place.remove()

    def _list_applicable(self) -> list[str]:
        has_known = any(site.known for site in self._state.sites)
        conditions = {
            _NEED_JOB: bool(self._idle()),
            _START_JOB: len(self._state.jobs) + len(self._state.stopped) < _MOST_JOBS,
            _NEED_CHECKPOINT: has_known,
            _NEED_ROOM: len(self._state.sites) < _MOST_SITES,
            frozenset({"wake"}): bool(self._state.stopped),
            frozenset({"unpin"}): bool(self._state.pins),
            frozenset({"pin"}): has_known and len(self._state.pins) < _MOST_PINS,
            frozenset({"merge copies"}): len(self._state.sites) > 1,
            frozenset({"remove tier", "drain"}): any(site.tiers for site in self._state.sites),
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
        site, host, tag = self._last_start
        self._resume(self._new_job(site, host), tag)

    def requeue(self) -> None:
        """Start a job that names a checkpoint, let it save, kill it, and start the same command again."""
        self.resume_tag()
        job = self._state.jobs[-1] if self._state.jobs else None
        if job is None or job.is_doubtful or job.number != self._numbers or len(job.content) >= _MOST_STEPS:
            return
        self._save(job)
        if job in self._state.jobs:
            job.kill()
            self._state.jobs.remove(job)
        self.same_command()

    def save_without_load(self) -> None:
        """Save from a job that has loaded nothing."""
        job = self._new_job(self._any_site())
        self._state.jobs.append(job)
        self._save(job)

    def save(self) -> None:
        """Save once."""
        self._save(self._any_job())

    def save_twice(self) -> None:
        """Save twice."""
        job = self._any_job()
        self._save(job)
        if job in self._state.jobs:
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
        self._state.jobs.remove(job)
        self._state.note(f"job {job.number} is killed")

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
        job = self._state.stopped.pop(self.random.randrange(len(self._state.stopped)))
        self._state.jobs.append(job)
        self._state.note(f"job {job.number} wakes up")
        judge, job.awaited = job.awaited, None
        judge(job.wake(), has_slept=True)

    def crash_loop(self) -> None:
        """Start a job again and again, and kill it before it saves."""
        site, host = self._any_site(), self.random.choice(["", "", "a"])
        many = self.random.random() < 0.01
        for _ in range(_MANY_STARTS if many else _STARTS):
            job = self._new_job(site, host)
            self._resume(job, trap=self._trap("kill") if self.random.random() < 0.7 else None)
            if job in self._state.jobs:
                job.kill()
                self._state.jobs.remove(job)

    def two_launchers(self) -> None:
        """Start two jobs at once, and let both save at once."""
        site, host = self._any_site(), self.random.choice(["", "", "a"])
        pair = [self._new_job(site, host), self._new_job(site, "b" if host else "")]
        for job in pair:
            job.send("resume")
        replies = [job.wait() for job in pair]
        before, worlds, unsure_runs = [*self._state.jobs], site.worlds, site.unsure_runs
        results = set()
        for order in ([0, 1], [1, 0]):
            site.worlds, site.unsure_runs, self._state.jobs = worlds, unsure_runs, [*before]
            for place in order:
                self._judge.judge_resume(site, pair[place], None, replies[place], has_slept=True)
            results |= site.worlds or set()
        site.worlds = results or worlds
        for job in pair:
            job.is_doubtful, job.is_challenged = True, False
        self._save_at_once(site, [job for job in pair if job in self._state.jobs], has_tier=bool(host))

    def _save_at_once(self, site: Site, savers: Sequence[Job], *, has_tier: bool) -> None:
        contents = [(*job.content, self._next_step()) for job in savers]
        for job, content in zip(savers, contents, strict=True):
            job.send("save", content, tag=self._tag(job, content))
        for job, content, reply in [(job, content, job.wait()) for job, content in zip(savers, contents, strict=True)]:
            self._judge.judge_save(site, job, content, reply, removable=set(), has_slept=True)
        if site.worlds is not None and len({job.run for job in savers}) == 2:
            site.worlds |= {claimed(world, savers[0].run, savers[0].content, savers[0].number) for world in site.worlds}
        if len(savers) == 2 and not has_tier and savers[0].run and savers[0].run == savers[1].run:
            good = [job for job, content in zip(savers, contents, strict=True) if job.content == content]
            if len(good) != 1 and (good or not site.is_merged):  # the other copy may have both tags
                raise ViolationError(f"{len(good)} of two jobs at once have saved")
            if site.worlds is not None and good:
                site.worlds = {world for world in site.worlds if owner_of(world, good[0].run) == good[0].number}

    def read(self) -> None:
        """Read as an evaluation does: nothing may change."""
        site = self._any_site()
        host = self.random.choice(["", *site.tiers])
        job = self._new_job(site, host)
        sums = self._state.read_files(site)
        reply = job.ask("read")
        job.kill()
        if changed := self._state.read_files(site).items() ^ sums.items():
            raise ViolationError(f"a reader has changed {sorted({name for name, _ in changed})}")
        must = self._state.must(site, host)
        if isinstance(reply, str):
            raise ViolationError(f"a reader was {reply}")
        self._state.note(f"read: {reply.content} {reply.error} {reply.message}")
        if reply.error:
            if site.contents and not self._judge.may_fail(site, host, reply):
                raise ViolationError(f"a reader failed: {reply.error}: {reply.message}")
        elif (
            site.worlds is not None
            and self._state.run_of[reply.content] not in site.unsure_runs
            and not any(worlds_that_load(site.worlds, reply.content, must, any_run=site.had_tiers))
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
        self._state.pins.append((job, found.content))
        self._state.note(f"{found.tag} is pinned in {site.place.name}")

    def unpin(self) -> None:
        """End an evaluation."""
        job, content = self._state.pins.pop(self.random.randrange(len(self._state.pins)))
        job.kill()
        for stopped in self._state.stopped:
            stopped.removable |= stopped.held & {content}

    def remove_tier(self) -> None:
        """Remove the folder of a tier."""
        site = self.random.choice([site for site in self._state.sites if site.tiers])
        host = self.random.choice(list(site.tiers))
        tier = site.tiers.pop(host)
        self._state.hosts.remove(host, tier.path)
        for job in [*self._state.jobs, *self._state.stopped]:
            if job.tier == tier.path:
                job.is_doubtful = job.has_lost_tier = True
        self._state.note(f"the tier {tier.path.name} is removed")

    def remove_run(self) -> None:
        """Remove a run directory after its jobs have ended."""
        site = self._any_site(with_known=True)
        self._end_jobs(site)
        site.place.remove()
        site.worlds, site.known, site.went_back, site.unsure_runs = {()}, [], {}, frozenset()
        site.is_removed = site.had_tiers
        self._state.note(f"{site.place.name} is removed")

    def copy(self) -> None:
        """Copy a run directory while its jobs do nothing."""
        site = self._any_site(with_known=True)
        copy = replace(site, place=site.place.copy(self._next_name()), tiers={}, went_back=dict(site.went_back))
        self._state.note(f"{site.place.name} is copied to {copy.place.name}")
        self._add_copy(site, copy)

    def copy_without_history(self) -> None:
        """Copy a run directory without its history: then all checkpoints are current."""
        site = self._any_site(with_known=True)
        if isinstance(site.place, BucketPlace):
            place: Place = site.place.copy(self._next_name())
            site.place.server.call("remove", f"{place.name}/.history/")
        else:
            place = site.place.copy(self._next_name(), hidden=False)
        newest = {self._state.run_of[found.content]: found.content for found in find_checkpoints(place)}
        heads = tuple(Head(run, content, -1) for run, content in reversed(list(newest.items())))
        by_number = {self._state.run_of[found.content]: found.sequence for found in site.known}
        highest = [-by_number.get(head.run, 0) for head in heads]
        # Without conditions two jobs may have had one number: then the times and the ids decide.
        worlds = {tuple(heads[place] for place in order) for order in _list_orders(highest)}
        self._state.note(f"{site.place.name} is copied to {place.name} without its history")
        self._add_copy(
            site, Site(place, worlds, had_tiers=site.had_tiers, lacks_history=True, is_merged=site.is_merged)
        )

    def copy_while_saving(self) -> None:
        """Copy a run directory while a job is in the middle of a save."""
        job = self._any_job()
        site = self._state.site_of(job)
        self._save(job, trap=self._trap("stop"))
        copy = replace(site, place=site.place.copy(self._next_name()), tiers={}, went_back=dict(site.went_back))
        self._state.note(f"{site.place.name} is copied to {copy.place.name}")
        self._add_copy(site, copy)

    def move(self) -> None:
        """Rename a run directory after its jobs have ended."""
        site = self._any_site(with_known=True)
        self._end_jobs(site)
        before = site.place.name
        site.place = site.place.move(self._next_name())
        self._state.note(f"{before} is moved to {site.place.name}")

    def merge(self) -> None:
        """Copy one copy of a run over another one: what the other has stays."""
        source, target = self.random.sample(self._state.sites, 2)
        self._end_jobs(target)
        source.place.copy(target.place.name)
        target.worlds, target.is_removed, target.went_back = None, target.had_tiers, {}
        target.lacks_history |= source.lacks_history
        target.is_merged = True
        target.unsure_runs = frozenset(self._state.run_of.values() if target.had_tiers or source.had_tiers else ())
        target.had_tiers |= source.had_tiers
        # The pointer of an overwrite in the one has a higher number than that of the same tag in the other.
        self._state.look(target, target.contents if isinstance(target.place, BucketPlace) else set())
        self._state.note(f"{source.place.name} is merged into {target.place.name}")

    def roll_back(self) -> None:
        """Go back by the command."""
        site = self._any_site(with_known=True)
        found = self.random.choice(site.known)
        job = self._new_job(site)
        reply = job.ask("command", "rollback", found.tag)
        job.kill()
        if isinstance(reply, str) or reply.error:
            raise ViolationError(f"rollback to {found.tag}: {reply}")
        run = self._state.run_of[found.content]
        site.went_back[run] = found.content
        if site.worlds is not None:
            site.worlds = {claimed(world, run, found.content, job.number) for world in site.worlds}
        self._state.challenge(site, job, run, certain=True)
        self._state.note(f"{site.place.name} is rolled back to {found.content}")
        self._state.look(site, set())

    def prune(self) -> None:
        """Remove all but the newest by the command."""
        site = self._any_site(with_known=True)
        kept = self.random.choice([1, 2])
        job = self._new_job(site)
        reply = job.ask("command", "prune", "--keep", str(kept))
        job.kill()
        if isinstance(reply, str) or reply.error:
            raise ViolationError(f"prune: {reply}")
        self._state.note(f"{site.place.name} is pruned to {kept}")
        before = site.contents
        self._state.look(site, before - self._state.pinned(site))
        if site.worlds is not None and not site.unsure_runs:
            latest = {world: latest_of(world, before, any_run=site.had_tiers) for world in site.worlds}
            site.worlds = {world for world, found in latest.items() if not found or site.contents.intersection(found)}
            if not site.worlds:
                raise ViolationError(f"prune has removed the latest checkpoint, which was one of {latest.values()}")

    def drain(self) -> None:
        """Write what a tier has into the run directory."""
        site = self.random.choice([site for site in self._state.sites if site.tiers])
        host = self.random.choice(list(site.tiers))
        adopts = self.random.random() < 0.5
        job = self._new_job(site, host)
        reply = job.ask("drain", adopt=adopts)
        job.kill()
        if isinstance(reply, str):
            raise ViolationError(f"a drain was {reply}")
        before = site.contents
        self._state.look(site, set())
        self._state.note(f"drain {'--adopt ' if adopts else ''}of host {host}: {reply.error} {reply.message}")
        for content in site.contents - before:
            run = self._state.run_of[content]
            for other in [*self._state.jobs, *self._state.stopped]:  # one that could not claim may have loaded less
                if other.place.name == site.place.name and other.run == run and not other.has_claimed:
                    other.is_doubtful = True
            if site.is_removed and site.worlds is not None:
                site.worlds = {claimed(world, run, content, -1) for world in site.worlds} | site.worlds

    def fork(self) -> None:
        """Fork a child of a job, which ends at once: nothing may change."""
        job = self._any_job()
        site = self._state.site_of(job)
        sums = self._state.read_files(site)
        reply = job.ask("fork")
        if isinstance(reply, str) or reply.error or self._state.read_files(site) != sums:
            raise ViolationError(f"a forked child has changed something: {reply}")

    def second_object(self) -> None:
        """Resume by a second object of the process of a job."""
        job = self._any_job()
        site = self._state.site_of(job)
        self._state.jobs.remove(job)
        self._judge.judge_resume(site, job, None, job.ask("resume_second"))

    def start_read_only(self) -> None:
        """Start a job while its run directory cannot be written."""
        site = self._any_site()
        if isinstance(site.place, BucketPlace):
            return
        job = self._new_job(site)
        self._judge.judge_resume(site, job, None, job.ask("resume", read_only=str(site.place.path())), claims=False)

    def _resume(self, job: Job, tag: str | None = None, trap: Trap | None = None) -> None:
        site = self._state.site_of(job)
        reply = job.ask("resume", tag, again=False if tag else None, trap=trap)
        self._judge.judge_resume(site, job, tag, reply)
        if trap is None and job in self._state.jobs:
            self._last_start = (site, job.host, tag)

    def _save(self, job: Job, *, overwrite: bool = False, keep: int | None = None, trap: Trap | None = None) -> None:
        site = self._state.site_of(job)
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
            of_run = {known for known in site.contents if self._state.run_of[known] == run}
            line = sorted((known for known in of_run if content[: len(known)] == known), key=len)
            kept = set(line[len(line) - keep + 1 :])
            if site.lacks_history:  # then those that were abandoned count, too
                by_number = [found.content for found in site.known if found.content in of_run]
                kept &= set(by_number[len(by_number) - keep + 1 :])
            removable |= of_run - kept
        job.held = removable & self._state.pinned(site)
        removable -= job.held
        job.removable = removable
        if overwrite:
            tag = self._tag(job, content)
            removable |= {found.content for found in site.known if found.tag == tag}
        reply = job.ask("save", content, tag=self._tag(job, content), trap=trap, **options)
        self._judge.judge_save(site, job, content, reply, removable=removable)

    def _check_progress(self) -> None:
        """After the last fault, a job resumes, saves twice, and the next one resumes that."""
        for job in [*self._state.jobs, *self._state.stopped]:
            job.kill()
        self._state.jobs, self._state.stopped = [], []
        self._state.log.append("-- progress")
        for site in self._state.sites:
            if site.is_removed and site.tiers:
                continue
            job = self._new_job(site)
            self._resume(job)
            if job not in self._state.jobs:
                continue
            self._save(job)
            self._save(job)
            after = self._new_job(site)
            self._resume(after)
            if after not in self._state.jobs or after.content != job.content:
                raise ViolationError(f"after the last fault, {job.content} was saved, and {after.content} resumed")

    def _add_copy(self, site: Site, copy: Site) -> None:
        copy.known = find_checkpoints(copy.place)
        if lost := site.contents - copy.contents:
            raise ViolationError(f"the copy lacks {lost}")
        self._state.sites.append(copy)

    def _end_jobs(self, site: Site) -> None:
        for jobs in (self._state.jobs, self._state.stopped):
            for job in [job for job in jobs if job.place.name == site.place.name]:
                job.kill()
                jobs.remove(job)
        for job, content in [pin for pin in self._state.pins if pin[0].place.name == site.place.name]:
            job.kill()
            self._state.pins.remove((job, content))

    def _new_job(self, site: Site, host: str = "") -> Job:
        self._numbers += 1
        tier = None
        if host:
            site.had_tiers = True
            path = self._base / f"tier-{self._state.sites.index(site)}-{host}"
            tier = site.tiers.setdefault(host, Tier(path)).path
        drain_every = self.random.choice([1, 2, NEVER])
        process = self._state.hosts.start(self._numbers, site.place, tier, host, drain_every)
        return Job(self._numbers, site.place, tier, host, process)

    def _any_site(self, *, with_known: bool = False) -> Site:
        return self.random.choice([site for site in self._state.sites if site.known or not with_known])

    def _any_job(self) -> Job:
        return self.random.choice(self._idle())

    def _idle(self) -> list[Job]:
        return [job for job in self._state.jobs if len(job.content) < _MOST_STEPS]

    def _tag(self, job: Job, content: Content) -> str:
        return f"r{job.run or job.number}s{len(content)}"

    def _trap(self, action: str) -> Trap:
        return Trap(action, self.random.randrange(_CALLS))

    def _next_step(self) -> int:
        self._steps += 1
        return self._steps

    def _next_name(self) -> str:
        return f"run{self.random.getrandbits(48):012x}"


def _list_orders(keys: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield all orders of places in which the keys ascend: several if some keys are equal."""
    groups = [[place for place, key in enumerate(keys) if key == each] for each in sorted(set(keys))]
    for orders in itertools.product(*(itertools.permutations(group) for group in groups)):
        yield tuple(itertools.chain.from_iterable(orders))


_EVENTS: dict[str, Callable[[History], None]] = {
    "start": History.start,
    "start with tier": History.start_with_tier,
    "start on another host": History.start_on_another_host,
    "resume(tag)": History.resume_tag,
    "same command": History.same_command,
    "requeue": History.requeue,
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
EVENTS: Sequence[str] = tuple(_EVENTS)

_NEED_JOB = frozenset(
    {
        *("save", "save twice", "overwrite", "retention", "kill", "kill in save", "stop in save"),
        *("copy while saving", "fork", "second object"),
    }
)
_NEED_CHECKPOINT = frozenset(
    {"resume(tag)", "requeue", "rollback", "prune", "copy", "copy without history", "move", "remove run"}
)
_NEED_ROOM = frozenset({"copy", "copy without history", "copy while saving"})
_START_JOB = frozenset(
    {
        *(
            "start",
            "start with tier",
            "start on another host",
            "resume(tag)",
            "same command",
            "requeue",
            "save without load",
        ),
        *("stop in resume", "two launchers", "read-only"),
    }
)
