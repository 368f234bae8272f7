"""Tests the local tier in jobs that are killed, stopped, short of memory, or go back to older checkpoints."""

import errno
import os
import shutil
import subprocess
import threading
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import rankless
from rankless import api
from rankless.engine.io.checkpoint_files import CheckpointFiles
from rankless.load import tier_generations
from rankless.storage import mapped_file
from rankless.tier.generation_catalog import OfferedGeneration, list_offers
from rankless.tier.host_folder import TierFolder
from rankless.tier.job_text import name_job
from tests.helpers.killed_jobs import run_killed_job
from tests.helpers.tier_runs import load_newest_step, save_steps, state_of

#: A number of saves of which none is drained.
NEVER = 10**6


def open_run(base: Path, **options: Any) -> rankless.RunDirectory:
    return rankless.RunDirectory(base / "run", local=rankless.LocalTier(base / "tier", **options))


def load_step(base: Path) -> float:
    """Load the newest checkpoint as a new job, and return its step."""
    return load_newest_step(open_run(base))


def open_continued(base: Path) -> rankless.RunDirectory:
    directory = open_run(base, drain_every=NEVER)
    with suppress(rankless.NoCheckpointError):
        directory.restore(None, state_of(-1), resume=True)
        directory.wait()
    return directory


def job_that_saves(base: Path, *steps: int) -> None:
    save_steps(open_continued(base), *steps)


# ---------------------------------------------------------------------------------------------------------------
# Other options at the load than at saves


def test_a_job_may_load_with_other_options_than_it_saves_with(tmp_path: Path) -> None:
    run_killed_job(job_that_saves, tmp_path, 1, 2, 3, 4)
    run_killed_job(_load_by_folder_and_save, tmp_path)
    assert run_killed_job(load_step, tmp_path) == 6


def _load_by_folder_and_save(base: Path) -> None:
    rankless.restore(base / "run", None, state_of(-1), resume=True, local=str(base / "tier"))
    for step in (5, 6):
        local = rankless.LocalTier(base / "tier", drain_every=NEVER)
        rankless.save_checkpoint(base / "run", f"step_{step}", state_of(step), step=step, local=local)
    api._defaults.clear()


# ---------------------------------------------------------------------------------------------------------------
# Saves that the tier has no memory for


def save_without_memory(directory: rankless.RunDirectory, step: int) -> None:
    """Save a larger state, for which a slot would have to be enlarged."""
    with (
        mock.patch.object(mapped_file, "count_free_bytes", return_value=10),
        pytest.warns(UserWarning, match="without the local tier"),
    ):
        directory.save(f"step_{step}", {**state_of(step), "more": torch.zeros(10**5)}, step=step)


def _save_then_lack_memory(base: Path) -> None:
    directory = open_run(base, drain_every=NEVER)
    save_steps(directory, 1, 2, 3)
    save_without_memory(directory, 4)


def _load_without_strictness(base: Path) -> float | None:
    directory = open_run(base)
    step = directory.restore(None, state_of(-1), resume=True, strict=False).step
    directory.wait()
    return step


def test_a_save_for_which_the_tier_lacks_memory_is_newer_than_what_the_tier_has(tmp_path: Path) -> None:
    run_killed_job(_save_then_lack_memory, tmp_path)
    assert run_killed_job(_load_without_strictness, tmp_path) == 4


def test_nothing_older_is_drained_after_a_save_without_the_tier(tmp_path: Path) -> None:
    directory = open_run(tmp_path, drain_every=NEVER)
    save_steps(directory, 1, 2)
    save_without_memory(directory, 3)
    directory.finalize()
    assert [info.tag for info in directory.list()] == ["step_3"]
    save_steps(directory, 4)
    directory.finalize()
    assert [info.tag for info in directory.list()] == ["step_3", "step_4"]


def test_a_first_save_leaves_what_an_earlier_job_has_left_in_the_tier(tmp_path: Path) -> None:
    run_killed_job(job_that_saves, tmp_path, 1, 2, 3)
    with pytest.raises(rankless.StateError, match="not loaded: load it first"):
        run_killed_job(_begin_without_memory, tmp_path)
    assert run_killed_job(load_step, tmp_path) == 3


def _begin_without_memory(base: Path) -> None:
    save_without_memory(open_run(base, drain_every=NEVER), 9)


def test_a_tag_that_was_saved_without_the_tier_is_taken(tmp_path: Path) -> None:
    directory = open_run(tmp_path, drain_every=NEVER)
    save_without_memory(directory, 1)
    with pytest.raises(rankless.TagExistsError):
        save_steps(directory, 1)


# ---------------------------------------------------------------------------------------------------------------
# Going back, and a run directory that loses its history


