"""Run directories for the commands."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest import mock

import pytest

import rankless
from tests.helpers.training import train_run
from tests.helpers.user_content import USER_CONTENT


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three checkpoints, which share what is unchanged; tests that change it take a copy."""
    path = tmp_path_factory.mktemp("cli") / "run"
    run = train_run("plain")
    with mock.patch("rankless.save.folder_output._MIN_SHARED", 0):
        for step in (1, 2, 3):
            rankless.save_checkpoint(
                path,
                f"step_{step}",
                run.model,
                run.optimizer,
                run.scheduler,
                USER_CONTENT,
                step=step,
                metrics={"val_loss": 2.5 - step, "bleu": float("inf")},
            )
    return path


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))
