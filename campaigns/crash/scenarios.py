"""The scenarios: saves of every kind, and their effect on earlier checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from typer.testing import CliRunner

import rankless
from campaigns.crash.training import MAX_SHARD_SIZE, Training
from rankless.cli.main import app
from rankless.errors import RanklessError
from rankless.run.pending_dir import PendingDirectory
from rankless.save import base_files
from rankless.storage import atomic_rename

#: The checkpoints of a run, oldest first: the step of each tag.
Listing = Mapping[str, int]


@dataclass(frozen=True)
class Save:
    """A step that saves the values of ``step``."""

    tag: str
    step: int
    keep: int | None = None
    overwrite: bool = False
    asynchronous: bool = False

    def run(self, path: Path, training: Training) -> None:
        """Save, and wait until it is acknowledged."""
        training.set_step(self.step)
        rankless.save_checkpoint(
            path,
            self.tag,
            training.model,
            training.optimizer,
            user_content=training.build_user_content(self.step),
            per_rank_content={"step": self.step},
            keep=self.keep,
            overwrite=self.overwrite,
            async_save=self.asynchronous,
            max_shard_size=MAX_SHARD_SIZE,
        ).wait()

    def list_after(self, before: Listing) -> Listing:
        """Return the checkpoints after the save."""
        checkpoints = [*((tag, step) for tag, step in before.items() if tag != self.tag), (self.tag, self.step)]
        return dict(checkpoints[-self.keep :] if self.keep else checkpoints)


class SimulatedDeath(Exception):  # noqa: N818 - what happens to a process, not an error of it
    """The kill of the process at this point."""


def die_before_publishing() -> AbstractContextManager[object]:
    """Die when the pending directory is complete but not renamed yet."""
    return mock.patch.object(PendingDirectory, "publish", side_effect=SimulatedDeath)


@contextmanager
def die_between_renames() -> Iterator[None]:
    """Die when the old checkpoint was renamed to make way. Only without an exchange of names."""

    def die(*_: object) -> None:
        raise SimulatedDeath

    def sync(folder: Path) -> None:
        next(steps)(folder)

    steps = iter((atomic_rename.fsync_directory, die))
    with (
        mock.patch.object(atomic_rename, "fsync_directory", sync),
        mock.patch.object(atomic_rename, "_rename_new", die),
    ):
        yield  # the first rename is not undone


@dataclass(frozen=True)
class KilledSave:
    """A save whose process is killed, so that nothing is cleaned up."""

    save: Save
    interrupt: Callable[[], AbstractContextManager[object]] = die_before_publishing

    def run(self, path: Path, training: Training) -> None:
        """Save until the process dies."""
        with (
            self.interrupt(),
            mock.patch.object(PendingDirectory, "discard"),
            suppress(RanklessError, SimulatedDeath),
        ):
            self.save.run(path, training)
            raise AssertionError("the save did not die")

    def list_after(self, before: Listing) -> Listing:
        """Return the checkpoints, unchanged."""
        return before


@dataclass(frozen=True)
class Prune:
    """``rankless prune`` in the process of rank 0."""

    keep: int

    def run(self, path: Path, training: Training) -> None:
        """Remove old checkpoints and leftovers."""
        del training
        result = CliRunner().invoke(app, ["prune", str(path), "--keep", str(self.keep), "--leftovers"])
        if result.exit_code:
            raise RuntimeError(result.output)

    def list_after(self, before: Listing) -> Listing:
        """Return the newest checkpoints."""
        return dict(list(before.items())[-self.keep :])


@dataclass(frozen=True)
class Load:
    """A load of the latest checkpoint."""

    def run(self, path: Path, training: Training) -> None:
        """Load the latest checkpoint."""
        rankless.load_checkpoint(path, None, training.model, training.optimizer, rng=False)

    def list_after(self, before: Listing) -> Listing:
        """Return the checkpoints, unchanged."""
        return before


Step = Save | KilledSave | Prune | Load


@dataclass(frozen=True)
class Scenario:
    """A list of steps, the last of which crashes, and the save that follows.

    ``models`` are the names of separate models. ``can_exchange`` says whether the file system can exchange two names.
    """

    name: str
    steps: tuple[Step, ...]
    resumed: Save = Save("next", 9)
    models: tuple[str, ...] = ()
    can_exchange: bool = True

    def list_checkpoints_by_step(self) -> list[Listing]:
        """Return the checkpoints before the first step and after each step."""
        listings: list[Listing] = [{}]
        for step in self.steps:
            listings.append(step.list_after(listings[-1]))
        return listings

    def emulate_file_system(self) -> AbstractContextManager[object]:
        """Return a context with the scenario's kind of file system."""
        return (
            nullcontext() if self.can_exchange else mock.patch.object(atomic_rename, "_renameat2", return_value=False)
        )

    def clone_short_ranges(self) -> AbstractContextManager[object]:
        """Return a context in which ranges of a page are cloned, if the file system can do that."""
        return mock.patch.object(base_files, "MIN_CLONE_BYTES", 4096)


_FIRST, _SECOND = Save("step_1", 1), Save("step_2", 2)
_LAST, _AGAIN = Save("last", 1), Save("last", 2, overwrite=True)

SCENARIOS = (
    Scenario("first save", (_FIRST,)),
    Scenario("first save, two models", (_FIRST,), models=("actor", "critic")),
    Scenario("second save", (_FIRST, _SECOND)),
    Scenario("asynchronous save", (_FIRST, Save("step_2", 2, asynchronous=True)), Save("next", 9, asynchronous=True)),
    Scenario("retention", (_FIRST, Save("step_2", 2, keep=1)), Save("next", 9, keep=1)),
    Scenario("overwrite, exchange", (_LAST, _AGAIN), Save("last", 9, overwrite=True)),
    Scenario("overwrite, two renames", (_LAST, _AGAIN), Save("last", 9, overwrite=True), can_exchange=False),
    Scenario("save after a dead one", (_FIRST, KilledSave(_SECOND), _SECOND)),
    Scenario(
        "save after a dead overwrite",
        (_LAST, KilledSave(_AGAIN, die_between_renames), Save("last", 3, overwrite=True)),
        Save("last", 9, overwrite=True),
        can_exchange=False,
    ),
    Scenario(
        "load after a dead overwrite",
        (_LAST, KilledSave(_AGAIN, die_between_renames), Load()),
        Save("last", 9, overwrite=True),
        can_exchange=False,
    ),
    Scenario("prune", (_FIRST, _SECOND, Save("step_3", 3), KilledSave(Save("step_4", 4)), Prune(1))),
)