def test_a_job_that_goes_back_drains_nothing_of_the_branch_that_it_left(tmp_path: Path) -> None:
    directory = open_run(tmp_path, drain_every=2)
    save_steps(directory, 1, 2, 3)
    directory.restore("step_2", state_of(-1), resume=True)
    directory.finalize()
    assert [info.tag for info in directory.list()] == ["step_2"]
    save_steps(directory, 3)
    directory.finalize()
    assert [info.tag for info in directory.list()] == ["step_2", "step_3"]


def test_a_run_directory_that_loses_its_history_does_not_make_old_generations_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        run_killed_job(job_that_saves, tmp_path, step)
    shutil.rmtree(tmp_path / "run/.history")
    run_killed_job(job_that_saves, tmp_path, 4, 5)
    assert run_killed_job(load_step, tmp_path) == 5


def test_a_tag_is_free_again_after_its_checkpoint_was_removed(tmp_path: Path) -> None:
    local = rankless.LocalTier(tmp_path / "tier")
    directory = rankless.RunDirectory(tmp_path / "run", keep=1, local=local)
    save_steps(directory, 1, 2, 1)
    assert [info.tag for info in directory.list()] == ["step_1"]


# ---------------------------------------------------------------------------------------------------------------
# Two jobs at once, and drains that are slower than saves


class SlowDrains:
    """Drains that wait, before they create or before they publish their files, until they are released."""

    def __init__(self, method: str) -> None:
        self.is_reached, self.is_released = threading.Event(), threading.Event()
        original = getattr(CheckpointFiles, method)

        def wait_first(*arguments: Any, **options: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                self.is_reached.set()
                assert self.is_released.wait(60)
            return original(*arguments, **options)

        self.patch = mock.patch.object(CheckpointFiles, method, wait_first)


def _save_and_wait_for_other_job(base: Path) -> str:
    """As a job that is stopped while another one continues: save three steps, wait, and save three others."""
    directory = open_run(base, drain_every=NEVER)
    save_steps(directory, 1, 2, 3)
    run_killed_job(_begin_to_load, base)
    try:
        for step in (14, 15, 16):
            directory.save(f"step_{step}", state_of(step), step=step)
    except rankless.StateError as error:
        return str(error)
    return ""


def _begin_to_load(base: Path) -> float | None:
    """Load, and be killed before anything is drained."""
    slow = SlowDrains("create_files")
    with slow.patch:
        return open_run(base).restore(None, state_of(-1), resume=True).step


def test_an_older_job_that_wakes_up_leaves_the_tier_to_the_newer_one(tmp_path: Path) -> None:
    message = run_killed_job(_save_and_wait_for_other_job, tmp_path)
    assert "another job has continued the run" in message
    assert run_killed_job(load_step, tmp_path) == 3


def test_what_is_being_drained_is_not_overwritten_by_an_older_job(tmp_path: Path) -> None:
    older = open_run(tmp_path, drain_every=NEVER)
    save_steps(older, 1, 2, 3)
    assert older._tier is not None
    job = older._tier.job
    older._tier.folder.take_over(name_job(99, "", "a"), older.path)
    with pytest.raises(rankless.StateError, match="another job has continued the run"):
        save_steps(older, 4)
    assert older._tier.job == job
    assert run_killed_job(load_step, tmp_path) == 3


def test_an_older_job_publishes_nothing_that_it_was_about_to_drain(tmp_path: Path) -> None:
    slow = SlowDrains("finalize")
    with slow.patch:
        directory = rankless.RunDirectory(tmp_path / "run", local=tmp_path / "tier", async_save=True)
        directory.save("step_1", state_of(1), step=1)
        assert slow.is_reached.wait(60)
        assert run_killed_job(_begin_to_load, tmp_path) == 1
        slow.is_released.set()
        with pytest.raises(rankless.StateError, match="another job has continued the run"):
            directory.wait()
    assert rankless.list_checkpoints(tmp_path / "run") == []
    assert run_killed_job(load_step, tmp_path) == 1


def test_a_job_does_not_overwrite_what_it_has_loaded_before_that_is_drained(tmp_path: Path) -> None:
    directory, slow = open_run(tmp_path, drain_every=NEVER), SlowDrains("create_files")
    save_steps(directory, 1, 2, 3)
    with slow.patch:
        directory.restore(None, state_of(-1), resume=True)
        assert slow.is_reached.wait(60)
        save_steps(directory, 4, 5, 6)
        slow.is_released.set()
        directory.wait()
    state = state_of(-1)
    rankless.restore(tmp_path / "run", "step_3", state)
    assert torch.equal(state["w"], state_of(3)["w"])


def test_a_slow_drain_does_not_replace_a_newer_checkpoint_of_its_tag(tmp_path: Path) -> None:
    directory, slow = open_run(tmp_path, drain_every=NEVER, on_failure="warn"), SlowDrains("create_files")
    directory.save("latest", state_of(1), step=1)
    directory.save("latest", state_of(2), step=2, overwrite=True)
    with slow.patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        directory.restore(None, state_of(-1), resume=True)
        assert slow.is_reached.wait(60)
        directory.save("latest", state_of(3), step=3, overwrite=True, forced=True)
        slow.is_released.set()
        directory.wait()
    assert [info.step for info in directory.list()] == [3]


# ---------------------------------------------------------------------------------------------------------------
# What killed jobs leave


def test_files_that_killed_jobs_were_writing_are_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        run_killed_job(_be_killed_before_a_rename, tmp_path, step)
    run_killed_job(job_that_saves, tmp_path, 4)
    names = {path.name for path in (tmp_path / "tier").iterdir()}
    assert {name.rpartition(".")[2] for name in names} == {"data", "part", "common", "lock", "json", "owner"}
    assert len(names) == len({"one part", "its label", "its slot", "its lock", "the marker", "the owner"})


def _be_killed_before_a_rename(base: Path, step: int) -> None:
    """Save a step, and leave the draft of the table of the next one."""
    directory = open_continued(base)
    save_steps(directory, step)
    failure = RuntimeError("killed")  # no error of storage, after which the draft would be removed
    with mock.patch("rankless.storage.atomic_rename.replace_file", side_effect=failure), pytest.raises(RuntimeError):
        save_steps(directory, step + 100)


def test_a_job_removes_what_dead_ones_have_reserved_before_it_looks(tmp_path: Path) -> None:
    """A load may need the memory, for what other hosts send."""
    run_killed_job(job_that_saves, tmp_path, 1, 2, 3)
    assert len(list((tmp_path / "tier").glob("*.data"))) > 1
    looked: list[int] = []

    def count_and_list(folder: TierFolder) -> list[OfferedGeneration]:
        looked.append(len(list(folder.path.glob("*.data"))))
        return list_offers(folder)

    with mock.patch.object(tier_generations, "list_offers", count_and_list):
        assert load_step(tmp_path) == 3
    assert looked == [1]


def test_a_table_that_cannot_be_read_now_costs_no_bytes(tmp_path: Path) -> None:
    run_killed_job(job_that_saves, tmp_path, 1, 2)
    folder = TierFolder.open(tmp_path / "tier", tmp_path / "run")
    failure = rankless.StorageError(errno.EMFILE, "too many open files")
    with mock.patch.object(TierFolder, "read_part", side_effect=failure):
        folder.remove_abandoned_slots()
    assert load_step(tmp_path) == 2


def test_what_a_process_completes_before_it_is_killed_is_not_taken_for_abandoned(tmp_path: Path) -> None:
    """Another process of the host removes slots of dead ones at that moment."""
    run_killed_job(job_that_saves, tmp_path, 1, 2)
    folder = TierFolder.open(tmp_path / "tier", tmp_path / "run")
    list_used = TierFolder._list_used

    def list_used_slowly(folder: TierFolder, is_wanted: Any) -> set[str]:
        used = list_used(folder, is_wanted)
        run_killed_job(job_that_saves, tmp_path, 3)
        return used

    with mock.patch.object(TierFolder, "_list_used", list_used_slowly):
        folder.remove_abandoned_slots()
    assert load_step(tmp_path) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="a tmpfs is mounted")
