"""Tests where the history and the journal of a run lie: in it, or next to it if a framework lists its folder.

The oracle is what any program sees: the names in the folder, and what all jobs and commands say about the run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

import rankless
from rankless.errors import StorageError, SupersededError
from rankless.run import claims, records_folder, stored_history
from rankless.run.journal import read_journal
from rankless.run.records_folder import FOLDER, JOURNAL, keep_records_beside, records_of
from rankless.run.rollback import roll_back
from rankless.run.stored_history import read_history
from rankless.storage.object_path import make_object_path
from tests.golden import reader
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import AWS, FakeS3
from tests.helpers.run_directories import list_tags, train_as_job


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run in a folder that a framework lists, whose job has saved three steps."""
    keep_records_beside(tmp_path / "ckpts")
    train_as_job(tmp_path / "ckpts", 3)
    return tmp_path / "ckpts"


def all_names(folder: Path) -> list[str]:
    """Return the names in a folder as a framework sees them, with hidden ones."""
    return sorted(path.name for path in folder.iterdir())


STEPS = ["step_1", "step_2", "step_3"]


class TestBesideTheRun:
    def test_the_folder_has_nothing_but_checkpoints(self, run: Path) -> None:
        assert all_names(run) == STEPS
        assert all_names(run.parent) == [".ckpts.rankless", "ckpts"]
        assert all_names(run.parent / ".ckpts.rankless") == [FOLDER, JOURNAL]

    def test_a_rollback_is_known_to_all(self, run: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train_as_job(run, 2, "step_1")
        assert list_tags(run) == ["step_2@1", "step_3", "step_1", "step_2"]
        assert rankless.restore(run, model={"w": torch.zeros(2)}).tag == "step_2"
        assert reader.latest(run) == run / "step_2"
        assert [entry.kind for entry in read_journal(run)] == ["saved"] * 4
        shown = subprocess.run(
            [sys.executable, "-m", "rankless", "ls", str(run), "--tree"], capture_output=True, check=True, text=True
        )
        assert "abandoned" in shown.stdout

    def test_the_command_rollback_writes_there(self, run: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            roll_back(run, "step_2")
        assert all_names(run) == STEPS
        assert read_history(run).number == 2

    def test_of_two_jobs_at_once_the_older_one_is_refused(self, run: Path) -> None:
        older, newer = rankless.RunDirectory(run), rankless.RunDirectory(run)
        older.restore(None, {"w": torch.zeros(2)}, resume=True)
        with mock.patch.object(claims, "_claimed", {}):  # as in another process
            newer.restore(None, {"w": torch.zeros(2)}, resume=True)
        with mock.patch.object(claims, "_claimed", {}), pytest.raises(SupersededError):
            older.save("step_4", {"w": torch.zeros(2)}, step=4)
        newer.save("step_4", {"w": torch.zeros(2)}, step=4)
        assert all_names(run) == [*STEPS, "step_4"]

    def test_a_link_to_the_run_leads_to_the_same_records(self, run: Path) -> None:
        (run.parent / "elsewhere").mkdir()
        link = run.parent / "elsewhere/newest"
        link.symlink_to(run)
        assert records_of(link) == records_of(run) == run.parent / ".ckpts.rankless"
        train_as_job(link, 4)
        assert all_names(run.parent / "elsewhere") == ["newest"]
        assert read_history(run).number == 2

    def test_a_run_that_was_moved_alone_is_a_copy_without_a_history(self, run: Path) -> None:
        moved = run.rename(run.with_name("moved"))
        assert read_history(moved).number == 0
        train_as_job(moved, 4)
        assert list_tags(moved) == [*STEPS, "step_4"]
        assert read_history(moved).number == 2  # above all that its checkpoints name

    def test_after_all_checkpoints_were_removed_another_run_begins(self, run: Path) -> None:
        first = read_history(run).run
        shutil.rmtree(run)
        train_as_job(run, 1)
        assert list_tags(run) == ["step_1"]
        assert read_history(run).run != first

    def test_a_lost_folder_is_made_again_by_the_next_save(self, run: Path) -> None:
        shutil.rmtree(run.parent / ".ckpts.rankless")
        keep_records_beside(run)
        train_as_job(run, 4)
        assert all_names(run) == [*STEPS, "step_4"]


class TestInTheRun:
    @pytest.fixture
    def old(self, tmp_path: Path) -> Path:
        """A run that another program has begun, or an older version."""
        train_as_job(tmp_path / "old", 2)
        return tmp_path / "old"

    def test_records_stay_where_they_are(self, old: Path) -> None:
        keep_records_beside(old)
        train_as_job(old, 3)
        assert all_names(old) == [FOLDER, JOURNAL, *STEPS]
        assert all_names(old.parent) == ["old"]
        assert read_history(old).number == 2

    def test_they_count_if_both_exist(self, old: Path) -> None:
        (old.parent / ".old.rankless").mkdir()
        assert records_of(old) == old

    @pytest.mark.parametrize("why", ["mounted", "read-only", "a long name", "the root"])
    def test_they_are_there_if_nothing_can_be_beside(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
    ) -> None:
        run = tmp_path / ("n" * 246 if why == "a long name" else "run")
        if why == "mounted":
            monkeypatch.setattr(records_folder, "is_mounted", lambda path: path == run)
        if why == "read-only":
            monkeypatch.setattr(records_folder, "make_directory", _refuse)
        if why == "the root":
            keep_records_beside(Path("/"))
            assert records_of(Path("/")) == Path("/")
            return
        keep_records_beside(run)
        train_as_job(run, 1)
        assert all_names(tmp_path) == [run.name]
        assert all_names(run) == [FOLDER, JOURNAL, "step_1"]

    def test_a_mounted_folder_is_recognised(self) -> None:
        assert Path("/proc").is_mount()
        assert records_folder.is_mounted(Path("/proc"))


def _refuse(path: Path) -> None:
    raise StorageError(f"could not create {path}")


def test_two_first_jobs_of_which_one_lists_the_folder_begin_two_runs(tmp_path: Path) -> None:
    """As two first jobs do anywhere. The other one has looked for the folder next to it before it was made."""
    run = tmp_path / "ckpts"
    jobs = {"listing": rankless.RunDirectory(run), "plain": rankless.RunDirectory(run)}
    keep_records_beside(run)
    jobs["listing"].save("listing_1", {"w": torch.zeros(2)})
    unseen = mock.patch.object(stored_history, "records_of", lambda path, *_: path)
    with unseen, mock.patch.object(claims, "_claimed", {}):
        jobs["plain"].save("plain_1", {"w": torch.zeros(2)})
    jobs["listing"].save("listing_2", {"w": torch.zeros(2)})
    jobs["plain"].save("plain_2", {"w": torch.zeros(2)})
    runs = {info.tag: info.run for info in rankless.list_checkpoints(run)}
    assert [*runs] == ["listing_1", "plain_1", "listing_2", "plain_2"]
    assert runs["listing_1"] == runs["listing_2"] != runs["plain_1"] == runs["plain_2"]


@pytest.mark.parametrize("jobs", [2, 6])
def test_of_jobs_that_begin_at_once_each_gets_a_number_of_its_own(tmp_path: Path, jobs: int) -> None:
    run = tmp_path / "ckpts"
    program = (
        "import sys; from pathlib import Path; from rankless.run.claims import JobHistory, claim;"
        "from rankless.run.records_folder import keep_records_beside; run = Path(sys.argv[1]);"
        "sys.stdin.readline(); keep_records_beside(run); print(claim(run, JobHistory(), [])[0].incarnation)"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(jobs)
    ]
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    numbers = sorted(int(process.communicate()[0]) for process in started)
    assert numbers == [*range(1, jobs + 1)]
    assert not run.exists()


def test_in_a_bucket_nothing_moves(tmp_path: Path) -> None:
    fake = FakeS3(AWS)
    with fake.connected():
        url = make_object_path(fake.store_at("http://fake"), f"{BUCKET}/ckpts")
        keep_records_beside(url)
        rankless.save_checkpoint(url, "step_1", {"w": torch.zeros(2)}, step=1)
        assert records_of(url) == url
        assert read_history(url).number == 1


_CALLS: dict[str, Callable[[Path], object]] = {"look": rankless.list_checkpoints, "journal": read_journal}


@pytest.mark.parametrize("call", _CALLS)
def test_to_look_at_a_run_creates_nothing(tmp_path: Path, call: str) -> None:
    (tmp_path / "ckpts").mkdir()
    _CALLS[call](tmp_path / "ckpts")
    assert all_names(tmp_path) == ["ckpts"]
