"""A client of a network file system remembers that a run directory was missing, although another host has made it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import rankless
from rankless.cli.main import app
from rankless.run import claims
from rankless.run.checkpoint_info import RunScan
from rankless.run.folder_run_store import FolderRunStore
from rankless.run.history import Entry
from rankless.save import shard_writer
from rankless.storage import filesystem_kind, posix
from tests.helpers.other_jobs import save_as_other_job
from tests.helpers.pool import Ranks


@contextmanager
def remembered_as_missing(folder: Path) -> Iterator[None]:
    """Show a folder as missing until its parent is listed, as the client does. A path of its own does not ask."""
    listed: list[Path] = []
    list_names, path_exists, is_directory = posix.list_names, posix.path_exists, posix.is_directory

    def is_missing(path: Path) -> bool:
        return folder.parent not in listed and (path == folder or folder in path.parents)

    def list_names_of_client(path: Path) -> set[str]:
        listed.append(path)
        return set() if is_missing(path) else list_names(path)

    def exists_for_client(path: Path) -> bool:
        return not is_missing(path) and path_exists(path)

    with (
        mock.patch.object(posix, "list_names", list_names_of_client),
        mock.patch.object(filesystem_kind, "list_names", list_names_of_client),
        mock.patch.object(filesystem_kind, "path_exists", exists_for_client),
        mock.patch.object(filesystem_kind, "is_local", return_value=False),
        mock.patch.object(shard_writer, "is_directory", lambda path: not is_missing(path) and is_directory(path)),
    ):
        yield


def save_although_this_host_has_looked_before(run: Path) -> None:
    """The second rank is on another host. A path is looked for before rank 0 makes the directory."""
    with remembered_as_missing(run) if dist.get_rank() else nullcontext():
        rankless.save_checkpoint(run, "step_1", {"w": torch.ones(64)})


def test_a_save_sees_the_run_directory_that_rank_0_has_made(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_although_this_host_has_looked_before, tmp_path / "run")
    assert [info.tag for info in rankless.list_checkpoints(tmp_path / "run")] == ["step_1"]


@pytest.mark.parametrize("missing", ["run", "."])
def test_lists_see_a_run_that_another_host_has_made(tmp_path: Path, missing: str) -> None:
    run = tmp_path / "new" / "run"
    save_as_other_job(run, "step_1", 1.0)
    with remembered_as_missing(run.parent / missing):
        assert [info.tag for info in rankless.list_checkpoints(run)] == ["step_1"]
    with remembered_as_missing(run.parent / missing):
        assert CliRunner().invoke(app, ["prune", str(run), "--keep", "1"]).exit_code == 0


def test_a_job_goes_on_from_a_checkpoint_that_appears_while_it_looks(tmp_path: Path) -> None:
    with mock.patch.object(claims, "_claimed", {}):  # of another process
        save_as_other_job(tmp_path / "run", "step_1", 1.0)
    scans = [RunScan([], Entry())]

    def look(self: FolderRunStore, *, is_strict: bool) -> RunScan:
        return scans.pop() if scans and is_strict else look_again(self, is_strict=is_strict)

    look_again = FolderRunStore.look
    job = rankless.RunDirectory(tmp_path / "run")
    with mock.patch.object(FolderRunStore, "look", look):
        job.restore(None, {"w": torch.zeros(64)}, resume=True)
    job.save("step_2", {"w": torch.ones(64)}).wait()  # and no StateError: another job has continued the run
    assert [info.tag for info in rankless.list_checkpoints(tmp_path / "run")] == ["step_1", "step_2"]
