"""Tests pins: no process removes a checkpoint that another one has pinned, and a dead process pins nothing."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

import rankless
from rankless import evaluation
from rankless.cli.main import app
from rankless.errors import CheckpointReplacedError, InvalidArgumentError, NoCheckpointError, StorageError
from rankless.ondisk.hidden_names import HiddenName
from rankless.run import folder_removal, owned_lock
from rankless.storage import file_lock
from tests.helpers.processes import ForkedProcess, start_code

PIN = """
import sys, time, rankless
with rankless.pin(sys.argv[1], sys.argv[2]):
    print("pinned", flush=True)
    time.sleep(600)
"""


def save(path: Path, step: int, **options: object) -> None:
    rankless.save_checkpoint(path, f"s{step}", {"w": torch.full((4,), float(step))}, step=step, **options)  # type: ignore[arg-type]


def tags(path: Path) -> list[str]:
    return [info.tag for info in rankless.list_checkpoints(path)]


def pins(path: Path) -> list[Path]:
    return [file for file in path.iterdir() if file.name.endswith(".pin")]


@contextmanager
def pinned_by_another_process(path: Path, tag: str) -> Iterator[ForkedProcess]:
    with start_code(PIN, path, tag) as process:
        assert process.stdout.readline() == "pinned\n"
        yield process


def test_retention_leaves_a_pinned_checkpoint_until_the_pin_ends(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with rankless.pin(tmp_path) as checkpoint:
        assert (checkpoint.tag, checkpoint.step) == ("s1", 1)
        for step in (2, 3):
            save(tmp_path, step, keep=1)
        assert tags(tmp_path) == ["s1", "s3"]
        assert torch.equal(checkpoint["model/w"], torch.ones(4))
    assert not pins(tmp_path)
    save(tmp_path, 4, keep=1)
    assert tags(tmp_path) == ["s4"]


def test_prune_leaves_a_pinned_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    with rankless.pin(tmp_path, "s1"):
        result = CliRunner().invoke(app, ["prune", str(tmp_path), "--keep", "1", "--leftovers"])
        assert result.exit_code == 0
        assert tags(tmp_path) == ["s1", "s3"]
        assert "kept s1: a process has pinned it" in result.output


def test_a_pin_of_another_process_ends_with_it(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pinned_by_another_process(tmp_path, "s1") as process:
        save(tmp_path, 2, keep=1)
        assert tags(tmp_path) == ["s1", "s2"]
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert len(pins(tmp_path)) == 1
        save(tmp_path, 3, keep=1)
    assert tags(tmp_path) == ["s3"]
    assert not pins(tmp_path)


def test_one_of_two_pins_suffices(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with rankless.pin(tmp_path, "s1"):
        with rankless.pin(tmp_path / "s1"):
            assert len(pins(tmp_path)) == 2
        save(tmp_path, 2, keep=1)
    assert tags(tmp_path) == ["s1", "s2"]


def test_a_pin_of_one_checkpoint_does_not_keep_others(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    with rankless.pin(tmp_path, "s2"):
        save(tmp_path, 3, keep=1)
    assert tags(tmp_path) == ["s2", "s3"]


def test_a_removal_that_has_begun_is_undone(tmp_path: Path) -> None:
    """The pin is created between the removal's first look and its rename."""
    save(tmp_path, 1)
    rename, stack = folder_removal.rename_path, []

    def pin_and_rename(source: Path, target: Path) -> None:
        if source.name == "s1":
            pin = rankless.pin(tmp_path, "s1")
            pin.__enter__()
            stack.append(pin)
        rename(source, target)

    with mock.patch.object(folder_removal, "rename_path", pin_and_rename):
        save(tmp_path, 2, keep=1)
    assert stack
    assert tags(tmp_path) == ["s1", "s2"]
    stack.pop().__exit__(None, None, None)


def test_a_removal_that_cannot_look_for_pins_is_undone(tmp_path: Path) -> None:
    """The first look succeeds, and after the rename the directory cannot be read."""
    save(tmp_path, 1)
    looks = iter([None, StorageError(errno.EIO, "input/output error")])

    def fail_after_rename(_: object) -> str | None:
        if error := next(looks):
            raise error
        return None

    with (
        mock.patch.object(folder_removal, "find_protection", fail_after_rename),
        pytest.warns(UserWarning, match="removed"),
    ):
        save(tmp_path, 2, keep=1)
    assert tags(tmp_path) == ["s1", "s2"]


def test_a_checkpoint_that_was_removed_is_not_pinned(tmp_path: Path) -> None:
    """The removal ends between the open and the pin."""
    save(tmp_path, 1)
    remaining = iter(["s1"])
    holds = evaluation.holds_checkpoint

    def remove_and_look(path: Path, identity: str) -> bool:
        for _ in remaining:
            save(tmp_path, 2, keep=1)
            (tmp_path / "s1").rename(tmp_path / "moved")
        return bool(holds(path, identity))

    with mock.patch("rankless.evaluation.holds_checkpoint", remove_and_look), rankless.pin(tmp_path) as latest:
        assert latest.tag == "s2"
    with pytest.raises(NoCheckpointError), rankless.pin(tmp_path, "s1"):
        pass
    with (
        mock.patch("rankless.evaluation.holds_checkpoint", return_value=False),
        mock.patch("rankless.evaluation._RETRY_SECONDS", 0.0),
        pytest.raises(CheckpointReplacedError, match="while it was being pinned"),
        rankless.pin(tmp_path),
    ):
        pass
    assert not pins(tmp_path)


