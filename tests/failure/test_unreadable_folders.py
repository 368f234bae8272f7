"""Tests that nothing is hidden or removed that this user may not list: it may hold files of another user."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

import rankless
from rankless.errors import StorageError


def state(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((100,), float(step))}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two steps."""
    directory = rankless.RunDirectory(tmp_path / "run")
    for step in (1, 2):
        directory.save(f"step_{step}", state(step), step=step)
    return tmp_path / "run"


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder that is called ``private`` can be listed: the tests may run as root, who may list everything."""
    scandir = os.scandir

    def refuse(path: str | Path = ".") -> os.ScandirIterator[str]:
        if isinstance(path, str | Path) and Path(path).name.strip(".").startswith("private"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)


@pytest.mark.usefixtures("private")
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("below", ["", "private"])
def test_a_save_takes_no_name_from_such_a_folder(run: Path, below: str, *, overwrite: bool) -> None:
    tag = "step_3" if below else "private"
    thesis = run / tag / below / "thesis.txt"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("mine")
    directory = rankless.RunDirectory(run)
    directory.restore(None, state(0), resume=True)
    with pytest.raises(StorageError, match="private"):
        directory.save(tag, state(3), step=3, overwrite=overwrite)
    assert thesis.read_text() == "mine"
    assert not [*run.glob("*.corrupt")]


@pytest.mark.usefixtures("private")
def test_retention_leaves_a_checkpoint_with_such_a_folder(run: Path) -> None:
    (run / "step_1/private").mkdir()
    (run / "step_1/private/thesis.txt").write_text("mine")
    directory = rankless.RunDirectory(run)
    directory.restore(None, state(0), resume=True)
    with pytest.warns(UserWarning, match="step_1 is not removed, because it is not known whether all in it belongs"):
        directory.save("step_3", state(3), step=3, keep=1)
    assert (run / "step_1/private/thesis.txt").read_text() == "mine"
    assert {info.tag for info in rankless.list_checkpoints(run)} == {"step_1", "step_3"}


def test_a_folder_that_cannot_be_renamed_keeps_the_tag(run: Path) -> None:
    """Such as a mount point, or a folder of another user in a directory with the sticky bit."""
    (run / "step_3/model").mkdir(parents=True)
    directory = rankless.RunDirectory(run)
    directory.restore(None, state(0), resume=True)
    with (
        mock.patch("rankless.storage.atomic_rename.rename_path", side_effect=StorageError(errno.EBUSY, "busy")),
        pytest.raises(rankless.TagExistsError, match="step_3"),
    ):
        directory.save("step_3", state(3), step=3)
