"""Tests the local tier in jobs that are killed, stopped, short of memory, or go back to older checkpoints."""

import shutil
import threading
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import holdfast
from holdfast import api
from holdfast.engine.io.checkpoint_files import CheckpointFiles
from holdfast.storage import mapped_file
from tests.helpers.killed_jobs import run_killed_job

#: A number of saves of which none is drained.
NEVER = 10**6


def open_run(base: Path, **options: Any) -> holdfast.RunDirectory:
    return holdfast.RunDirectory(base / "run", local=holdfast.LocalTier(base / "tier", **options))


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3000,), float(step))}


def save_steps(directory: holdfast.RunDirectory, *steps: int) -> None:
    for step in steps:
        directory.save(f"step_{step}", state_of(step), step=step)


def load_step(base: Path) -> float:
    """Load the latest checkpoint, wait until it is durable, and return its step, which its bytes must be of."""
    state, directory = state_of(-1), open_run(base)
    step = directory.restore(None, state).step
    directory.wait()
    assert torch.equal(state["w"], torch.full((3000,), float(step or 0)))
    return float(step or 0)


def job_that_saves(base: Path, *steps: int) -> None:
    directory = open_run(base, drain_every=NEVER)
    try:
        directory.restore(None, state_of(-1))
        directory.wait()
    except holdfast.NoCheckpointError:
        pass
    save_steps(directory, *steps)



# ---------------------------------------------------------------------------------------------------------------
# Other options at the load than at saves


def test_a_job_may_load_with_other_options_than_it_saves_with(tmp_path: Path) -> None:
    run_killed_job(job_that_saves, tmp_path, 1, 2, 3, 4)
    run_killed_job(_load_by_folder_and_save, tmp_path)
    assert run_killed_job(load_step, tmp_path) == 6


def _load_by_folder_and_save(base: Path) -> None:
    holdfast.restore(base / "run", None, state_of(-1), local=str(base / "tier"))
    for step in (5, 6):
        local = holdfast.LocalTier(base / "tier", drain_every=NEVER)
        holdfast.save_checkpoint(base / "run", f"step_{step}", state_of(step), step=step, local=local)
    api._defaults.clear()


# ---------------------------------------------------------------------------------------------------------------
# Saves that the tier has no memory for


def save_without_memory(directory: holdfast.RunDirectory, step: int) -> None:
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
    step = directory.restore(None, state_of(-1), strict=False).step
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


def test_a_first_save_without_the_tier_retires_what_an_earlier_job_has_left_there(tmp_path: Path) -> None:
    run_killed_job(job_that_saves, tmp_path, 1, 2, 3)
    run_killed_job(_begin_without_memory, tmp_path)
    assert run_killed_job(_load_without_strictness, tmp_path) == 9


def _begin_without_memory(base: Path) -> None:
    save_without_memory(open_run(base, drain_every=NEVER), 9)


def test_a_tag_that_was_saved_without_the_tier_is_taken(tmp_path: Path) -> None:
    directory = open_run(tmp_path, drain_every=NEVER)
    save_without_memory(directory, 1)
    with pytest.raises(holdfast.TagExistsError):
        save_steps(directory, 1)


# ---------------------------------------------------------------------------------------------------------------
# Going back, and a run directory that loses its epochs


def test_a_job_that_goes_back_drains_nothing_of_the_branch_that_it_left(tmp_path: Path) -> None:
    directory = open_run(tmp_path, drain_every=2)
    save_steps(directory, 1, 2, 3)
    directory.restore("step_2", state_of(-1))
    directory.finalize()
    assert [info.tag for info in directory.list()] == ["step_2"]
    save_steps(directory, 3)
    directory.finalize()
    assert [info.tag for info in directory.list()] == ["step_2", "step_3"]


@pytest.mark.parametrize("lost", ["run", "run/.epochs"])
def test_a_run_directory_that_loses_its_epochs_does_not_make_old_generations_the_newest(
    tmp_path: Path, lost: str
) -> None:
    for step in (1, 2, 3):
        run_killed_job(job_that_saves, tmp_path, step)
    shutil.rmtree(tmp_path / lost)
    run_killed_job(job_that_saves, tmp_path, 4, 5)
    assert run_killed_job(load_step, tmp_path) == 5


def test_a_tag_is_free_again_after_its_checkpoint_was_removed(tmp_path: Path) -> None:
    local = holdfast.LocalTier(tmp_path / "tier")
    directory = holdfast.RunDirectory(tmp_path / "run", keep=1, local=local)
    save_steps(directory, 1, 2, 1)
    assert [info.tag for info in directory.list()] == ["step_1"]
