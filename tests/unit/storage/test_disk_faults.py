"""Tests that a failing disk does not restart a run, lose what is replaced, or show incomplete checkpoints."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import rankless
from rankless.engine.io.checkpoint_files import CheckpointFiles
from rankless.errors import StorageError
from rankless.storage import atomic_rename, file_memo, posix
from rankless.storage.atomic_rename import create_small
from rankless.storage.store import PosixStore
from tests.helpers.run_directories import list_names


def save(path: Path, step: int, **options: Any) -> None:
    rankless.save_checkpoint(path, f"step_{step}", {"w": torch.full((4,), float(step))}, step=step, **options)


def refusing(name: str) -> Any:
    """The disk refuses files of this name."""
    read = posix.read_small

    def refuse(path: Path, limit: int = 2**30) -> bytes:
        if path.parent.name == name:
            raise StorageError(5, f"could not read {path}: Input/output error")
        return read(path, limit)

    return mock.patch.object(PosixStore, "read_small", staticmethod(refuse))


# No manifest is remembered: every file counts as new.
@mock.patch.multiple(file_memo, _UNSETTLED_NS=10**18, _UNSETTLED_HERE_NS=10**18)
def test_a_run_whose_latest_checkpoint_the_disk_refuses_does_not_begin_again(tmp_path: Path) -> None:
    """Nor does it go back to an older one without a word."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    for name in ("step_1", "step_2"):
        with refusing(name):
            for call in (rankless.has_checkpoint, lambda path: save(path, 3), rankless.restore):
                with pytest.raises(StorageError, match=name):
                    call(tmp_path)
            assert {info.status for info in rankless.list_checkpoints(tmp_path)} == {"unreadable", "complete"}
    save(tmp_path, 3)
    infos = rankless.list_checkpoints(tmp_path)
    assert [(info.tag, info.sequence) for info in infos] == [("step_1", 1), ("step_2", 2), ("step_3", 3)]
    assert len({info.run for info in infos}) == 1


def test_a_write_of_nothing_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    with (
        mock.patch("rankless.storage.direct_io.os.pwrite", return_value=0),
        pytest.raises(StorageError, match="Input/output error"),
    ):
        save(tmp_path, 1)
    assert not list_names(tmp_path)


def test_where_names_cannot_be_exchanged_the_old_one_gets_its_name_back(tmp_path: Path) -> None:
    save(tmp_path, 1)
    rename = Path.rename

    def second_fails(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    with (
        mock.patch.object(atomic_rename, "_renameat2", return_value=False),
        mock.patch.object(Path, "rename", second_fails),
        pytest.raises(StorageError),
    ):
        rankless.save_checkpoint(tmp_path, "step_1", {"w": torch.ones(4)}, overwrite=True)
    assert list_names(tmp_path) == ["step_1"]
    assert rankless.list_checkpoints(tmp_path)[0].step == 1


def test_a_disk_that_dies_between_two_renames_keeps_what_the_next_save_needs(tmp_path: Path) -> None:
    """The old checkpoint has no name then, and only the draft beside it tells that it is wanted."""
    save(tmp_path, 1)
    rename = Path.rename

    def only_first(self: Path, target: Path) -> Path:
        if self.name.startswith("."):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    with (
        mock.patch.object(atomic_rename, "_renameat2", return_value=False),
        mock.patch.object(Path, "rename", only_first),
        pytest.raises(StorageError),
    ):
        rankless.save_checkpoint(tmp_path, "step_1", {"w": torch.ones(4)}, overwrite=True)
    assert "step_1" not in list_names(tmp_path)
    assert [info.tag for info in rankless.list_checkpoints(tmp_path)] == ["step_1"]
    save(tmp_path, 2)
    assert list_names(tmp_path) == ["step_1", "step_2"]


def test_a_draft_that_somebody_removed_is_not_made_again_without_its_data(tmp_path: Path) -> None:
    write = CheckpointFiles._write_files

    def when_it_is_gone(self: CheckpointFiles, *arguments: Any) -> None:
        shutil.rmtree(self.folder)
        write(self, *arguments)

    with (
        mock.patch.object(CheckpointFiles, "_write_files", when_it_is_gone),
        pytest.raises(StorageError, match="No such file"),
    ):
        rankless.save_checkpoint(tmp_path, "s", user_content={"t": torch.zeros(100)}, rng=False)
    assert not list_names(tmp_path)


def test_a_disk_that_refuses_any_look_at_the_path_is_a_typed_error(tmp_path: Path) -> None:
    save(tmp_path, 1)
    stat = os.stat

    def load(refused: int) -> int:
        looks = 0

        def refuse(path: Any, *args: Any, **options: Any) -> Any:
            nonlocal looks
            looks += path == tmp_path
            if path == tmp_path and looks == refused:
                raise OSError(5, "Input/output error")
            return stat(path, *args, **options)

        with mock.patch.object(os, "stat", refuse):
            rankless.restore(tmp_path)
        return looks

    for look in range(1, load(0) + 1):
        with pytest.raises(StorageError, match=tmp_path.name):
            load(look)


def test_a_checkpoint_whose_folder_is_refused_does_not_make_the_next_save_another_run(tmp_path: Path) -> None:
    save(tmp_path, 1)
    opened = os.open

    def refuse(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if path == tmp_path / "step_1":
            raise OSError(13, "Permission denied")
        return opened(path, flags, *args, **options)

    with mock.patch.object(os, "open", refuse), pytest.raises(StorageError, match="step_1"):
        save(tmp_path, 2)
    save(tmp_path, 2)
    first, second = rankless.list_checkpoints(tmp_path)
    assert first.run == second.run


def test_a_draft_that_could_not_be_opened_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise StorageError(28, "no space")

    monkeypatch.setattr("rankless.engine.io.checkpoint_files.posix.allocate_space", full)
    with pytest.raises(StorageError):
        rankless.save_checkpoint(tmp_path, "s", {"w": torch.arange(10.0)})
    assert not list_names(tmp_path)


def test_a_small_file_that_a_full_disk_refuses_leaves_nothing(tmp_path: Path) -> None:
    full = mock.patch.object(os, "fsync", side_effect=OSError(errno.ENOSPC, "full"))
    with full, pytest.raises(StorageError):
        create_small(tmp_path / "1.json", b"{}")
    assert list(tmp_path.iterdir()) == []
