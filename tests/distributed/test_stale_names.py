"""Tests loads on a host that remembers names: for a while it sees what the run directory held before the last save.

A client of a network file system remembers that a name was missing, or which directory had it. It asks the server again
when the parent directory is listed.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import rankless
from rankless.errors import CheckpointReplacedError, CorruptCheckpointError, RankMismatchError, StorageError
from rankless.formats import native
from rankless.load import load_operation
from rankless.ondisk.manifest import Manifest
from rankless.run import ownership
from rankless.storage import posix
from tests.helpers.pool import Ranks


@contextmanager
def remember_names(seen_before: Path | None, *, is_local: bool) -> Iterator[None]:
    """Let this host see ``seen_before``, or nothing, in place of every checkpoint until it lists a directory."""
    listed: list[Path] = []
    list_names, read_manifest = load_operation.list_names, native.read_manifest

    def list_and_forget(path: Path) -> set[str]:
        listed.append(path)
        return list_names(path)

    def read_remembered(path: Path) -> Any:
        if listed:
            return read_manifest(path)
        if seen_before is None:
            raise CheckpointReplacedError(f"{path} was removed while it was being opened")
        return read_manifest(seen_before)

    with (
        mock.patch.object(load_operation, "is_local", return_value=is_local),
        mock.patch.object(load_operation, "list_names", list_and_forget),
        mock.patch.object(native, "read_manifest", read_remembered),
    ):
        yield


def load_with_stale_names(path: str, seen_before: Path | None, is_local: bool) -> float:
    model = {"w": torch.zeros(4)}
    if dist.get_rank() == 0:
        rankless.load_checkpoint(path, model=model)
    else:
        with remember_names(seen_before, is_local=is_local):
            rankless.load_checkpoint(path, model=model)
    return float(model["w"][0])


@pytest.fixture(params=["missing", "replaced"])
def seen_before(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    """Save a checkpoint. Return what the other hosts remember in its place."""
    if request.param == "replaced":
        rankless.save_checkpoint(tmp_path / "old", "step_1", {"w": torch.zeros(4)})
    rankless.save_checkpoint(tmp_path / "run", "step_1", {"w": torch.ones(4)})
    return tmp_path / "old/step_1" if request.param == "replaced" else None


def test_a_host_that_remembers_names_lists_the_directory_and_loads_what_rank_0_selected(
    ranks: Ranks, tmp_path: Path, seen_before: Path | None
) -> None:
    assert ranks(3, load_with_stale_names, str(tmp_path / "run"), seen_before, False) == [1.0, 1.0, 1.0]


def test_without_that_the_load_fails(ranks: Ranks, tmp_path: Path, seen_before: Path | None) -> None:
    """The control: on a local file system names are not listed again. Files of two checkpoints look corrupt."""
    for error in ranks.outcomes(3, load_with_stale_names, str(tmp_path / "run"), seen_before, True):
        assert isinstance(error, RankMismatchError if seen_before is None else CorruptCheckpointError)


@contextmanager
def fail_with_stale_handles(times: int) -> Iterator[None]:
    """Fail to list directories, as a client whose handle of the directory belongs to a removed one."""
    list_names = load_operation.list_names
    failures = iter([StorageError(errno.ESTALE, "could not list it: Stale file handle")] * times)

    def fail_or_list(path: Path) -> set[str]:
        if error := next(failures, None):
            raise error
        return list_names(path)

    with mock.patch.object(load_operation, "list_names", fail_or_list):
        yield


def load_after_stale_handles(path: str) -> float:
    model = {"w": torch.zeros(4)}
    with contextlib.ExitStack() as stack:
        if dist.get_rank():
            stack.enter_context(remember_names(None, is_local=False))
            stack.enter_context(fail_with_stale_handles(3))
        rankless.load_checkpoint(path, model=model)
    return float(model["w"][0])


def test_a_host_with_a_stale_handle_asks_again(ranks: Ranks, tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "step_1", {"w": torch.ones(4)})
    assert ranks(2, load_after_stale_handles, str(tmp_path)) == [1.0, 1.0]


def test_a_host_without_the_checkpoint_is_named(ranks: Ranks, tmp_path: Path) -> None:
    """Each host has a disk of its own under the same path."""
    rankless.save_checkpoint(tmp_path / "run", "step_1", {"w": torch.ones(4)})
    for error in ranks.outcomes(3, load_unless_missing, str(tmp_path / "run")):
        assert isinstance(error, RankMismatchError)
        assert "ranks 1, 2 of 3" in str(error)
        assert "does not exist on this rank: all ranks must load from a shared file system" in str(error)


def load_unless_missing(path: str) -> None:
    missing = CheckpointReplacedError("removed")
    with (
        mock.patch.object(load_operation, "_VISIBILITY_SECONDS", 0.1),
        mock.patch.object(load_operation, "is_local", return_value=False),
        mock.patch.object(native, "read_manifest", side_effect=missing if dist.get_rank() else native.read_manifest),
    ):
        rankless.load_checkpoint(path, model={"w": torch.zeros(4)})


def test_a_short_timeout_names_the_rank_that_does_not_see_the_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path / "run", "step_1", {"w": torch.ones(4)})
    for error in ranks.outcomes(2, load_within, str(tmp_path / "run"), 4.0):
        assert isinstance(error, RankMismatchError)
        assert "rank 1" in str(error)


def load_within(path: str, timeout: float) -> None:
    missing = CheckpointReplacedError("removed")
    with (
        mock.patch.object(load_operation, "is_local", return_value=False),
        mock.patch.object(load_operation, "path_exists", return_value=False),
        mock.patch.object(native, "read_manifest", side_effect=missing if dist.get_rank() else native.read_manifest),
    ):
        rankless.load_checkpoint(path, model={"w": torch.zeros(4)}, timeout=timeout)


def test_a_stale_handle_means_that_a_path_is_missing(tmp_path: Path) -> None:
    stale = OSError(errno.ESTALE, "Stale file handle")
    with mock.patch.object(Path, "exists", side_effect=stale), mock.patch("os.open", side_effect=stale):
        assert not posix.path_exists(tmp_path)
        assert not posix.is_directory_without(tmp_path, "manifest.json")
    with mock.patch.object(Path, "iterdir", side_effect=stale), mock.patch("os.scandir", side_effect=stale):
        assert posix.list_files(tmp_path) == []
        assert posix.list_names(tmp_path) == posix.list_regular_files(tmp_path) == set()


def test_a_checkpoint_that_other_jobs_replace_while_it_is_judged_is_judged_again(tmp_path: Path) -> None:
    """The manifest is there when its folder is listed; it is missing when it is read, and when the error says why."""
    info = rankless.save_checkpoint(tmp_path / "run", "step_1", {"w": torch.ones(4)}).wait()
    failures = iter([CheckpointReplacedError("it was removed while it was being opened")] * 2)

    def read(path: Path) -> Manifest:
        for error in failures:
            raise error
        return native.read_manifest(path)

    with mock.patch.object(ownership, "read_manifest", read):
        ownership.checkpoint_of("step_1").check(info.path)
    assert next(failures, None) is None
