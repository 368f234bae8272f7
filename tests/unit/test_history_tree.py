"""Tests the tree of a run's incarnations against what was noted when each of them was claimed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest

from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.history import Entry, Job, cut_line
from rankless.run.history_tree import Incarnation, Place, RunTree, build_trees

RUN = "a" * 16


@dataclass
class Story:
    """A directory to which things happen. It notes what each job continued, and which claim abandoned what."""

    entries: list[Entry] = field(default_factory=list)
    saved: list[CheckpointInfo] = field(default_factory=list)
    bases: dict[int, Place | None] = field(default_factory=dict)
    abandoned_by: dict[str, int] = field(default_factory=dict)

    @property
    def newest(self) -> Entry:
        return self.entries[-1] if self.entries else Entry()

    def begin(self, run: str = RUN) -> int:
        return self._claim(self.newest.begin_run(run, self._job(), self.saved), None)

    def resume(self, base: CheckpointInfo, *, is_rollback: bool = False) -> int:
        if self.newest.is_current(base):
            line = self.newest.line_to(base, self.saved)
        else:
            own = next((entry for entry in self.entries if entry.number == base.incarnation), Entry())
            line = cut_line(own.runs[base.run].line if base.run in own.runs else (), base, self.saved)
        entry = self.newest.continue_run(base, line, self._job(), self.saved, is_rollback=is_rollback)
        return self._claim(entry, Place(base.incarnation, base.sequence))

    def go_back(self, base: CheckpointInfo) -> int:
        return self.resume(base, is_rollback=True)

    def _job(self) -> Job:
        return Job("token", f"node-{len(self.entries) + 1}", 42, 1e9)

    def _claim(self, entry: Entry, base: Place | None) -> int:
        before = self.newest
        for info in self.saved:
            if before.is_current(info) and not entry.is_current(info):
                self.abandoned_by[info.id] = entry.number
            elif entry.is_current(info):
                self.abandoned_by.pop(info.id, None)
        self.entries.append(entry)
        self.bases[entry.number] = base
        return entry.number

    def save(self, incarnation: int, run: str = RUN) -> CheckpointInfo:
        sequence = self.newest.next_sequence(self.saved, run)
        tag = f"step_{sequence}"
        info = CheckpointInfo(
            tag,
            Path(tag),
            sequence=sequence,
            run=run,
            id=f"{sequence:016x}",
            saved_as=tag,
            incarnation=incarnation,
        )
        if not self.newest.is_current(info):  # of a superseded job, whose run was continued before
            self.abandoned_by[info.id] = next(
                entry.number for entry in self.entries if entry.run == run and entry.number > incarnation
            )
        self.saved.append(info)
        return info

    def listed(self) -> list[CheckpointInfo]:
        marked = [replace(info, is_current=self.newest.is_current(info)) for info in self.saved]
        return sorted(marked, key=lambda info: (info.is_current, *info.age))

    def trees(self, lost: Sequence[int] = ()) -> list[RunTree]:
        """The trees without some entries, and in the order in which they are read."""
        return build_trees([entry for entry in reversed(self.entries) if entry.number not in lost], self.listed())

    def tree(self, lost: Sequence[int] = ()) -> RunTree:
        (tree,) = self.trees(lost)
        return tree


def went_back(tree: RunTree) -> list[int]:
    return [one.number for one in tree.incarnations if one.goes_back]


def tags(infos: Sequence[CheckpointInfo]) -> list[str]:
    return [info.tag for info in infos]


@pytest.fixture
def story() -> Story:
    """A job that saved three checkpoints, and one that went back to the first of them."""
    story = Story()
    first = story.begin()
    saved = [story.save(first) for _ in range(3)]
    second = story.go_back(saved[0])
    story.save(second)
    return story


def test_each_incarnation_has_its_job_its_base_and_its_checkpoints(story: Story) -> None:
    first, second = story.tree().incarnations
    assert (first.job, first.begins, first.base, first.goes_back) == (
        Job("token", "node-1", 42, 1e9),
        True,
        None,
        False,
    )
    assert (second.job, second.begins) == (Job("token", "node-2", 42, 1e9), False)
    assert (second.base, second.base_tag, second.goes_back) == (Place(1, 1), "step_1", True)
    assert (tags(first.checkpoints), tags(second.checkpoints)) == (["step_1", "step_2", "step_3"], ["step_4"])
    assert (tags(first.abandoned), tags(second.abandoned)) == ([], ["step_2", "step_3"])
    assert story.tree().newest == 2


def test_of_random_histories_all_bases_are_right_and_each_abandoned_checkpoint_has_its_claim() -> None:
    for seed in range(60):
        dice, story = random.Random(seed), Story()
        story.begin()
        for _ in range(40):
            event = dice.choice(["save", "save", "save", "zombie", "resume", "back", "loss"])
            current = [info for info in story.listed() if info.is_current]
            if event == "save" or not story.saved:
                story.save(story.newest.number)
            elif event == "zombie":
                story.save(dice.choice([*story.bases]))
            elif event == "resume" and current:
                story.resume(current[-1])
            elif event == "back":
                story.go_back(dice.choice(story.saved))
            elif event == "loss" and len(story.saved) > 1:
                story.saved.remove(dice.choice(story.saved))
        tree = story.tree()
        assert {one.number: one.base for one in tree.incarnations} == story.bases, seed
        by = {info.id: one.number for one in tree.incarnations for info in one.abandoned}
        expected = {info.id: story.abandoned_by[info.id] for info in story.listed() if not info.is_current}
        assert by == expected, seed


def test_a_checkpoint_that_is_current_again_is_abandoned_by_nothing(story: Story) -> None:
    story.go_back(story.saved[2])
    assert [tags(one.abandoned) for one in story.tree().incarnations] == [[], [], ["step_4"]]
    assert went_back(story.tree()) == [2, 3]


def test_what_a_superseded_job_saves_later_is_no_rollback() -> None:
    story = Story()
    first = story.begin()
    saved = story.save(first)
    story.resume(saved)
    late = story.save(first)
    second = story.tree().incarnations[1]
    assert (second.abandoned, second.goes_back) == ((replace(late, is_current=False),), False)


def test_a_rollback_is_known_after_what_it_abandoned_is_removed(story: Story) -> None:
    del story.saved[1:3]
    assert went_back(story.tree()) == [2]
    story.resume(story.saved[-1])
    assert went_back(story.tree()) == [2]
    assert went_back(story.tree(lost=[2])) == []  # the next one only notes it


def test_the_tag_of_a_base_that_is_removed_is_not_known(story: Story) -> None:
    del story.saved[0]
    assert [(one.base, one.base_tag) for one in story.tree().incarnations] == [(None, ""), (Place(1, 1), "")]


def test_the_base_of_a_copy_has_the_tag_of_the_original(story: Story) -> None:
    for tag in ("a_copy", "z_copy"):
        story.saved.append(replace(story.saved[0], tag=tag))
    assert story.tree().incarnations[1].base_tag == "step_1"


def test_a_job_is_known_to_be_empty_if_the_next_one_found_nothing_of_it(story: Story) -> None:
    latest = story.listed()[-1]
    for _ in range(3):
        story.resume(latest)
    assert [one.is_empty for one in story.tree().incarnations] == [False, False, True, True, False]
    story.save(story.newest.number)
    story.go_back(latest)
    story.saved.pop()  # of the job before: it had a checkpoint
    assert [one.is_empty for one in story.tree().incarnations] == [False, False, True, True, False, False]


def test_runs_are_sorted_by_their_latest_checkpoints_and_empty_ones_are_left_out(story: Story) -> None:
    for run in ("b" * 16, "c" * 16):
        other = story.begin(run)
    story.save(other, "c" * 16)
    assert [tree.run for tree in story.trees()] == [RUN, "c" * 16]
    story.save(2)
    assert [tree.run for tree in story.trees()] == ["c" * 16, RUN]


def test_the_branch_of_a_lost_entry_is_in_those_of_other_runs(story: Story) -> None:
    story.begin("b" * 16)
    tree = story.tree(lost=[2])
    assert tree == without_job(story.tree(), 2)


def without_job(tree: RunTree, number: int) -> RunTree:
    known = tuple(msgspec.structs.replace(one, job=None) if one.number == number else one for one in tree.incarnations)
    return msgspec.structs.replace(tree, incarnations=known)


def test_the_base_of_an_incarnation_whose_entry_is_lost_is_in_later_lines(story: Story) -> None:
    story.resume(story.saved[-1])
    story.save(3)
    lost = story.tree(lost=[2]).by_number[2]
    assert (lost.job, lost.base, lost.begins, tags(lost.checkpoints)) == (None, Place(1, 1), False, ["step_4"])
    assert (lost.goes_back, tags(lost.abandoned)) == (True, ["step_2", "step_3"])
    first = story.tree(lost=[1, 2]).by_number[1]
    assert (first.job, first.base, first.begins) == (None, None, False)


def test_without_entries_incarnations_have_only_checkpoints(story: Story) -> None:
    infos = [replace(info, is_current=True) for info in story.saved]
    (tree,) = build_trees([], infos)
    assert [(one.number, tags(one.checkpoints)) for one in tree.incarnations] == [
        (1, ["step_1", "step_2", "step_3"]),
        (2, ["step_4"]),
    ]
    assert {(one.job, one.base, one.begins, one.goes_back, one.abandoned) for one in tree.incarnations} == {
        (None, None, False, False, ())
    }


def test_checkpoints_that_cannot_be_read_are_in_no_tree(story: Story) -> None:
    corrupt = CheckpointInfo("step_9", Path("step_9"), "damaged", problem="corrupt")
    assert build_trees(story.entries, [corrupt, *story.listed()]) == story.trees()


def test_a_corrupt_entry_makes_no_circle(story: Story) -> None:
    """One says that it continues itself, or a later one."""
    entry = story.entries[1]
    for line in (((2, 1),), ((3, 1),), ((-1, 1),), ((7, 1), (1, 1), (2, 9))):
        branch = msgspec.structs.replace(entry.runs[RUN], line=line)
        bad = msgspec.structs.replace(entry, runs={RUN: branch})
        (tree,) = build_trees([bad, story.entries[0]], story.listed())
        assert all(one.base is None or one.base.incarnation < one.number for one in tree.incarnations)
        known = {one.number for one in tree.incarnations}
        assert {one.base.incarnation for one in tree.incarnations if one.base} <= known


def test_the_incarnation_that_abandoned_a_checkpoint(story: Story) -> None:
    by = [story.tree().find_abandoning(info) for info in story.listed()]
    assert [one.number if isinstance(one, Incarnation) else None for one in by] == [2, 2, None, None]
