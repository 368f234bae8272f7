"""A save of the tensors of the save before opens its output in the first vote; any other one in a vote of its own."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import rankless
from rankless.engine.comm.session import Session
from rankless.errors import RankFailedError, ReplicaMismatchError, StorageError
from rankless.run.journal import read_journal
from rankless.run.lookup import resolve_checkpoint_path
from rankless.storage.object_path import make_object_path
from rankless.storage.store import store_of
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import FakeS3, store_at
from tests.helpers.pairwise import first_of
from tests.helpers.pool import Ranks
from tests.helpers.run_directories import list_names
from tests.helpers.stateful import Counter
from tests.helpers.training import train_run

LOOKING, PREPARING, WRITING = "looking at what to save", "preparing the save", "writing"


@contextlib.contextmanager
def recorded_phases() -> Iterator[list[str]]:
    """The phases of the votes of this rank, in order."""
    phases, begin_vote = list[str](), Session.begin_vote

    def record(session: Session, phase: str, *arguments: Any) -> Any:
        phases.append(phase)
        return begin_vote(session, phase, *arguments)

    with mock.patch.object(Session, "begin_vote", record):
        yield phases


class Job:
    """One rank of a training, with a second model whose tensors change, and a value that each rank has."""

    def __init__(self, base: str, place: str = "folder", **options: Any) -> None:
        self.rank, self.saves, self.alone = dist.get_rank(), 0, Path(base, "alone")
        is_bucket = place.startswith("http")
        self.path = make_object_path(store_at(place), f"{BUCKET}/run") if is_bucket else Path(base, "run")
        local = rankless.LocalTier(Path(base, "tier"), drain_every=1) if place == "tier" else None
        self.directory = rankless.RunDirectory(self.path, **{"async_save": False, "local": local, **options})
        self.run = train_run("fsdp", "sgd")
        self.extra = {"same": torch.zeros(300)}
        self.counter = Counter()

    def change(self, what: str) -> None:
        self.run.step(self.saves)
        if what == "shape":
            self.extra["same"] = torch.zeros(len(self.extra["same"]) + 1)
        elif what == "shape on rank 1" and self.rank == 1:
            self.extra["only"] = torch.ones(len(self.extra.get("only", ())) + 1)
        elif what == "learning rate":
            self.run.optimizer.param_groups[0]["lr"] *= 0.5
        elif what == "value on rank 1" and self.rank == 1:
            self.counter.count += 1
        elif what == "replica on rank 1" and self.rank == 1:
            self.extra["same"][0] += 1

    def save(self) -> list[str]:
        """Save, and return the phases of the votes."""
        self.saves += 1
        with recorded_phases() as phases, warnings.catch_warnings(action="ignore"):
            self.save_in(self.directory, f"s{self.saves}")
        return phases

    def save_in(self, directory: rankless.RunDirectory, tag: str) -> None:
        model, stateful = {"main": self.run.model, "extra": self.extra}, {"counter": self.counter}
        directory.save(tag, model, self.run.optimizer, stateful=stateful, step=self.saves).wait()

    def check_bytes(self) -> None:
        """Compare the files of tensors with those of a save that knows nothing of earlier ones."""
        with warnings.catch_warnings(action="ignore"):
            self.save_in(rankless.RunDirectory(self.alone), f"s{self.saves}")
        names = sorted(str(file.relative_to(self.alone)) for file in self.alone.glob(f"s{self.saves}/**/*.safetensors"))
        assert len(names) > 2
        folder = resolve_checkpoint_path(self.path / f"s{self.saves}")
        for name in names:
            saved = store_of(folder).read_small(folder / name.partition("/")[2])
            assert saved == (self.alone / name).read_bytes()


CHANGES = ["nothing", "learning rate", "shape", "shape on rank 1", "value on rank 1"]


def save_after(base: str, place: str, changes: list[str], options: dict[str, Any]) -> list[list[str]]:
    """Save, and again after each change. Return the phases of the votes of each save."""
    job = Job(base, place, **options)
    phases = [job.save()]
    for what in changes:
        job.change(what)
        phases.append(job.save())
        job.check_bytes()
    return phases


def test_a_save_of_the_same_tensors_holds_one_vote_less(ranks: Ranks, tmp_path: Path) -> None:
    of_ranks = ranks(2, save_after, str(tmp_path), "folder", ["nothing", "learning rate", "nothing"], {})
    assert of_ranks[0] == of_ranks[1]
    first, *later = of_ranks[0]
    assert first == [LOOKING, PREPARING, WRITING]
    assert later == [[LOOKING, WRITING]] * 3


@pytest.mark.parametrize("place", ["folder", "bucket", "tier"])
@pytest.mark.parametrize(
    "options", [{}, {"incremental": True, "keep_full_every": 3}, {"async_save": True, "staging": "overlapped"}]
)
@first_of(1, "seed", range(6))
def test_random_changes_between_saves(
    ranks: Ranks, tmp_path: Path, place: str, options: dict[str, Any], seed: int
) -> None:
    changes = random.Random(seed).choices(CHANGES, k=8)
    with FakeS3().served() if place == "bucket" else contextlib.nullcontext(place) as where:
        of_ranks = ranks(2, save_after, str(tmp_path), where, changes, options)
    assert of_ranks[0] == of_ranks[1]
    for what, phases in zip(changes, of_ranks[0][1:], strict=True):
        if what != "value on rank 1":  # negotiated once more if it is the first that differs
            # The tier reserves memory in a vote of its own.
            assert (PREPARING in phases) == (what.startswith("shape") or place == "tier"), (what, phases)


def save_after_faults(base: str, where: list[str], who: int) -> list[list[str]]:
    """Save. Then save with each fault on one rank, and once more without. Return the names in the run directory."""
    job, names = Job(base), list[list[str]]()
    job.save()
    for place in where:
        job.run.step(job.saves)
        fault = mock.patch(place, side_effect=ZeroDivisionError) if job.rank == who else contextlib.nullcontext()
        with fault, pytest.raises(RankFailedError, match="ZeroDivisionError"):
            job.save()
        dist.barrier()
        names.append(list_names(job.path))
        job.save()
        job.check_bytes()
    return names


@pytest.mark.parametrize("who", [0, 1])
def test_a_fault_in_the_first_vote_leaves_nothing(ranks: Ranks, tmp_path: Path, who: int) -> None:
    where = [
        "rankless.save.save_negotiation.capture_training",
        "rankless.engine.integrity.replica_comparison.digest_replicas",
        "rankless.save.folder_output.RunFolderOutput.prepare",
        "rankless.save.shard_writer.write_file_ranges",
    ]
    if who == 0:
        where += [
            "rankless.save.training_content.next_identity",
            "rankless.run.pending_dir.PendingDirectory.create",
            "rankless.engine.io.checkpoint_files.CheckpointFiles.create_files",
        ]
    for names in ranks(2, save_after_faults, str(tmp_path), where, who):
        assert not [name for of_fault in names for name in of_fault if "partial" in name]


def save_with_other_replica(base: str) -> list[str]:
    job = Job(base)
    job.save()
    job.change("replica on rank 1")
    with pytest.raises(ReplicaMismatchError, match="same"):
        job.save()
    dist.barrier()
    names = list_names(job.path)
    job.extra["same"].zero_()
    dist.barrier()
    assert PREPARING in job.save()  # all is hashed again
    job.check_bytes()
    return names


def test_replicas_that_differ_are_found_in_the_first_vote(ranks: Ranks, tmp_path: Path) -> None:
    names, _ = ranks(2, save_with_other_replica, str(tmp_path))
    assert [name for name in names if not name.startswith(".")] == ["s1"]


def save_after_an_interrupt(base: str, where: str, who: int) -> list[list[str]]:
    """Save. Interrupt the first save of other tensors on one rank, and save these and the first ones again."""
    job, phases = Job(base, timeout=3), [list[str]()]
    job.save()
    for what in ("shape", "names"):
        before = job.extra
        job.change(what)
        job.extra = {"other": torch.ones(7)} if what == "names" else job.extra
        interrupt = mock.patch(where, side_effect=KeyboardInterrupt) if job.rank == who else contextlib.nullcontext()
        with interrupt, pytest.raises((KeyboardInterrupt, rankless.RanklessError)):
            job.save()
        dist.barrier()
        for extra in (job.extra, job.extra, before, job.extra):
            job.extra = extra
            phases.append(job.save())
            job.check_bytes()
    return phases


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("where", ["describe_placement", "parse_size", "plan_save"])
def test_an_interrupt_before_the_plan_leaves_no_wrong_one(ranks: Ranks, tmp_path: Path, where: str, who: int) -> None:
    """The plan in the cache must be that of the spec in the cache."""
    place = f"rankless.save.training_content.{where}"
    assert len(ranks(2, save_after_an_interrupt, str(tmp_path), place, who)[0]) == 9


def save_with_a_full_disk(base: str) -> None:
    job = Job(base)
    job.save()
    job.change("nothing")
    full = mock.patch("rankless.run.pending_dir.PendingDirectory.create", side_effect=StorageError(28, "full"))
    with full, pytest.raises(StorageError, match="full"):
        job.save()


def test_the_journal_says_where_the_ranks_of_a_failed_save_were(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_with_a_full_disk, str(tmp_path))
    saved, failed = (
        [entry for entry in read_journal(tmp_path / "run") if entry.kind == kind] for kind in ("saved", "failed")
    )
    assert failed[-1].placement == saved[0].placement
    assert failed[-1].hosts == saved[0].hosts == 1
