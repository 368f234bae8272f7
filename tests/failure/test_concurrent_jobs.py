"""Tests a run's directory that is copied, shared or changed while it is read: whole checkpoints or a clear error."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import rankless
from campaigns.side_by_side.actions import check_state
from campaigns.side_by_side.scenarios import SCENARIOS, check_outcome, run_scenario
from rankless import RunDirectory, api
from rankless.cli.main import app
from rankless.errors import CheckpointReplacedError, CorruptCheckpointError, StorageError, TagExistsError
from rankless.load.rank_reads import Reads
from rankless.ondisk.hidden_names import HiddenName
from rankless.run import catalog, owned_lock, pending_dir
from rankless.run.cleanup import clean_up
from rankless.run.pending_lock import PendingLock
from rankless.storage import atomic_rename, file_lock, file_memo
from tests.golden import reader
from tests.helpers.interruptions import change_at_call
from tests.helpers.other_jobs import save_as_other_job
from tests.helpers.pending_locks import lock_pending
from tests.helpers.pool import Ranks
from tests.helpers.run_directories import list_hidden_names


def tags(path: Path) -> list[str]:
    return [info.tag for info in rankless.list_checkpoints(path)]


def value_of(path: Path, tag: str | None = None, **options: Any) -> float:
    model = {"w": torch.zeros(64)}
    content = rankless.load_checkpoint(path, tag, model=model, **options)
    assert bool((model["w"] == content).all())
    return float(content)


@contextmanager
def between_two_renames(change: Callable[[], object]) -> Iterator[None]:
    """Of an overwrite, on a file system that cannot exchange names."""
    second = change_at_call("rankless.storage.atomic_rename.fsync_directory", change, 3)
    with mock.patch.object(atomic_rename, "_renameat2", return_value=False), second:
        yield


@pytest.mark.parametrize("name", SCENARIOS)
def test_processes_side_by_side(name: str, ranks: Ranks, tmp_path: Path) -> None:
    check_outcome(tmp_path, name, ranks(len(SCENARIOS[name].actions), run_scenario, str(tmp_path), name, 0.7))


def saver_and_loaders(path: str) -> int:
    """Rank 0 saves, the others load together."""
    own, others = dist.new_group([0]), dist.new_group([1, 2, 3])
    done = Path(path).parent / "done"
    if dist.get_rank() == 0:
        run, step = RunDirectory(path, process_group=own), 0
        while not done.exists():
            step += 1
            run.save(f"step_{step % 2}", {"w": torch.full((999,), float(step))}, overwrite=True, keep=1)
            dist.barrier() if step == 1 else time.sleep(0.03)
        return step
    dist.barrier()
    run = RunDirectory(path, process_group=others)
    for number in range(15):
        model = {"w": torch.zeros(999)}
        assert not run.restore(model=model, verify=number % 3 > 0).skipped_checkpoints
        check_state(model, int(model["w"][0]))
    done.touch()
    return 0


def test_ranks_load_together_while_another_job_saves(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(4, saver_and_loaders, str(tmp_path / "run"))[0] > 1


# ------------------------------------------------------------------------------------------------------------------
# Copies


def copied(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", source, target], check=True)


def moved(source: Path, target: Path) -> None:
    shutil.move(source, target)


def tarred(source: Path, target: Path) -> None:
    target.mkdir()
    subprocess.run(["tar", "cf", target.parent / "run.tar", "-C", source, "."], check=True)
    subprocess.run(["tar", "xmf", target.parent / "run.tar", "-C", target], check=True)


def file_by_file(source: Path, target: Path) -> None:
    files = [file for file in source.rglob("*") if file.is_file()]
    for file in random.Random(0).sample(files, len(files)):
        (target / file.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target / file.relative_to(source))


@pytest.mark.parametrize("how", [copied, moved, tarred, file_by_file])
def test_a_run_that_was_copied_or_moved_has_the_same_latest(how: Callable[[Path, Path], None], tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    for number, tag in enumerate(["d", "a", "e", "c", "b"]):
        save_as_other_job(run, tag, float(number))
    how(run, copy)
    every = list(copy.rglob("*"))
    for moment, path in enumerate(random.Random(1).sample(every, len(every))):
        os.utime(path, (moment, moment))
    assert tags(copy) == ["d", "a", "e", "c", "b"]
    assert reader.latest(copy).name == rankless.open(copy).path.name == "b"
    assert value_of(copy) == 4.0


def test_a_copy_under_way_is_passed_over(tmp_path: Path) -> None:
    """Its manifest is there, and not yet its data: it has its name already, as copies have no last step."""
    for number in range(2):
        save_as_other_job(tmp_path, f"step_{number}", float(number))
    (tmp_path / "step_1/model/model.safetensors").unlink()
    with pytest.warns(UserWarning, match="loaded 'step_0' and ignored other checkpoints: step_1 is corrupt;"):
        assert value_of(tmp_path) == 0.0


# ------------------------------------------------------------------------------------------------------------------
# What goes or comes while it is read


@pytest.fixture
def unsettled() -> Iterator[None]:
    """As if every file had just been written: none is remembered."""
    with mock.patch.multiple(file_memo, _UNSETTLED_NS=10**18, _UNSETTLED_HERE_NS=10**18):
        yield


@pytest.mark.usefixtures("unsettled")
def test_there_is_always_one_to_be_seen_where_each_save_removes_the_one_before(tmp_path: Path) -> None:
    save_as_other_job(tmp_path, "step_1", 1.0)
    for look, number in ((tags, 2), (rankless.has_checkpoint, 3), (value_of, 4), (rankless.open, 5)):
        with change_at_call(
            "rankless.run.checkpoint_info.read_manifest",
            lambda number=number: save_as_other_job(tmp_path, f"step_{number}", float(number), keep=1),
        ):
            seen = look(tmp_path)
        assert seen in (["step_2"], True, 4.0) or seen.path.name == "step_5"


@pytest.mark.usefixtures("unsettled")
def test_what_goes_is_not_called_unreadable(tmp_path: Path) -> None:
    save_as_other_job(tmp_path, "step_1", 1.0)
    save_as_other_job(tmp_path, "step_2", 2.0)
    with change_at_call("rankless.run.checkpoint_info.read_manifest", lambda: shutil.rmtree(tmp_path / "step_1")):
        assert [(info.tag, info.status) for info in rankless.list_checkpoints(tmp_path)] == [("step_2", "complete")]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    "where",
    [
        "load.rank_reads.Reads.run",
        "load.load_operation.LoadOperation._plan_reads",
        "load.load_operation.LoadOperation._match_targets",
    ],
)
def test_what_is_asked_for_by_name_and_replaced_meanwhile_is_loaded_as_it_is_then(
    tmp_path: Path, verify: bool, where: str
) -> None:
    save_as_other_job(tmp_path, "last", 1.0)
    with change_at_call(f"rankless.{where}", lambda: save_as_other_job(tmp_path, "last", 2.0, overwrite=True)):
        assert value_of(tmp_path, "last", verify=verify) == 2.0


def test_what_is_asked_for_by_name_and_goes_is_not_there(tmp_path: Path) -> None:
    save_as_other_job(tmp_path, "last", 1.0)
    with (
        mock.patch.object(Reads, "run", side_effect=lambda *_, **__: shutil.rmtree(tmp_path / "last")),
        pytest.raises(CheckpointReplacedError, match=r"last was replaced or removed .*may be partly filled"),
    ):
        value_of(tmp_path, "last", verify=False)


def test_a_view_says_that_its_checkpoint_went_and_not_that_it_is_damaged(tmp_path: Path) -> None:
    for change in (
        lambda: save_as_other_job(tmp_path, "last", 2.0, overwrite=True),
        lambda: shutil.rmtree(tmp_path / "last"),
    ):
        save_as_other_job(tmp_path, "last", 1.0, overwrite=True)
        checkpoint = rankless.open(tmp_path)
        change()
        for read in (lambda found=checkpoint: found["model/w"], lambda found=checkpoint: found.values):
            with pytest.raises(
                CheckpointReplacedError, match="last was replaced or removed while it was read; open it again"
            ):
                read()
        with pytest.raises(CheckpointReplacedError, match="replaced or removed"):
            list(checkpoint.verify())


def test_a_view_of_a_damaged_one_says_that_it_is_damaged(tmp_path: Path) -> None:
    save_as_other_job(tmp_path, "last", 1.0)
    checkpoint = rankless.open(tmp_path)
    (tmp_path / "last/model/model.safetensors").unlink()
    with pytest.raises(StorageError, match=r"could not open .*model.safetensors"):
        checkpoint["model/w"]


@pytest.mark.parametrize("command", ["show", "diff"])
def test_commands_say_that_a_checkpoint_went_and_not_that_it_is_damaged(command: str, tmp_path: Path) -> None:
    save_as_other_job(tmp_path, "last", 1.0)
    last = str(tmp_path / "last")
    reading = "rankless.inspection.inspected_checkpoint.InspectedCheckpoint.read_values"
    with change_at_call(reading, lambda: save_as_other_job(tmp_path, "last", 2.0, overwrite=True)):
        done = CliRunner().invoke(app, [command, *[last] * (1 + (command == "diff"))], env={"COLUMNS": "500"})
    assert done.exit_code == 2
    assert "last was replaced or removed while it was read" in done.output


def test_verify_goes_on_with_what_is_there_then(tmp_path: Path) -> None:
    save_as_other_job(tmp_path, "step_1", 1.0)
    with change_at_call(
        "rankless.cli.verify_one.inspect_exact_path", lambda: save_as_other_job(tmp_path, "step_2", 2.0, keep=1)
    ):
        done = CliRunner().invoke(app, ["verify", str(tmp_path)], env={"COLUMNS": "500"})
    assert done.exit_code == 0
    assert "step_2" in done.output
    assert "step_1" not in done.output


def test_a_load_that_never_catches_one_says_so(tmp_path: Path) -> None:
    step = 0

    def always(*_: Any, **__: Any) -> Any:
        nonlocal step
        step += 1
        save_as_other_job(tmp_path, f"step_{step}", float(step), keep=1)
        raise CorruptCheckpointError("torn")

    save_as_other_job(tmp_path, "step_0", 0.0)
    with (
        mock.patch.object(Reads, "run", always),
        pytest.raises(CheckpointReplacedError, match="faster than one can be loaded; keep"),
    ):
        rankless.load_checkpoint(tmp_path, model={"w": torch.zeros(64)}, timeout=0.5)
    assert step > 1


def on_one_rank_only(path: str) -> float:
    """Rank 1 sees what another job saves after rank 0 has looked."""
    loading = rankless.load.load_operation.LoadOperation
    match, done = loading._match_targets, []
    alone = [dist.new_group([rank]) for rank in range(2)][1]

    def late(*args: Any) -> Any:
        if dist.get_rank() == 1 and not done:
            done.append(1)
            save_as_other_job(Path(path), "last", 2.0, group=alone, overwrite=True)
        return match(*args)

    with mock.patch.object(loading, "_match_targets", late):
        return value_of(Path(path))


def test_ranks_that_see_two_checkpoints_of_one_name_look_again(ranks: Ranks, tmp_path: Path) -> None:
    save_as_other_job(tmp_path, "last", 1.0)
    assert ranks(2, on_one_rank_only, str(tmp_path)) == [2.0, 2.0]


# ------------------------------------------------------------------------------------------------------------------
# Saves beside saves


def test_a_job_that_has_not_loaded_from_a_run_removes_nothing_of_it(tmp_path: Path) -> None:
    first, other = RunDirectory(tmp_path, keep=1), RunDirectory(tmp_path, keep=1)
    for step in range(2):
        first.save(f"first_{step}", {"w": torch.ones(1)})
        other.save(f"other_{step}", {"w": torch.ones(1)})
    assert tags(tmp_path) == ["first_1", "other_1"]
    a, b = rankless.list_checkpoints(tmp_path)
    assert a.run != b.run
    assert (a.sequence, b.sequence) == (3, 4)


@pytest.mark.parametrize("by", ["the run", "the checkpoint"])
def test_a_job_that_has_loaded_from_a_run_continues_it(tmp_path: Path, by: str) -> None:
    RunDirectory(tmp_path).save("a", {"w": torch.ones(1)})
    RunDirectory(tmp_path).save("of another run", {"w": torch.ones(1)})
    where = (tmp_path, "a") if by == "the run" else (tmp_path / "a", None)
    with mock.patch.object(api, "_defaults", api._DefaultDirectories()):  # as a process that begins
        rankless.load_checkpoint(*where, model={"w": torch.zeros(1)})
        rankless.save_checkpoint(tmp_path, "b", {"w": torch.ones(1)}, keep=1, max_shard_size="1GB")
    assert tags(tmp_path) == ["of another run", "b"]


def test_retention_never_removes_what_has_taken_the_name_meanwhile(tmp_path: Path) -> None:
    save_as_other_job(tmp_path, "last", 1.0)
    with change_at_call(
        "rankless.run.folder_removal.rename_path", lambda: save_as_other_job(tmp_path, "last", 3.0, overwrite=True)
    ):
        save_as_other_job(tmp_path, "step_2", 2.0, keep=1)
    assert value_of(tmp_path, "last") == 3.0
    assert tags(tmp_path) == ["step_2", "last"]
    assert not list_hidden_names(tmp_path)


def test_retention_neither_counts_nor_removes_what_was_copied_linked_or_renamed(tmp_path: Path) -> None:
    for number in range(4):
        save_as_other_job(tmp_path, f"step_{number}", float(number))
    shutil.copytree(tmp_path / "step_3", tmp_path / "copy")
    (tmp_path / "latest").symlink_to("step_3")
    (tmp_path / "step_0").rename(tmp_path / "best")
    save_as_other_job(tmp_path, "step_4", 4.0, keep=3)
    assert set(tags(tmp_path)) == {"best", "step_2", "step_3", "copy", "latest", "step_4"}
    save_as_other_job(tmp_path, "step_5", 5.0, keep=1)
    assert set(tags(tmp_path)) == {"best", "copy", "step_5"}
    assert value_of(tmp_path, "copy") == 3.0


def test_tidying_leaves_what_is_just_being_put_aside(tmp_path: Path) -> None:
    save_as_other_job(tmp_path, "last", 1.0)
    aside = HiddenName("last", rankless.list_checkpoints(tmp_path)[0].run, "2" * 16, "replaced")
    partial = tmp_path / aside.with_state("partial").name
    locks: list[PendingLock] = []

    def begin() -> None:
        locks.append(lock_pending(partial))
        partial.mkdir()
        (tmp_path / "last").rename(tmp_path / aside.name)

    with change_at_call("rankless.run.folder_removal._parse_hidden", begin):
        assert not clean_up(tmp_path, None)
    assert value_of(tmp_path, "last") == 1.0
    locks[0].close()


def test_tidying_leaves_what_was_put_aside_by_a_save_that_has_just_died(tmp_path: Path) -> None:
    save_as_other_job(tmp_path, "last", 1.0)
    aside = HiddenName("last", rankless.list_checkpoints(tmp_path)[0].run, "2" * 16, "replaced")
    (tmp_path / aside.with_state("partial").name).mkdir()
    with change_at_call(
        "rankless.run.folder_removal._parse_hidden", lambda: (tmp_path / "last").rename(tmp_path / aside.name)
    ):
        assert not clean_up(tmp_path, None)
    assert value_of(tmp_path, "last") == 1.0


def test_a_folder_that_another_save_takes_for_a_dead_ones_is_made_again(tmp_path: Path) -> None:
    def clean_first(fd: int) -> bool:
        if not done:
            done.append(fd)
            clean_up(tmp_path)
        return try_lock(fd)

    try_lock, done = file_lock._try_lock, []  # type: ignore[var-annotated]
    with mock.patch.object(file_lock, "_try_lock", clean_first):
        save_as_other_job(tmp_path, "a", 1.0)
    assert done
    assert value_of(tmp_path) == 1.0
    with (
        mock.patch.object(file_lock, "_try_lock", side_effect=BlockingIOError),
        mock.patch.object(owned_lock, "_MAX_ATTEMPTS", 3),
        pytest.raises(StorageError, match=r"\.lock is locked"),
    ):
        save_as_other_job(tmp_path, "b", 1.0)


def test_an_overwrite_succeeds_whoever_takes_or_removes_the_name_meanwhile(tmp_path: Path, exchanging: None) -> None:
    save_as_other_job(tmp_path / "other", "last", 0.0)
    save_as_other_job(tmp_path, "last", 1.0)
    with change_at_call(
        "rankless.storage.atomic_rename.exchange_directories", lambda: shutil.rmtree(tmp_path / "last")
    ):
        save_as_other_job(tmp_path, "last", 2.0, overwrite=True)
    assert value_of(tmp_path) == 2.0
    shutil.rmtree(tmp_path / "last")
    with change_at_call(
        "rankless.storage.atomic_rename.rename_noreplace", lambda: (tmp_path / "other/last").rename(tmp_path / "last")
    ):
        save_as_other_job(tmp_path, "last", 4.0, overwrite=True)
    assert value_of(tmp_path) == 4.0
    assert not list_hidden_names(tmp_path)


LOOKS = ["posix.path_exists", "directory_trees.list_tree", "read_manifest"]


@pytest.mark.parametrize("what", ["nothing", "other files"])
@pytest.mark.parametrize("where", LOOKS)
def test_an_overwrite_looks_again_if_the_name_changes_under_its_look(
    tmp_path: Path, exchanging: None, where: str, what: str
) -> None:
    """Other jobs take the name away, or give it to a checkpoint that has more files, while the files are compared."""
    save_as_other_job(tmp_path, "last", 1.0)
    other = RunDirectory(tmp_path / "other", max_shard_size=1024)
    other.save("last", {f"w{n}": torch.full((999,), 2.0) for n in range(4)})

    def change() -> None:
        (tmp_path / "last").rename(tmp_path / "aside")
        if what == "other files":
            (tmp_path / "other/last").rename(tmp_path / "last")

    with change_at_call(f"rankless.run.ownership.{where}", change):
        save_as_other_job(tmp_path, "last", 3.0, overwrite=True)
    assert value_of(tmp_path, "last") == 3.0
    assert value_of(tmp_path, "aside") == 1.0


@pytest.mark.parametrize("where", LOOKS)
def test_retention_passes_over_what_is_removed_under_its_look(tmp_path: Path, where: str) -> None:
    run = RunDirectory(tmp_path)
    run.save("a", {"w": torch.zeros(64)})
    removal = change_at_call(f"rankless.run.ownership.{where}", lambda: shutil.rmtree(tmp_path / "a"))
    with removal, warnings.catch_warnings(action="error"):
        run.save("b", {"w": torch.zeros(64)}, keep=1)
    assert tags(tmp_path) == ["b"]


def test_what_is_not_ours_is_left_although_it_changes_all_the_time(tmp_path: Path) -> None:
    (tmp_path / "last").mkdir()

    def change(path: Path) -> bool:
        (path / f"{time.time_ns()}").touch()
        return False

    change(tmp_path / "last")
    with mock.patch("rankless.run.ownership.is_native", change), pytest.raises(StorageError, match="all the time"):
        save_as_other_job(tmp_path, "last", 3.0, overwrite=True)
    assert list((tmp_path / "last").iterdir())


@pytest.mark.parametrize(
    "where", ["run.pending_dir.PendingDirectory.replace", "storage.atomic_rename.rename_noreplace"]
)
def test_an_overwrite_leaves_what_was_begun_after_it(tmp_path: Path, exchanging: None, where: str) -> None:
    """This process may have been stopped for a while, just before it gives the new one its name."""
    with (
        change_at_call(f"rankless.{where}", lambda: save_as_other_job(tmp_path, "last", 2.0)),
        pytest.raises(TagExistsError, match="it is newer, and left as it is"),
    ):
        save_as_other_job(tmp_path, "last", 1.0, overwrite=True)
    assert value_of(tmp_path) == 2.0
    assert not list_hidden_names(tmp_path)


def test_an_overwrite_in_two_steps_begins_again_where_an_older_one_comes_between_them(tmp_path: Path) -> None:
    save_as_other_job(tmp_path / "other", "last", 2.0)
    save_as_other_job(tmp_path, "last", 1.0)
    with between_two_renames(lambda: (tmp_path / "other/last").rename(tmp_path / "last")):
        save_as_other_job(tmp_path, "last", 3.0, overwrite=True)
    assert value_of(tmp_path) == 3.0
    assert not list_hidden_names(tmp_path)


def test_an_overwrite_in_two_steps_leaves_a_newer_one_that_comes_between_them(tmp_path: Path) -> None:
    save_as_other_job(tmp_path, "last", 1.0)
    with (
        between_two_renames(lambda: save_as_other_job(tmp_path, "last", 2.0)),
        pytest.raises(TagExistsError, match="it is newer, and left as it is"),
    ):
        save_as_other_job(tmp_path, "last", 3.0, overwrite=True)
    assert value_of(tmp_path) == 2.0
    assert not list_hidden_names(tmp_path)


def test_an_overwrite_in_two_steps_never_loses_what_it_has_put_aside(tmp_path: Path) -> None:
    """Its own folder goes between them, and the first step cannot be taken back."""
    save_as_other_job(tmp_path, "last", 1.0)

    def lose() -> None:
        (draft,) = [tmp_path / name for name in list_hidden_names(tmp_path) if name.endswith(".partial")]
        draft.rename(tmp_path / "lost")

    refused = mock.patch.object(atomic_rename, "_rename_new", side_effect=OSError(errno.EIO, "input/output error"))
    with between_two_renames(lose), refused, pytest.raises(StorageError):
        save_as_other_job(tmp_path, "last", 2.0, overwrite=True)
    (aside,) = [tmp_path / name for name in list_hidden_names(tmp_path)]
    assert float(rankless.open(aside)["model/w"][0]) == 1.0


def test_an_overwrite_that_is_refused_between_two_names_takes_the_first_step_back(tmp_path: Path) -> None:
    def refuse() -> None:
        raise OSError(errno.EIO, "input/output error")

    save_as_other_job(tmp_path, "last", 1.0)
    with between_two_renames(refuse), pytest.raises(StorageError):
        save_as_other_job(tmp_path, "last", 2.0, overwrite=True)
    assert value_of(tmp_path) == 1.0
    assert not list_hidden_names(tmp_path)


def test_an_overwrite_gives_up_at_last(tmp_path: Path) -> None:
    save_as_other_job(tmp_path, "last", 1.0)
    taken = mock.patch.object(pending_dir.atomic_rename, "exchange_directories", side_effect=TagExistsError("taken"))
    with taken as replace, pytest.raises(TagExistsError, match="taken"):
        save_as_other_job(tmp_path, "last", 2.0, overwrite=True)
    assert replace.call_count == pending_dir._ATTEMPTS
    assert value_of(tmp_path) == 1.0


def test_nobody_else_names_what_a_living_save_is_about_to(tmp_path: Path) -> None:
    """An overwrite in two steps, between which neither folder has the name: it is seen all the same, and left alone."""
    save_as_other_job(tmp_path, "last", 1.0)

    def between() -> None:
        seen.append(sorted(path.name for path in tmp_path.iterdir()))
        assert rankless.has_checkpoint(tmp_path)
        assert [(info.tag, info.status) for info in rankless.list_checkpoints(tmp_path)] == [("last", "complete")]
        assert value_of(tmp_path) == value_of(tmp_path, "last") == 1.0
        assert rankless.restore(tmp_path, model={"w": torch.zeros(64)}).tag == "last"
        for path in (tmp_path, tmp_path / "last"):
            assert float(rankless.open(path)["model/w"][0]) == value_of(path) == 1.0
        assert "complete (latest)" in CliRunner().invoke(app, ["ls", str(tmp_path)]).output
        seen.append(sorted(path.name for path in tmp_path.iterdir()))

    seen: list[list[str]] = []
    with between_two_renames(between):
        save_as_other_job(tmp_path, "last", 2.0, overwrite=True)
    assert seen[0] == seen[1]
    assert "last" not in seen[0]
    assert value_of(tmp_path) == 2.0


def test_one_whose_save_died_between_two_names_is_there_for_those_who_only_look(tmp_path: Path) -> None:
    save_as_other_job(tmp_path, "last", 1.0)
    aside = HiddenName("last", rankless.list_checkpoints(tmp_path)[0].run, "2" * 16, "replaced")
    (tmp_path / aside.with_state("partial").name).mkdir()
    (tmp_path / "last").rename(tmp_path / aside.name)
    assert rankless.has_checkpoint(tmp_path)
    assert catalog.find_checkpoint(tmp_path, "last") == tmp_path / aside.name
    assert not (tmp_path / "last").exists()
    assert value_of(tmp_path, "last") == 1.0
    assert (tmp_path / "last").exists()
