"""Tests the rules of the history against lineages that are known: what a checkpoint's content says it comes from.

The content of each checkpoint is the list of the steps that led to it, over all jobs. So the oracle knows, without the
rules, which checkpoint a run should continue: the one with the longest content that its intended lineage begins with.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from rankless.run.history import Branch, Entry, Job, Line, cut_line


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that the model has saved; ``content`` are the steps that led to it."""

    id: str
    run: str
    incarnation: int
    sequence: int
    content: tuple[int, ...]

    @property
    def step(self) -> float:
        return len(self.content)


@dataclass
class Training:
    """A job that has claimed an incarnation: its run, and the steps that led to its state."""

    run: str
    incarnation: int
    content: tuple[int, ...]


@dataclass
class World:
    """A directory with its entries and checkpoints, and what each run should be."""

    random: random.Random
    entries: list[Entry] = field(default_factory=lambda: [Entry()])
    found: list[Checkpoint] = field(default_factory=list)
    jobs: list[Training] = field(default_factory=list)
    intended: dict[str, tuple[int, ...]] = field(default_factory=dict)
    #: What jobs have loaded as the latest checkpoint, with the highest number of its run then, and continue later.
    loaded: list[tuple[Checkpoint, int]] = field(default_factory=list)
    #: The runs, from the one that was claimed or saved last to the first.
    recent: list[str] = field(default_factory=list)
    steps: int = 0
    has_lost: bool = False

    @property
    def history(self) -> Entry:
        return self.entries[-1]

    def begin(self) -> None:
        run = f"{len(self.entries):016x}"
        self._claim(self.history.begin_run(run, Job(run), self.found), ())

    def resume(self, base: Checkpoint, *, is_rollback: bool = False) -> None:
        line = self.history.line_to(base, self.found) if self.history.is_current(base) else self._own_line(base)
        entry = self.history.continue_run(base, line, Job("job"), self.found, is_rollback=is_rollback)
        self._claim(entry, base.content)

    def load(self, latest: Checkpoint) -> None:
        current = [one.sequence for one in self.found if one.run == latest.run and self.history.is_current(one)]
        self.loaded.append((latest, max(current)))

    def continue_loaded(self) -> None:
        """Claim, as a job does that stood still since its load: refused if its run went on meanwhile."""
        base, newest = self.loaded.pop(self.random.randrange(len(self.loaded)))
        current = [one.sequence for one in self.found if one.run == base.run and self.history.is_current(one)]
        if base.content != self.intended[base.run] or max(current, default=0) != newest:
            return
        line = self.history.line_to(base, self.found)
        recent = self.recent
        entry = self.history.continue_run(base, line, Job("job"), self.found, is_rollback=False, newest=newest)
        self._claim(entry, base.content)
        self.recent = recent

    def _own_line(self, base: Checkpoint) -> Line:
        own = next((entry for entry in self.entries if entry.number == base.incarnation), Entry())
        return cut_line(own.runs.get(base.run, Branch(0, 0)).line, base, self.found)

    def _claim(self, entry: Entry, content: tuple[int, ...]) -> None:
        self.entries.append(entry)
        self.jobs.append(Training(entry.run, entry.number, content))
        self._note(entry.run, content)

    def _note(self, run: str, content: tuple[int, ...]) -> None:
        self.intended[run] = content
        self.recent = [run, *(other for other in self.recent if other != run)]

    def save(self, job: Training, *, ahead: int = 0) -> None:
        """Save as a job does. One that was superseded, and does not know it, is not in the intended lineage."""
        self.steps += 1
        job.content += (self.steps,)
        sequence = self.history.next_sequence(self.found, job.run) + ahead
        self.found.append(Checkpoint(f"{self.steps:016x}", job.run, job.incarnation, sequence, job.content))
        if self.is_newest(job):
            self._note(job.run, job.content)

    def is_newest(self, job: Training) -> bool:
        return self.history.runs[job.run].incarnation == job.incarnation

    def latest(self) -> Checkpoint | None:
        return self.history.find_latest(sorted(self.found, key=lambda one: (one.sequence, one.id)))

    def expected(self) -> Checkpoint | None:
        best = (self.expected_of(run) for run in self.recent)
        return next((one for one in best if one is not None), None)

    def expected_of(self, run: str) -> Checkpoint | None:
        intended = self.intended[run]
        prefixes = [one for one in self.found if one.run == run and intended[: len(one.content)] == one.content]
        return max(prefixes, key=lambda one: len(one.content), default=None)

    def act(self, event: str) -> None:
        latest = self.latest()
        if latest is not None and event in {"resume", "crash loop"}:
            for _ in range(5 if event == "crash loop" else 1):
                self.resume(latest)
        elif event == "load" and latest is not None:
            self.load(latest)
        elif event == "continue what was loaded" and self.loaded:
            self.continue_loaded()
        elif event == "rollback" and self.found:
            self.resume(self.random.choice(self.found), is_rollback=True)
        else:
            self._act_without_load(event)

    def _act_without_load(self, event: str) -> None:
        newest = [job for job in self.jobs if self.is_newest(job)]
        superseded = [job for job in self.jobs if not self.is_newest(job)]
        if event == "save" and newest:
            self.save(self.random.choice(newest))
        elif event == "save of a superseded job" and superseded:
            self.save(self.random.choice(superseded), ahead=self.random.choice([0, 0, 50]))
        elif event == "another run":
            self.begin()
        elif event == "retention" and newest:
            run = self.random.choice(newest).run
            current = [one for one in self.found if one.run == run and self.history.is_current(one)]
            expired = sorted(current, key=lambda one: one.sequence)[:-2]
            self.found = [one for one in self.found if one not in expired]
        elif event == "loss" and self.found:
            self.found.remove(self.random.choice(self.found))
            self.has_lost = True


