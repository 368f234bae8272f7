"""The tree of the incarnations of each run: which one continued which checkpoint, and which one abandoned others.

This module is pure. An entry of the history knows the branch of each run after one claim, so the branches of all
entries are the tree. Of an incarnation with a lost entry, the tree has the facts from lines of other branches, and no
job.

``rankless report``, ``rankless show`` and ``rankless ls --tree`` build the trees, each in one process. No save or load
decides by them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, pairwise, takewhile
from typing import NamedTuple

import msgspec

from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.history import Branch, Entry, Job


class Place(NamedTuple):
    """A place in a run: a sequence number of an incarnation. Its checkpoint may be removed."""

    incarnation: int
    sequence: int


class Incarnation(msgspec.Struct, frozen=True, kw_only=True):
    """An incarnation of a run, and its place in the tree.

    Attributes:
        number: Its number; 0 stands for the checkpoints of a run that have an unknown incarnation.
        job: The job that claimed it; ``None`` if its entry is lost, or was not read.
        base: The place that it goes on from; ``None`` if there is none, or if it is unknown.
        base_tag: The tag of the checkpoint there; empty if that is removed.
        begins: Whether it is known to have begun the run.
        checkpoints: Its checkpoints, oldest first.
        abandoned: The checkpoints that are not current since its claim.
        goes_back: Whether the run went back to an older checkpoint with it.
        is_empty: Whether it is known that it saved nothing.
    """

    number: int
    job: Job | None = None
    base: Place | None = None
    base_tag: str = ""
    begins: bool = False
    checkpoints: tuple[CheckpointInfo, ...] = ()
    abandoned: tuple[CheckpointInfo, ...] = ()
    goes_back: bool = False
    is_empty: bool = False


class RunTree(msgspec.Struct, frozen=True):
    """The incarnations of a run by ascending numbers, and the newest one. Each base is of an earlier one of them."""

    run: str
    incarnations: tuple[Incarnation, ...]
    newest: int

    @property
    def by_number(self) -> dict[int, Incarnation]:
        """The incarnations by their numbers."""
        return {one.number: one for one in self.incarnations}

    def ancestors_of(self, info: CheckpointInfo) -> list[CheckpointInfo]:
        """Return the checkpoints that led to one of the run, oldest first, and that one as the last.

        Before an incarnation with an unknown base, all older checkpoints count.
        """
        by_number, line = self.by_number, {info.incarnation: info.sequence}
        oldest = by_number[info.incarnation]
        while oldest.base is not None:
            line[oldest.base.incarnation] = oldest.base.sequence
            oldest = by_number[oldest.base.incarnation]
        if not oldest.begins:
            line |= {number: line[oldest.number] for number in by_number if number < oldest.number}
        led = [
            other
            for one in self.incarnations
            for other in one.checkpoints
            if other != info and other.sequence <= line.get(one.number, -1)
        ]
        return [*sorted(led, key=lambda other: (*other.age, other.tag)), info]

    def find_abandoning(self, info: CheckpointInfo) -> Incarnation | None:
        """Return the incarnation that abandoned a checkpoint; ``None`` if it is current, or if that is unknown."""
        return next((one for one in self.incarnations if info in one.abandoned), None)


def build_trees(entries: Iterable[Entry], infos: Sequence[CheckpointInfo]) -> list[RunTree]:
    """Return the trees of all runs that have a checkpoint; the run with the latest one is the last.

    ``infos`` are sorted as in a list: the latest is the last. Those that cannot be read are in no tree.
    """
    jobs: dict[int, Job] = {}
    branches: dict[str, dict[int, Branch]] = defaultdict(dict)
    for entry in entries:
        jobs[entry.number] = entry.job
        for run, branch in entry.runs.items():
            branches[run].setdefault(branch.incarnation, branch)
    places = {info.run: place for place, info in enumerate(infos) if info.status == "complete"}
    return [
        _Growth(
            run, jobs, branches[run], (info for info in infos if info.status == "complete" and info.run == run)
        ).tree
        for run in sorted(places, key=places.__getitem__)
    ]


class _Growth:
    """The knowledge that the tree of one run is made from."""

    def __init__(
        self, run: str, jobs: Mapping[int, Job], branches: Mapping[int, Branch], infos: Iterable[CheckpointInfo]
    ) -> None:
        self._jobs, self._branches = jobs, branches
        self._infos = sorted(infos, key=lambda info: (*info.age, info.tag))
        by_place = sorted(self._infos, key=lambda info: info.is_copy, reverse=True)
        self._at = {Place(info.incarnation, info.sequence): info for info in by_place}
        self._saved: dict[int, list[CheckpointInfo]] = defaultdict(list)
        for info in self._infos:
            self._saved[info.incarnation].append(info)
        lines = {number: dict(branch.line) for number, branch in branches.items()} | self._find_lost_lines()
        self._lines = {number: lines[number] for number in sorted(lines)}
        self._next = dict(pairwise(sorted(branches)))
        self._previous = {after: before for before, after in self._next.items()}
        self._before = _places_before(branches.values())
        self._bases = self._find_bases({*branches, *(info.incarnation for info in self._infos)})
        self._abandoned: dict[int, list[CheckpointInfo]] = defaultdict(list)
        for info in self._infos:
            if not info.is_current and (number := self._find_abandoning(info)) is not None:
                self._abandoned[number].append(info)
        self.tree = RunTree(run, tuple(self._describe(number) for number in sorted(self._bases)), max(self._bases))

    def _find_lost_lines(self) -> dict[int, dict[int, int]]:
        """Return the lines of incarnations with lost entries: later lines begin with them.

        Only places in incarnations that have checkpoints are kept: a line may be long.
        """
        lost: dict[int, dict[int, int]] = {}
        for branch in self._branches.values():
            line = {number: sequence for number, sequence in branch.line if number in self._saved}
            for place, number in enumerate(line):
                if number not in self._branches and number not in lost:
                    lost[number] = dict(islice(line.items(), place))
        return lost

    def _find_bases(self, numbers: set[int]) -> dict[int, Place | None]:
        """Return the bases of incarnations, and of all that they are based on."""
        bases: dict[int, Place | None] = {}
        while numbers:
            number = numbers.pop()
            bases[number] = base = self._find_base(number)
            if base is not None and base.incarnation not in bases:
                numbers.add(base.incarnation)
        return bases

    def _find_base(self, number: int) -> Place | None:
        branch = self._branches.get(number)
        place = self._before.get(number) if branch is None else Place(*branch.line[-1]) if branch.line else None
        # An entry may be corrupt. An incarnation continues only one with a lower number, so the tree has no circle.
        return place if place is not None and 0 <= place.incarnation < number else None

    def _find_abandoning(self, info: CheckpointInfo) -> int | None:
        """Return the first incarnation since which a checkpoint is not current any more."""
        later = [number for number in reversed(self._lines) if number > info.incarnation]
        without = takewhile(lambda number: self._lines[number].get(info.incarnation, -1) < info.sequence, later)
        return min(without, default=None)

    def _describe(self, number: int) -> Incarnation:
        base, branch = self._bases[number], self._branches.get(number)
        return Incarnation(
            number=number,
            job=self._jobs.get(number),
            base=base,
            base_tag=self._at[base].tag if base in self._at else "",
            begins=branch is not None and not branch.line,
            checkpoints=tuple(self._saved[number]),
            abandoned=tuple(self._abandoned[number]),
            goes_back=self._goes_back(number),
            is_empty=self._is_empty(number),
        )

    def _goes_back(self, number: int) -> bool:
        """Return whether an incarnation abandoned checkpoints that were there.

        Checkpoints that a superseded job saved later do not count.
        """
        branch, before = self._branches.get(number), self._previous.get(number)
        own = min((info.sequence for info in self._saved[number]), default=0)
        claimed = own if branch is None else branch.sequence
        if any(info.sequence < claimed for info in self._abandoned[number]):
            return True
        place = self._bases[number]
        if branch is None or (place is not None and branch.sequence <= place.sequence + 1):  # nothing was later
            return False
        # The abandoned checkpoints may be removed. The entry before may be lost, so the noted one may be older.
        has_noted = before is not None and branch.rolled_back_to not in {"", self._branches[before].rolled_back_to}
        base = self._at.get(place or Place(0, -1))
        return has_noted and (base is None or base.id == branch.rolled_back_to)

    def _is_empty(self, number: int) -> bool:
        """Return whether the next incarnation found nothing of it: that did not go back, and has the same base."""
        after = self._next.get(number)
        return after is not None and self._bases[number] == self._bases[after] and not self._goes_back(after)


def _places_before(branches: Iterable[Branch]) -> dict[int, Place]:
    """Return the places that are before incarnations in lines: there their bases are if their entries are lost."""
    return {after: Place(*before) for branch in branches for before, (after, _) in pairwise(branch.line)}