def test_a_job_begins_in_a_folder_whose_memory_is_full(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    tier.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "none", tier], check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        run_killed_job(job_that_saves, tmp_path, 1, 2)
        with suppress(OSError), (tier / "of another program.data").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        assert run_killed_job(load_step, tmp_path) == 2
    finally:
        subprocess.run(["umount", "-l", tier], check=True)


def test_the_retention_policy_holds_for_what_is_drained_at_loads_and_at_the_end(tmp_path: Path) -> None:
    for step in range(6):
        run_killed_job(_save_last_step, tmp_path, step, step % 2 == 0)
    kept = {info.tag for info in rankless.list_checkpoints(tmp_path / "run")}
    assert len(kept) <= 2


def _save_last_step(base: Path, step: int, ends_well: bool) -> None:
    local = rankless.LocalTier(base / "tier", drain_every=NEVER)
    directory = rankless.RunDirectory(base / "run", keep=2, local=local)
    with suppress(rankless.NoCheckpointError):
        directory.restore(None, state_of(-1), resume=True)
        directory.wait()
    save_steps(directory, step)
    if ends_well:
        directory.finalize()


def test_what_only_a_tier_has_is_drained_however_many_directories_were_used_since(tmp_path: Path) -> None:
    tier = rankless.LocalTier(tmp_path / "tier", drain_every=10**6)
    rankless.save_checkpoint(tmp_path / "run", "s", {"w": torch.ones(3)}, local=tier)
    for number in range(20):
        rankless.save_checkpoint(tmp_path / f"other {number}", "s", {"w": torch.ones(3)})
    rankless.finalize()
    assert [info.tag for info in rankless.list_checkpoints(tmp_path / "run")] == ["s"]
