"""The history of a run directory: which job continued which checkpoint, and so which checkpoints are current.

A job that trains claims an *incarnation*: a number that no other job of the directory has. It says which checkpoint it
continues, its *base*. So the history knows the *line* of each run: the earlier incarnations, each up to the sequence
number that the next one went on from. A checkpoint is *current* if it is of the newest incarnation of its run, or in
its line. All others are *abandoned*: a rollback left them, or a job saved them after another one had continued the run.
For example, a run has ``step_10`` to ``step_30``, and a second job resumes ``step_20`` and saves ``step_25``. Then
``step_30`` is abandoned.

This module is pure. :mod:`rankless.run.claims` stores one :class:`Entry` for each claim; the newest has the whole
history, so a reader needs only that one. Ancestry never follows checkpoints, because retention removes them.

Rank 0 decides by it in saves and loads, and other ranks get the decision in a vote. :class:`Entry` and its parts are
stored as JSON: fields keep their names and defaults.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from rankless.ondisk.manifest import LARGEST
from rankless.process.prepared_types import prepared

#: The incarnations that a line keeps although no checkpoint of theirs was listed: a host may still have one.
_KEPT_IN_LINE = 64

#: The runs that the history keeps although no checkpoint of theirs was listed.
_KEPT_RUNS = 64

#: The incarnations of a line, each with the last sequence number that counts, by ascending numbers.
Line = tuple[tuple[int, int], ...]


class KnownCheckpoint(Protocol):
    """A checkpoint as the history sees it: of a manifest, a list, or a local tier."""

    @property
    def id(self) -> str:
        """The id of the checkpoint."""

    @property
    def run(self) -> str:
        """The id of its run."""

    @property
    def incarnation(self) -> int:
        """The number of the incarnation that saved it; 0 if that is unknown."""

    @property
    def sequence(self) -> int:
        """Its sequence number."""


class FoundCheckpoint(KnownCheckpoint, Protocol):
    """A checkpoint that a directory has."""

    @property
    def step(self) -> float | None:
        """Its training step, if it has one."""


S = TypeVar("S", bound=KnownCheckpoint)


class TaggedCheckpoint(KnownCheckpoint, Protocol):
    """A checkpoint that has a tag, or is about to get one."""

    @property
    def age(self) -> tuple[int, float, str]:
        """The key that sorts checkpoints from the oldest to the latest."""


def is_newer(existing: TaggedCheckpoint, saved: TaggedCheckpoint) -> bool:
    """Return whether a checkpoint that has a tag is newer than one that would replace it.

    Saves, drains and publications of pointers ask. Of one run, the incarnations decide: a superseded job may have
    begun its save a moment before the newer job did, and clocks of hosts differ.
    """
    if existing.run == saved.run and 0 < existing.incarnation != saved.incarnation > 0:
        return existing.incarnation > saved.incarnation
    return existing.age > saved.age


class Branch(msgspec.Struct, frozen=True, omit_defaults=True):
    """The knowledge of the history about one run.

    ``incarnation`` is the newest, and ``sequence`` the number that its claim counts as: its first checkpoint gets that
    number at least. ``line`` are the incarnations before it. ``rolled_back_to`` is the id of the checkpoint that the
    line went back to last, or that a job has named, which may have been the latest one then; or "".
    """

    incarnation: int
    sequence: int
    line: Line = ()
    rolled_back_to: str = ""


class Job(msgspec.Struct, frozen=True, omit_defaults=True):
    """The job that has claimed an incarnation. Its ranks share the ``token``; the rest is for messages.

    ``command`` is the command that has claimed it without a job, such as ``rankless rollback``; else empty. ``tier`` is
    the folder of its local tier on the host of rank 0; empty without one. ``groups`` is the name that all replica
    groups of the job have passed; else empty.
    """

    token: str
    host: str = ""
    pid: int = 0
    time: float = 0.0
    command: str = ""
    tier: str = ""
    groups: str = ""


@prepared
class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """The history after one claim. ``runs`` are the branches by the ids of their runs.

    ``number`` is the incarnation that ``job`` has claimed. ``run`` is its run. It is empty if the job has only
    announced that it will look into the local tiers of its hosts: older jobs change nothing there from then on.
    ``announced`` is the number of the newest announcement.
    """

    number: int = 0
    job: Job = Job("")
    run: str = ""
    announced: int = 0
    runs: Mapping[str, Branch] = {}

    def is_current(self, saved: KnownCheckpoint) -> bool:
        """Return whether a checkpoint is current.

        If nothing is known of its run, it is; so is one of an incarnation above all entries: its own entry is lost.
        """
        branch = self.runs.get(saved.run)
        if branch is None or saved.incarnation == branch.incarnation or saved.incarnation > self.number:
            return True
        return dict(branch.line).get(saved.incarnation, -1) >= saved.sequence

    def is_current_number(self, incarnation: int, sequence: int) -> bool:
        """Return like :meth:`is_current` if the run is not known: no two runs have an incarnation of one number.

        Of an incarnation that no run knows, nothing is current: its run was removed.
        """
        if incarnation > self.number:
            return True
        return any(
            branch.incarnation == incarnation or dict(branch.line).get(incarnation, -1) >= sequence
            for branch in self.runs.values()
        )

    def has_continued(self, run: str, incarnation: int) -> bool:
        """Return whether a later incarnation of a run was claimed."""
        branch = self.runs.get(run)
        return branch is not None and branch.incarnation > incarnation

    def has_other_branch(self, run: str, branch: Branch) -> bool:
        """Return whether a branch of a run is newer than the branch that this entry knows of that run."""
        known = self.runs.get(run)
        return known is not None and branch.incarnation > known.incarnation

    def find_latest(self, found: Sequence[S]) -> S | None:
        """Return the latest of the checkpoints of a directory; ``None`` if none is current.

        It is that with the highest sequence number of the run which has the highest one among claims and current
        checkpoints. ``found`` are sorted from the oldest to the newest.
        """
        newest = {saved.run: (place, saved) for place, saved in enumerate(found) if self.is_current(saved)}
        ranked = sorted((self._sequence_of(saved), place) for place, saved in newest.values())
        return found[ranked[-1][1]] if ranked else None

    def _sequence_of(self, newest: KnownCheckpoint) -> int:
        branch = self.runs.get(newest.run)
        return newest.sequence if branch is None else max(branch.sequence, newest.sequence)

    def next_number(self, above: int, found: Collection[KnownCheckpoint]) -> int:
        """Return the number of the next entry, which is larger than ``above``: an entry may be corrupt.

        A directory may also have lost its entries, but not its checkpoints.
        """
        return max([self.number, above, *(saved.incarnation for saved in found)]) + 1

    def next_sequence(self, found: Collection[KnownCheckpoint], run: str = "") -> int:
        """Return the sequence number of the next checkpoint of ``run``: higher than all others in the directory.

        The number of its own claim is free.
        """
        claimed = [branch.sequence + (name != run) for name, branch in self.runs.items()]
        return min(max([*claimed, *(saved.sequence + 1 for saved in found), 1]), LARGEST)

    def announce(self, above: int, job: Job) -> Entry:
        """Return the entry of a job that will look into the local tiers of its hosts, with a number above ``above``."""
        number = self.next_number(above, ())
        return msgspec.structs.replace(self, number=number, job=job, run="", announced=number)

    def begin_run(self, run: str, job: Job, found: Collection[KnownCheckpoint], *, above: int = 0) -> Entry:
        """Return the entry of a job that continues nothing. It cuts and supersedes nothing."""
        return self._claim(run, Branch(self.next_number(above, found), self.next_sequence(found)), job, found)

    def continue_run(
        self,
        base: KnownCheckpoint,
        line: Line,
        job: Job,
        found: Collection[KnownCheckpoint],
        *,
        is_rollback: bool,
        newest: int | None = None,
        above: int = 0,
    ) -> Entry:
        """Return the entry of a job that continues a checkpoint. ``line`` is the base's line: see :meth:`line_to`.

        ``newest`` is the highest sequence number of the run when the job loaded the base as the latest checkpoint;
        ``None`` if the job has named the base.
        """
        before = self.runs.get(base.run)
        rolled_back_to = base.id if is_rollback else "" if before is None else before.rolled_back_to
        sequence = self.next_sequence(found) if newest is None else self._sequence_after(base.run, newest, found)
        branch = Branch(self.next_number(above, [*found, base]), sequence, line, rolled_back_to)
        return self._claim(base.run, branch, job, found)

    def _sequence_after(self, run: str, newest: int, found: Collection[KnownCheckpoint]) -> int:
        """Return the number of a claim that continues the checkpoint which was the latest a while ago.

        If another run was saved or continued since, that run stays the latest until this job saves.
        """
        own = max(newest, self.runs[run].sequence if run in self.runs else 0)
        claimed = [branch.sequence for name, branch in self.runs.items() if name != run]
        saved = [other.sequence for other in found if other.run != run and self.is_current(other)]
        return own if max([*claimed, *saved], default=0) > own else self.next_sequence(found)

    def _claim(self, run: str, branch: Branch, job: Job, found: Collection[KnownCheckpoint]) -> Entry:
        runs = {name: other for name, other in self.runs.items() if name != run}
        present = {saved.run for saved in found}
        empty = [name for name in runs if name not in present]
        for name in empty[: max(0, len(empty) - _KEPT_RUNS)]:
            del runs[name]
        return Entry(branch.incarnation, job, run, self.announced, {**runs, run: branch})

    def line_to(self, base: KnownCheckpoint, found: Collection[FoundCheckpoint]) -> Line:
        """Return the line of an incarnation that continues a current checkpoint.

        Of incarnations with lost entries, it has all older checkpoints, as a reader of manifests alone does, but none
        of a later step: the run went back to before that.
        """
        branch = self.runs.get(base.run, Branch(0, 0))
        step = next((saved.step for saved in found if saved.id == base.id), None)
        unknown: dict[int, int] = {}
        for saved in sorted(found, key=lambda saved: saved.sequence):
            is_before = saved.sequence < base.sequence and (step is None or saved.step is None or saved.step <= step)
            if saved.run == base.run and branch.incarnation <= saved.incarnation < base.incarnation and is_before:
                unknown[saved.incarnation] = saved.sequence
        return cut_line((*branch.line, *sorted(unknown.items())), base, found)


def cut_line(line: Line, base: KnownCheckpoint, found: Collection[KnownCheckpoint]) -> Line:
    """Return a line up to a base. Incarnations without a checkpoint are left out, but for the newest ones."""
    before = [step for step in line if step[0] < base.incarnation]
    present = {saved.incarnation for saved in found if saved.run == base.run}
    kept = [step for step in before[:-_KEPT_IN_LINE] if step[0] in present] + before[-_KEPT_IN_LINE:]
    return (*kept, (base.incarnation, base.sequence))