EVENTS = [
    *["save"] * 6,
    *["resume"] * 2,
    *["save of a superseded job"] * 2,
    "load",
    "continue what was loaded",
    "crash loop",
    "rollback",
    "another run",
    "retention",
    "loss",
]


@pytest.mark.parametrize("block", range(4))
def test_the_latest_checkpoint_is_the_longest_prefix_of_the_intended_lineage(block: int) -> None:
    for seed in range(100 * block, 100 * (block + 1)):
        world = World(random.Random(seed))
        world.begin()
        for _ in range(60):
            event = world.random.choice(EVENTS)
            world.act(event)
            for run in world.intended:
                found = [one for one in world.found if one.run == run]
                latest = world.history.find_latest(sorted(found, key=lambda one: (one.sequence, one.id)))
                assert latest == world.expected_of(run), (seed, event)
            if not world.has_lost:
                assert world.latest() == world.expected(), (seed, event)


def test_a_line_stays_short_in_a_crash_loop() -> None:
    world = World(random.Random(0))
    world.begin()
    world.save(world.jobs[-1])
    for _ in range(1000):
        world.resume(world.found[0])
    assert world.history.runs[world.found[0].run].line == ((1, 1),)


def test_a_line_keeps_what_is_there_and_the_newest_incarnations() -> None:
    world = World(random.Random(0))
    world.begin()
    for _ in range(300):
        world.save(world.jobs[-1])
        world.found = [world.found[0], *world.found[1:][-1:]]
        world.resume(world.found[-1])
    assert len(world.history.runs[world.found[0].run].line) < 70
    assert world.history.is_current(world.found[0])


def test_a_branch_says_to_which_checkpoint_it_went_back_last_also_after_it_was_continued() -> None:
    saved = [Checkpoint(f"{at:016x}", "r" * 16, 1, at, tuple(range(at))) for at in (1, 2, 3)]
    begun = Entry().begin_run("r" * 16, Job("first"), [])
    back = begun.continue_run(saved[0], begun.line_to(saved[0], saved), Job("second"), saved, is_rollback=True)
    later = Checkpoint("f" * 16, "r" * 16, back.number, 5, (0, 9))
    found = [*saved, later]
    on = back.continue_run(later, back.line_to(later, found), Job("third"), found, is_rollback=False)
    assert [entry.runs["r" * 16].rolled_back_to for entry in (begun, back, on)] == ["", saved[0].id, saved[0].id]


def test_without_entries_a_job_takes_all_older_checkpoints_of_the_run_into_its_line() -> None:
    first = Checkpoint("a" * 16, "r" * 16, 3, 1, (1,))
    second = Checkpoint("b" * 16, "r" * 16, 5, 2, (1, 2))
    entry = Entry().continue_run(
        second, Entry().line_to(second, [first, second]), Job("job"), [first, second], is_rollback=False
    )
    assert entry.number == 6
    assert entry.is_current(first)
    assert entry.is_current(second)


def test_without_entries_later_steps_of_an_older_incarnation_are_abandoned_by_the_next_claim() -> None:
    """The run has gone back to before them, or the newer incarnation had no need to save a lower step."""
    old = [Checkpoint(f"{at:016x}", "r" * 16, 1, at, tuple(range(at))) for at in (1, 2, 3, 4)]
    newest = Checkpoint("b" * 16, "r" * 16, 2, 5, (0, 1, 9))
    found = [*old, newest]
    entry = Entry().continue_run(newest, Entry().line_to(newest, found), Job("job"), found, is_rollback=False)
    assert [entry.is_current(saved) for saved in found] == [True, True, True, False, True]


def test_a_checkpoint_of_an_incarnation_whose_entry_is_lost_is_current() -> None:
    lost = Checkpoint("a" * 16, "r" * 16, 7, 9, (1,))
    entry = Entry().begin_run("r" * 16, Job("job"), [])
    assert entry.is_current(lost)
    later = entry.continue_run(lost, entry.line_to(lost, [lost]), Job("job"), [lost], is_rollback=False)
    assert later.number == 8
    assert later.runs["r" * 16].line == ((7, 9),)
