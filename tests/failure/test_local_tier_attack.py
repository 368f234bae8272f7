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


def save_without_memory(directory: holdfast.RunDirectory, step: int) -> None:
    with (
        mock.patch("holdfast.tier.slots.map_reserved", side_effect=mapped_file.SpaceShortageError(Path("tier"), 9, 1)),
        mock.patch("holdfast.tier.slots.EMPTY", mapped_file.EMPTY),
        pytest.warns(UserWarning, match="without the local tier"),
    ):
        for slot in directory._tier.slots._slots:  # type: ignore[union-attr]
            if not slot.pins:
                slot.memory = mapped_file.EMPTY
        save_steps(directory, step)


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
