"""What must be so after a job has loaded or saved: the judgement of its reply, from what the oracle knows."""

from __future__ import annotations

from collections.abc import Collection

from campaigns.run_histories.jobs import Job
from campaigns.run_histories.oracle import (
    Content,
    Head,
    World,
    claimed,
    content_of,
    latest_of,
    longest_prefix,
    owner_of,
    saved,
    saved_in_place,
    worlds_that_load,
)
from campaigns.run_histories.state import Site, State, ViolationError
from campaigns.run_histories.trainer import Reply

#: The errors of a job that another one has replaced.
_SUPERSEDED = frozenset({"SupersededError", "StateError", "TagExistsError"})


class Judge:
    """The judgement of replies. Each method raises ``ViolationError``, or notes in the state what is so now."""

    def __init__(self, state: State) -> None:
        self._state = state

    def judge_resume(
        self, site: Site, job: Job, tag: str | None, reply: Reply | str, *, has_slept: bool = False, claims: bool = True
    ) -> None:
        """Check what a job has loaded. ``has_slept``: others may have gone on between its begin and its end."""
        must = self._state.must(site, job.host)
        self._state.look(site, set())
        named = next((found.content for found in site.known if found.tag == tag), ())
        self._state.note(
            f"job {job.number}{' with tier ' + job.host if job.host else ''} in {site.place.name} "
            f"resumes {tag}: {reply}"
        )
        if isinstance(reply, str):
            self._note_cut_resume(site, job, named, must, tag, reply)
            return
        certain = not has_slept and not job.is_doubtful
        if certain and must and not site.is_removed:
            self._state.counts.resumes += 1
            self._state.counts.resumed += not reply.error
        if reply.error:
            self._judge_failed_resume(site, job, tag, reply, has_slept=has_slept)
            return
        self._state.jobs.append(job)
        if tag and reply.content == named and not any("went back to" in warning for warning in reply.warnings):
            run = self._state.run_of[named]
            self._check_goes_back_once(site, run, named, must)
            site.went_back[run] = named
            site.worlds = {claimed(world, run, named, job.number) for world in site.worlds or {()}}
            site.unsure_runs -= {run}
        else:
            site.worlds = self._worlds_after(site, job, reply.content, must, keeps=has_slept or not claims)
        run = self._state.run_of[reply.content]
        job.content, job.run, job.is_challenged, job.is_doubtful = reply.content, run, False, has_slept
        job.has_claimed = claims
        if claims:
            self._state.challenge(site, job, run, certain=certain)

    @staticmethod
    def _check_goes_back_once(site: Site, run: int, named: Content, must: Collection[Content]) -> None:
        """Check that a command that is started again does not go back again."""
        later = [longest_prefix(content_of(world, run), must) for world in site.worlds or ()]
        if site.went_back.get(run) == named and later and all(len(content) > len(named) for content in later):
            raise ViolationError(f"the run went back to {named} already, and has lost {later} by the same command")

    def _worlds_after(
        self, site: Site, job: Job, content: Content, must: Collection[Content], *, keeps: bool
    ) -> set[World]:
        """Return what is possible after a load of the latest checkpoint. ``keeps``: perhaps it has claimed nothing."""
        if content not in self._state.run_of:
            raise ViolationError(f"a resume got {content}, which was never saved")
        run = self._state.run_of[content]
        is_unsure, site.unsure_runs = run in site.unsure_runs, site.unsure_runs - {run}
        if site.worlds is None:
            return {(Head(run, content, job.number),)}
        if is_unsure:
            new = {claimed(world, run, content, job.number) for world in site.worlds}
            return new | (site.worlds if keeps else set())
        fits = list(worlds_that_load(site.worlds, content, must, any_run=site.had_tiers))
        if not fits and not job.is_doubtful and not keeps:
            raise ViolationError(f"a resume got {content}, and should be one of {self._describe(site, must)}")
        new = {claimed(world, run, content, job.number) for world, fitting in fits if fitting == run}
        return new | (site.worlds if keeps else set())

    def _judge_failed_resume(self, site: Site, job: Job, tag: str | None, reply: Reply, *, has_slept: bool) -> None:
        self._state.counts.errors[reply.error] = self._state.counts.errors.get(reply.error, 0) + 1
        is_empty = reply.error == "EmptyRunError" and (not self._state.must(site, job.host) or has_slept)
        if is_empty and not tag:
            job.is_challenged = False
            self._state.challenge(site, job, 0, certain=False)
            self._state.jobs.append(job)
            return
        job.kill()
        is_late = has_slept and (reply.error in _SUPERSEDED or job.has_lost_tier)
        is_gone = reply.error == "NoCheckpointError" and bool(tag)
        if not (is_empty or is_late or is_gone or self.may_fail(site, job.host, reply)):
            raise ViolationError(f"a resume failed: {reply.error}: {reply.message}")

    def _note_cut_resume(
        self, site: Site, job: Job, named: Content, must: Collection[Content], tag: str | None, reply: str
    ) -> None:
        worlds = site.worlds or set()
        if named:
            site.went_back.pop(self._state.run_of[named], None)
        more = set()
        for world in worlds:
            if named:
                more.add(claimed(world, self._state.run_of[named], named, job.number))
            for head in world:
                possible = {known for known in must if head.content[: len(known)] == known} | {head.content}
                more |= {claimed(world, head.run, content, job.number) for content in possible if content}
        if site.worlds is not None:
            site.worlds = worlds | more
        for other in [*self._state.jobs, *self._state.stopped]:
            other.is_doubtful |= other.place.name == site.place.name
        if reply == "stopped":
            job.is_doubtful = True
            job.awaited = lambda reply, has_slept: self._judge_awakened(site, job, tag, reply, has_slept=has_slept)
            self._state.stopped.append(job)

    def _judge_awakened(self, site: Site, job: Job, tag: str | None, reply: Reply | str, *, has_slept: bool) -> None:
        self._state.jobs.remove(job)
        self.judge_resume(site, job, tag, reply, has_slept=has_slept)

    def judge_save(
        self,
        site: Site,
        job: Job,
        content: Content,
        reply: Reply | str,
        *,
        removable: set[Content],
        has_slept: bool = False,
    ) -> None:
        """Check what a save has done. ``removable`` are the checkpoints that it may replace, or retire by its policy.

        ``has_slept``: others may have gone on between its begin and its end.
        """
        run = job.run or job.number
        self._state.run_of[content] = run
        self._state.note(
            f"job {job.number} in {site.place.name} saves {content}, "
            f"{'challenged' if job.is_challenged else 'doubtful' if job.is_doubtful else 'sure'}: {reply}"
        )
        self._state.look(site, removable)
        if isinstance(reply, str):
            self._note_cut_save(site, job, content, reply, removable)
            return
        if reply.error:
            self._state.counts.errors[reply.error] = self._state.counts.errors.get(reply.error, 0) + 1
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
            self._state.challenge(site, job, run, certain=True)
        job.content, job.run, job.has_claimed = content, run, True
        for other in [*self._state.jobs, *self._state.stopped]:
            # One that has loaded just this checkpoint continues it.
            is_behind = other.run == run and not other.has_claimed and other.content != content
            if is_behind and other.place.name == site.place.name and not job.is_challenged:
                other.is_challenged |= job.tier is None and not job.is_doubtful
                other.is_doubtful = True
        for tier in site.tiers.values():
            if tier.path == job.tier:
                tier.acked = content

    def _judge_failed_save(self, site: Site, job: Job, content: Content, reply: Reply) -> None:
        is_superseded = (job.is_challenged or job.is_doubtful) and reply.error in _SUPERSEDED
        is_tier = job.tier is not None and reply.error in {"StateError", "StorageError", "SupersededError"}
        is_taken = any(f"/{found.tag} exists" in reply.message for found in site.known)
        if site.is_merged and is_taken and reply.error == "TagExistsError":  # perhaps by the other copy
            return
        if not is_superseded and not (is_tier and (job.is_doubtful or job.run == 0 or site.is_removed)):
            raise ViolationError(f"a save of job {job.number} failed: {reply.error}: {reply.message}")
        if (content in site.contents or job.tier) and site.worlds is not None:  # it may only not be drained
            site.worlds |= {saved(world, job.run or job.number, content, job.number) for world in site.worlds}

    def _note_cut_save(self, site: Site, job: Job, content: Content, reply: str, removable: set[Content]) -> None:
        run = job.run or job.number
        if job in self._state.jobs:
            self._state.jobs.remove(job)
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
        for other in [*self._state.jobs, *self._state.stopped]:
            if other.place.name == site.place.name and not (job.has_claimed and other.has_claimed):
                other.is_doubtful = True
        if reply == "stopped":
            # A superseded job retires nothing, unless it had published its checkpoint and was about to remove others.
            is_published = content in site.contents
            job.awaited = lambda reply, has_slept: self.judge_save(
                site,
                job,
                content,
                reply,
                removable=removable if is_published or not job.is_challenged else set(),
                has_slept=has_slept,
            )
            self._state.stopped.append(job)

    def may_fail(self, site: Site, host: str, reply: Reply) -> bool:
        """Return whether a load is right to fail: the table of the history names the error."""
        if site.is_removed and reply.error in {"InvalidArgumentError", "TagExistsError"}:
            return True
        if reply.error == "TagExistsError" and host and site.place.spared:
            return True  # two jobs had one number in their tiers, and the other one drained its checkpoint first
        if reply.error not in {"StateError", "NoCheckpointError", "SupersededError", "EmptyRunError"}:
            return False
        if site.worlds is None or site.is_removed:
            return True
        existing = self._state.must(site, host)
        return not existing or any(not latest_of(world, existing, any_run=site.had_tiers) for world in site.worlds)

    def _describe(self, site: Site, must: Collection[Content]) -> list[str]:
        return [f"{latest_of(world, must, any_run=site.had_tiers)} of {world}" for world in site.worlds or ()]