def test_the_best_checkpoint_is_selected_again_if_it_is_removed(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, metrics={"loss": step})
    opened, real = [], evaluation.view.open

    def remove_and_open(path: Path, tag: object) -> rankless.Checkpoint:
        if not opened:
            opened.append(tag)
            (tmp_path / "s1").rename(tmp_path.parent / "moved")
            raise NoCheckpointError("s1 was removed")
        return real(path, tag)

    patched = mock.patch("rankless.evaluation.view.open", remove_and_open)
    with patched, rankless.pin(tmp_path, rankless.best("loss")) as checkpoint:
        assert checkpoint.tag == "s2"


def test_a_forked_process_does_not_end_the_pin(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with rankless.pin(tmp_path):
        if not (child := os.fork()):
            os._exit(0)
        os.waitpid(child, 0)
        save(tmp_path, 2, keep=1)
        assert tags(tmp_path) == ["s1", "s2"]


@pytest.mark.parametrize(("hours", "kept"), [(23, True), (25, False)])
@pytest.mark.parametrize("obstacle", ["a host whose locks are not seen", "another user", "no locks"])
def test_a_pin_that_proves_nothing_lasts_a_day(tmp_path: Path, obstacle: str, hours: int, kept: bool) -> None:
    save(tmp_path, 1)
    with suppress(KeyboardInterrupt), rankless.pin(tmp_path):
        (pin,) = pins(tmp_path)
        content = pin.read_bytes()
        raise KeyboardInterrupt
    pin.write_bytes(content if obstacle == "no locks" else b"another host".ljust(64))
    os.utime(pin, (time.time() - hours * 3600,) * 2)
    denied = mock.patch.object(owned_lock, "FileLock", side_effect=PermissionError(errno.EACCES, "denied"))
    real = owned_lock.FileLock

    def lock_others(path: Path, *, create: bool = True) -> file_lock.FileLock:
        return denied.new(path) if path == pin else real(path, create=create)

    if obstacle == "another user":
        denied.new = mock.Mock(side_effect=PermissionError(errno.EACCES, "denied"))
    patches = {
        "a host whose locks are not seen": mock.patch.object(owned_lock, "shares_locks", return_value=None),
        "another user": mock.patch.object(owned_lock, "FileLock", lock_others),
        "no locks": mock.patch.object(file_lock, "_try_lock", return_value=False),
    }
    with patches[obstacle]:
        save(tmp_path, 2, keep=1)
    assert tags(tmp_path) == (["s1", "s2"] if kept else ["s2"])


def test_what_cannot_be_pinned(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "file.pt")
    with pytest.raises(InvalidArgumentError, match="no checkpoint of rankless"), rankless.pin(tmp_path / "file.pt"):
        pass
    with pytest.raises(NoCheckpointError), rankless.pin(tmp_path / "none"):
        pass
    save(tmp_path / "run", 1)
    full = mock.patch.object(owned_lock, "write_fully", side_effect=OSError(errno.ENOSPC, "no space"))
    with full, pytest.raises(StorageError, match=r"could not lock .*\.pin: No space"), rankless.pin(tmp_path / "run"):
        pass
    assert not pins(tmp_path / "run")


def test_a_checkpoint_is_there_as_long_as_its_pin(tmp_path: Path) -> None:
    """Also if it is pinned while another process is about to rename it."""
    for step in (1, 2):
        rankless.save_checkpoint(tmp_path, f"s{step}", {"w": torch.zeros(2)}, step=step)
    outcomes: list[str] = []

    def pin_and_look() -> None:
        try:
            with rankless.pin(tmp_path, "s1") as checkpoint:
                is_there = [checkpoint.path.exists() or time.sleep(0.001) for _ in range(300)]
                outcomes.append("there" if all(is_there) else "missing for a moment")
        except NoCheckpointError:
            outcomes.append("removed before")

    def rename_late(source: Path, target: Path) -> None:
        reader.start()
        time.sleep(0.2)
        rename(source, target)

    reader, rename = threading.Thread(target=pin_and_look), folder_removal.rename_path
    with mock.patch.object(folder_removal, "rename_path", rename_late):
        rankless.save_checkpoint(tmp_path, "s3", {"w": torch.zeros(2)}, step=3, keep=rankless.KeepTags("s2"))
    reader.join()
    assert outcomes == ["removed before"]
    assert [info.tag for info in rankless.list_checkpoints(tmp_path)] == ["s2", "s3"]


def test_the_lock_of_a_dead_remover_does_not_stop_pins(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s1", {"w": torch.zeros(2)})
    (info,) = rankless.list_checkpoints(tmp_path)
    (tmp_path / HiddenName("s1", info.run, "0" * 16, "lock").name).touch()
    with rankless.pin(tmp_path, "s1") as checkpoint:
        assert checkpoint.tag == "s1"
