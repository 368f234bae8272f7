"""The claims of jobs in the history of a run directory, and one job's knowledge of it.

A job claims by an entry of the history (:mod:`rankless.run.stored_history`), which no other job can create. Rank 0 of a
job claims; the vote of the save tells all ranks.

:mod:`rankless.run.catalog` claims in a save (inside the vote on the preparation) and after a load,
:mod:`rankless.tier.job` in a load with a local tier, and ``rankless rollback`` in a process of its own.
"""

from __future__ import annotations

import mmap
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from rankless.errors import StateError, SupersededError
from rankless.observe.warning import warn_caller
from rankless.ondisk.manifest import EditRecord
from rankless.process.prepared_types import prepared
from rankless.run.history import Entry, FoundCheckpoint, Job, KnownCheckpoint, cut_line
from rankless.run.stored_history import add_entry, find_entry, has_entry, read_newest
from rankless.storage import posix

#: The most seconds that the clocks of two hosts may differ by.
_MOST_CLOCK_DIFFERENCE = 300.0


@prepared
class LoadedBase(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that a job has loaded, of a run directory or by its own path.

    ``newest`` is the highest sequence number of the current checkpoints of its run then, or ``None`` if the caller has
    named the checkpoint. ``seen`` is the newest incarnation of the run then. ``token`` is the job's token: rank 0's,
    which has selected the checkpoint. ``resumes``: the training goes on from it. Without an ``id`` the job begins the
    run anew: all earlier checkpoints of the run are abandoned. ``edits`` are the edits that have made it.
    """

    id: str
    run: str
    incarnation: int
    sequence: int
    tag: str
    newest: int | None
    token: str
    seen: int = 0
    resumes: bool = False
    edits: tuple[EditRecord, ...] = ()

    @classmethod
    def of(cls, saved: KnownCheckpoint, tag: str, newest: int | None, token: str, seen: int = 0) -> LoadedBase:
        """Return the base for a checkpoint that a job has loaded."""
        return cls(
            id=saved.id,
            run=saved.run,
            incarnation=saved.incarnation,
            sequence=saved.sequence,
            tag=tag,
            newest=newest,
            token=token,
            seen=seen,
        )


class Claim(msgspec.Struct, frozen=True):
    """The incarnation that a job has claimed."""

    run: str
    incarnation: int


class Numbering:
    """The highest sequence number that this process has given to a checkpoint in a local tier of a run directory.

    Processes that are forked from it share the number: they save as a part of its job, and no list of a directory in
    memory shows a checkpoint that another one has saved if that was removed.
    """

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 8)

    @property
    def highest(self) -> int:
        """The highest number that any of these processes has noted."""
        return int.from_bytes(self._shared[:], "little")

    def note(self, sequence: int) -> None:
        """Note the sequence number of a checkpoint."""
        self._shared[:] = max(self.highest, sequence).to_bytes(8, "little")


#: The numberings of this process. The tier of a directory may be ahead of it, also when no object uses it any more.
_numberings: dict[Path, Numbering] = {}


def numbering_of(run: Path) -> Numbering:
    """Return the numbering of a run directory in this process. Links to it lead to the same."""
    return _numberings.setdefault(run.resolve(), Numbering())


class JobHistory(msgspec.Struct):
    """The knowledge of one job about the history of a run directory. Its objects and ranks share it.

    Attributes:
        token: A text that no other job has.
        base: The checkpoint that the job has loaded and not continued yet.
        claim: The incarnation that it has claimed.
        runs: The runs that it has saved or loaded, in any directory: in a copy of that it continues them, too.
        sequence: The highest sequence number that it has saved or loaded here.
        point: The incarnation and the sequence number of the checkpoint that its state goes on from.
        newest: The id and the tag of that checkpoint.
        numbering: The numbers of its process in local tiers, which no list shows.
        command: The command that claims without a job; else empty.
        tier: The folder of the local tier that it claims with; else empty.
        groups: The name of the job, if its replica groups hold the same state and any of them may save; else empty.
        edits: The edits that have made its state: its checkpoints name them.
        began: When this process began to look at the run directory, in seconds since 1970.
    """

    token: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))
    base: LoadedBase | None = None
    claim: Claim | None = None
    runs: set[str] = msgspec.field(default_factory=set)
    sequence: int = 0
    point: tuple[int, int] = (0, 0)
    newest: tuple[str, str] = ("", "")
    numbering: Numbering = msgspec.field(default_factory=Numbering)
    command: str = ""
    tier: str = ""
    groups: str = ""
    edits: tuple[EditRecord, ...] = ()
    began: float = msgspec.field(default_factory=time.time)

    def note_loaded(self, base: LoadedBase, *, resumes: bool) -> None:
        """Note the loaded checkpoint. If the training goes on from it, the next save continues it.

        Other loads, such as for an evaluation, change nothing for a job that saves already.
        """
        self.runs.add(base.run)
        self.sequence = max(self.sequence, base.sequence)
        if resumes or (self.claim is None and self.base is None):
            known = self.base if self.base is not None and self._completes(base) else base
            self.base, self.claim, self.token = msgspec.structs.replace(known, resumes=resumes), None, base.token
            self.point, self.newest = (base.incarnation, base.sequence), (base.id, base.tag)
            self.edits = base.edits

    def _completes(self, base: LoadedBase) -> bool:
        """Return whether a load by name completes an earlier one, which may have selected the latest checkpoint.

        A framework reads its own state from the latest checkpoint first, and then the model and the optimizer by the
        path of that.
        """
        first = self.base
        return first is not None and not first.resumes and (first.id, base.newest) == (base.id, None)

    def abandons(self, saved: KnownCheckpoint, *, is_current: bool) -> bool:
        """Return whether a checkpoint of the job's run is abandoned, or will be when the job saves."""
        if self.base is not None:
            return saved.run == self.base.run and (not is_current or saved.sequence > self.base.sequence)
        return self.claim is not None and saved.run == self.claim.run and not is_current

    def note_saved(self, run: str, incarnation: int, sequence: int, newest: tuple[str, str]) -> None:
        """Note the identity of a checkpoint that the job saves; ``newest`` are its id and tag."""
        self.runs.add(run)
        self.sequence = max(self.sequence, sequence)
        if incarnation:
            self.claim, self.base, self.point = Claim(run, incarnation), None, (incarnation, sequence)
            self.newest = newest


def announce(run: Path, above: int) -> int:
    """Announce on rank 0 that a job will look into the tiers of its hosts. Return its number, above ``above``.

    :class:`~rankless.tier.job.TierJob` calls it before the ranks take over the folders of their hosts: the number must
    be in the run directory first.
    """
    me = describe_job(secrets.token_hex(8))
    return add_entry(run, lambda newest, highest: newest.announce(max(highest, above), me)).number


def describe_job(token: str, command: str = "", tier: str = "", groups: str = "") -> Job:
    """Return this process as a job, with a local ``tier`` or without, or as a ``command`` that claims without one."""
    return Job(token, posix.host_name(), os.getpid(), round(time.time(), 3), command, tier, groups)


#: The incarnations that this process has claimed, by the real path of the run directory: another object of the process
#: may use a link. Each with the token of its job. A forked process has them, too.
_claimed: dict[tuple[Path, Claim], str] = {}


def is_of_earlier_job(run: Path, claimed: Claim, job: JobHistory) -> bool:
    """Return whether an incarnation was claimed before this process began, and not at the same time by another group.

    The clocks of hosts may differ by some minutes.
    """
    entry = find_entry(run, claimed.incarnation)
    return entry is not None and entry.job.time < job.began - _MOST_CLOCK_DIFFERENCE


def warn_of_lost_history(run: Path, claimed: Claim) -> None:
    """Warn if the entry of a job, which is not listed, is really missing: a list may lag."""
    if not has_entry(run, claimed.incarnation):
        warn_caller(
            f"{run} has lost the history that this job has written into it: the directory was moved or removed "
            "meanwhile. What was saved before is where it was moved to; what is saved now is here"
        )


def _has_claimed(run: Path, claimed: Claim) -> bool:
    """Return whether this process has claimed an incarnation."""
    return (run.resolve(), claimed) in _claimed


def _allow(newest: Entry) -> None:
    """Raise nothing: nothing forbids the claim."""


def claim(
    run: Path,
    job: JobHistory,
    found: Sequence[FoundCheckpoint],
    check: Callable[[Entry], None] = _allow,
    *,
    seen: tuple[Entry, int] | None = None,
    warns: bool = True,
) -> tuple[Claim, Entry]:
    """Claim an incarnation for a job, on rank 0, unless other ranks of it have claimed one. Return the history too.

    ``found`` are the checkpoints of the directory, oldest first. ``seen`` is its history at that look: the newest entry
    that is not corrupt, and the highest number, which a store that ignores conditions would let this job take.
    ``check`` is called with the entry right before the new one, and raises an error if the claim is too late.
    ``warns``: warn of a rollback. Raises ``StateError`` if another job has continued the run since this one has loaded
    it.
    """
    before = Entry()
    own: tuple[Claim, str] | None = None

    def make(newest: Entry, highest: int) -> Entry | None:
        nonlocal before, own
        before, own = newest, _find_own_claim(run, job, newest)
        if own is not None:
            return None
        check(newest)
        return _make_claim(run, job, newest, found, above=highest)

    newest = add_entry(run, make, seen or read_newest(run)) or before
    claimed, token = own or (Claim(newest.run, newest.number), job.token)
    if own is None:
        if warns and job.base is not None and job.base.newest is None:
            abandoned = [one for one in found if before.is_current(one) and not newest.is_current(one)]
            went_back = job.base.run in before.runs and before.runs[job.base.run].rolled_back_to == job.base.id
            _warn_of_rollback(run, job.base.tag, abandoned, again=went_back)
        elif warns and job.base is not None and not job.tier:
            _warn_of_unread_tier(run, job.base, before)
    _claimed[run.resolve(), claimed] = token
    return claimed, newest


def _find_own_claim(run: Path, job: JobHistory, newest: Entry) -> tuple[Claim, str] | None:
    """Return the incarnation that other ranks of the job have claimed, and the token of their entry.

    A sub-group has continued the same checkpoint. A replica group has continued a checkpoint that leads to it, or, if
    this one has loaded nothing, has begun the run. A group that has named its checkpoint goes back to it, unless
    another group has.
    """
    base = job.base
    runs = sorted(newest.runs, key=lambda name: -newest.runs[name].incarnation) if job.groups else []
    for name in runs if base is None else [base.run]:
        branch = newest.runs.get(name)
        if branch is None:
            continue
        is_claimed_there = base is None or branch.line[-1:] == ((base.incarnation, base.sequence),)
        follows = job.groups and base is not None and base.newest is not None and newest.is_current(base)
        if not is_claimed_there and not follows:
            continue
        own = newest if newest.number == branch.incarnation else find_entry(run, branch.incarnation)
        if own is not None and (own.job.groups == job.groups if job.groups else own.job.token == job.token):
            return Claim(name, branch.incarnation), own.job.token
    return None


def _warn_of_rollback(run: Path, tag: str, abandoned: Sequence[KnownCheckpoint], *, again: bool) -> None:
    """Warn if checkpoints are abandoned. ``again``: perhaps a scheduler has started the same command again."""
    advice = ". To go on with them instead, load the latest checkpoint, and do not name this one" if again else ""
    if abandoned:
        warn_caller(
            f"the run in {run} goes back to {tag!r}{' again' if again else ''}: {len(abandoned)} later checkpoint(s) "
            f"are abandoned. They stay until a policy removes them, and can be loaded by their tags{advice}"
        )


def _warn_of_unread_tier(run: Path, base: LoadedBase, before: Entry) -> None:
    """Warn a job without a local tier if the job before it had one: checkpoints only there would be passed over."""
    branch = before.runs.get(base.run)
    if branch is None or _has_claimed(run, Claim(base.run, branch.incarnation)):
        return
    last = before if before.number == branch.incarnation else find_entry(run, branch.incarnation)
    if last is not None and last.job.tier:
        warn_caller(
            f"the job before this one had a local tier, {last.job.tier}. If it was killed, the tier may have a later "
            f"checkpoint than {run / base.tag}, from which this job goes on: to look there, start again with local="
        )


def _make_claim(run: Path, job: JobHistory, newest: Entry, found: Sequence[FoundCheckpoint], *, above: int) -> Entry:
    base = _find_base(job, newest, found)
    me = describe_job(job.token, job.command, job.tier, job.groups)
    if base is None or not base.id:
        return newest.begin_run(secrets.token_hex(8) if base is None else base.run, me, found, above=above)
    current = [saved for saved in found if saved.run == base.run and newest.is_current(saved)]
    last = max((saved.sequence for saved in current), default=base.sequence)
    if base.newest is not None and (last > base.newest or _was_claimed_since(run, base, newest)):
        raise StateError(
            f"another job has continued the run in {run} since {base.tag!r} was loaded: load the latest checkpoint, or "
            f"go back to {base.tag!r} by its tag"
        )
    # A command that names a checkpoint, and is started again, goes on, also if nothing was later at the first time.
    is_rollback = last > base.sequence or base.newest is None
    if newest.is_current(base):
        line = newest.line_to(base, found)
    else:
        is_rollback = True
        line = cut_line(_line_of(run, base), base, found)
    return newest.continue_run(base, line, me, found, is_rollback=is_rollback, newest=base.newest, above=above)


def _was_claimed_since(run: Path, base: LoadedBase, newest: Entry) -> bool:
    """Return whether another process has continued, or rolled back, the run since its latest checkpoint was loaded."""
    branch = newest.runs.get(base.run)
    if branch is None or branch.incarnation <= base.seen:
        return False
    return not _has_claimed(run, Claim(base.run, branch.incarnation))


def _line_of(run: Path, base: LoadedBase) -> tuple[tuple[int, int], ...]:
    """Return the line of an abandoned checkpoint, which its own entry knows."""
    own = find_entry(run, base.incarnation)
    branch = None if own is None else own.runs.get(base.run)
    return () if branch is None else branch.line


def _find_base(job: JobHistory, newest: Entry, found: Sequence[FoundCheckpoint]) -> LoadedBase | None:
    """Return the base of a job: the checkpoint that it loaded here, or the newest one of a run that it has loaded."""
    if job.base is not None:
        return job.base
    continued = [saved for saved in found if saved.run in job.runs and newest.is_current(saved)]
    return LoadedBase.of(continued[-1], "", None, job.token) if continued else None


def check_not_superseded(run: Path, newest: Entry, job: JobHistory) -> None:
    """Raise ``SupersededError`` if another job has continued the run of a job.

    If another object of this process has, and has not abandoned the checkpoint that this one goes on from, the job goes
    on with its incarnation.

    A save calls it on rank 0 in the vote on the preparation, and in its first vote if the tag is taken; an output in an
    object store calls it again around the publication.
    """
    claimed = job.claim
    if claimed is None:
        return
    if _is_overwritten(run, newest, claimed, job.groups):
        raise SupersededError(_describe_superseded(f"another job has continued the run in {run}", newest, claimed))
    if not newest.has_continued(claimed.run, claimed.incarnation):
        return
    branch = newest.runs[claimed.run]
    latest = Claim(claimed.run, branch.incarnation)
    incarnation, sequence = job.point
    is_abandoned = incarnation != branch.incarnation and dict(branch.line).get(incarnation, 0) < sequence
    if not is_abandoned and _has_claimed(run, latest):
        job.claim = latest
        return
    if is_abandoned:
        what = f"the run in {run} was continued from an earlier checkpoint than the last one of this job"
    else:
        what = f"another job has continued the run in {run}"
    raise SupersededError(_describe_superseded(what, newest, claimed))


def _is_overwritten(run: Path, newest: Entry, claimed: Claim, groups: str) -> bool:
    """Return whether the entry of a job's claim belongs to another job now, which has claimed at the same moment.

    A store that ignores conditions lets both write it. Another one of its replica ``groups`` is the same job.
    """
    if groups and newest.job.groups == groups:
        return False
    own = _claimed.get((run.resolve(), claimed), newest.job.token)
    return (newest.run, newest.number) == (claimed.run, claimed.incarnation) and newest.job.token != own


def _describe_superseded(what: str, newest: Entry, claimed: Claim) -> str:
    who = _name_claimant(newest.job) if newest.run == claimed.run else ""
    return f"{what}{who}: this job saves nothing any more. End it, or load the latest checkpoint"


def _name_claimant(job: Job) -> str:
    """Return which process has claimed an incarnation, and by which command, to end a message with it.

    For example, ``(process 42 on node-1)``.
    """
    return f"{f' by `{job.command}`' if job.command else ''} (process {job.pid} on {job.host})"
