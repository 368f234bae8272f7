"""Tests the claims of jobs: of several at a time each gets another number, and what cannot be read is passed over."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rankless.errors import StateError, SupersededError
from rankless.run import claims, stored_history
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.claims import Claim, JobHistory, LoadedBase, announce, check_not_superseded
from rankless.run.records_folder import FOLDER
from rankless.run.stored_history import read_history, read_newest
from rankless.storage.object_path import make_object_path
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import AWS, FakeS3


def info(run: str, incarnation: int, sequence: int) -> CheckpointInfo:
    tag = f"step_{sequence}"
    return CheckpointInfo(
        tag, Path(tag), sequence=sequence, run=run, id=f"{sequence:016x}", saved_as=tag, incarnation=incarnation
    )


def base_of(one: CheckpointInfo, *, newest: int | None, job: str = "another") -> LoadedBase:
    return LoadedBase.of(one, one.tag, newest, job)


def claim(run: Path, job: JobHistory, found: list[CheckpointInfo], **options: Any) -> Claim:
    return claims.claim(run, job, found, **options)[0]


def test_of_many_claims_at_a_time_each_gets_another_number(tmp_path: Path) -> None:
    claimed: list[int] = []

    def begin() -> None:
        claimed.append(claim(tmp_path, JobHistory(), []).incarnation)
        claimed.append(announce(tmp_path, 0))

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == list(range(1, 17))
    assert [path.name for path in (tmp_path / FOLDER).iterdir() if path.name.startswith(".")] == []


def test_a_job_that_continues_a_run_supersedes_the_one_before(tmp_path: Path) -> None:
    first = claim(tmp_path, JobHistory(), [])
    saved = info(first.run, first.incarnation, 1)
    second = claim(tmp_path, JobHistory(base=base_of(saved, newest=1)), [saved])
    assert (second.run, second.incarnation) == (first.run, 2)
    check_not_superseded(tmp_path, read_history(tmp_path), JobHistory(claim=second))
    with (
        mock.patch.object(claims, "_claimed", {}),  # as in another process
        pytest.raises(SupersededError, match="another job has continued the run"),
    ):
        check_not_superseded(tmp_path, read_history(tmp_path), JobHistory(claim=first))


def test_a_claim_that_a_store_let_another_job_overwrite_is_lost() -> None:
    """A store that ignores conditions lets two jobs that claim at the same moment write one entry."""
    fake = FakeS3(replace(AWS, honours_conditions=False))
    with fake.connected():
        run = make_object_path(fake.store_at("http://fake"), f"{BUCKET}/run")
        first = claim(run, JobHistory(), [])
        saved, seen = info(first.run, first.incarnation, 1), read_newest(run)
        jobs = [JobHistory(token, LoadedBase.of(saved, saved.tag, 1, token, seen=1)) for token in ("one", "two")]
        jobs[0].claim = claim(run, jobs[0], [saved], seen=seen)
        with mock.patch.object(claims, "_claimed", {}):  # as in another process
            jobs[1].claim = claim(run, jobs[1], [saved], seen=seen)
            check_not_superseded(run, read_history(run), jobs[1])
        assert jobs[0].claim == jobs[1].claim
        with pytest.raises(SupersededError, match="another job has continued the run"):
            check_not_superseded(run, read_history(run), jobs[0])


def test_objects_of_one_process_share_the_newest_claim(tmp_path: Path) -> None:
    first = claim(tmp_path, JobHistory(), [])
    saved = info(first.run, first.incarnation, 1)
    second = claim(tmp_path, JobHistory(base=base_of(saved, newest=1)), [saved])
    job = JobHistory(claim=first)
    check_not_superseded(tmp_path, read_history(tmp_path), job)
    assert job.claim == second


def test_a_job_that_continues_nothing_supersedes_no_other(tmp_path: Path) -> None:
    first = claim(tmp_path, JobHistory(), [])
    claim(tmp_path, JobHistory(), [])
    check_not_superseded(tmp_path, read_history(tmp_path), JobHistory(claim=first))


def test_ranks_of_one_job_share_a_claim(tmp_path: Path) -> None:
    """A sub-group whose first rank is another one saves first: the rest of the job is not superseded by it."""
    first = claim(tmp_path, JobHistory(), [])
    saved = info(first.run, first.incarnation, 1)
    base = base_of(saved, newest=1, job="the same")
    jobs = [JobHistory(base.token, base), JobHistory(base.token, base)]
    assert claim(tmp_path, jobs[0], [saved]) == claim(tmp_path, jobs[1], [saved]) == Claim(first.run, 2)


def test_a_job_cannot_continue_what_another_one_has_continued_since_it_was_loaded(tmp_path: Path) -> None:
    first = claim(tmp_path, JobHistory(), [])
    saved, later = info(first.run, 1, 1), info(first.run, 1, 2)
    with pytest.raises(StateError, match="another job has continued the run"):
        claim(tmp_path, JobHistory(base=base_of(saved, newest=1)), [saved, later])
    with pytest.warns(UserWarning, match=r"goes back to 'step_1': 1 later checkpoint"):
        claim(tmp_path, JobHistory(base=base_of(saved, newest=None)), [saved, later])
    assert not read_history(tmp_path).is_current(later)


def test_a_job_that_stood_still_since_its_load_leaves_a_run_that_was_saved_since_the_latest(tmp_path: Path) -> None:
    begun = claim(tmp_path, JobHistory(), [])
    first = info(begun.run, begun.incarnation, 1)
    loaded = JobHistory(base=base_of(first, newest=1))
    other = claim(tmp_path, JobHistory(), [first])
    found = [first, info(other.run, other.incarnation, 2)]
    claim(tmp_path, JobHistory(base=base_of(found[1], newest=None)), found)  # as `rankless rollback` does
    claim(tmp_path, loaded, [first])
    assert read_history(tmp_path).find_latest(found) == found[1]
    assert read_history(tmp_path).next_sequence(found, first.run) > found[1].sequence


def test_a_load_by_name_completes_one_of_the_latest(tmp_path: Path) -> None:
    """A framework has read its own state from the latest checkpoint; another job has saved one more meanwhile."""
    first = claim(tmp_path, JobHistory(), [])
    saved = [info(first.run, first.incarnation, sequence) for sequence in (1, 2)]
    job = JobHistory()
    job.note_loaded(base_of(saved[0], newest=1), resumes=False)
    job.note_loaded(base_of(saved[0], newest=None), resumes=True)
    with pytest.raises(StateError, match="load the latest checkpoint, or go back to 'step_1' by its tag"):
        claim(tmp_path, job, saved)
    job.note_loaded(base_of(saved[0], newest=None), resumes=True)  # which the error advises
    with pytest.warns(UserWarning, match="goes back to 'step_1'"):
        claim(tmp_path, job, saved)


def test_a_corrupt_entry_is_passed_over(tmp_path: Path) -> None:
    first = claim(tmp_path, JobHistory(), [])
    claim(tmp_path, JobHistory(), [])
    (tmp_path / FOLDER / "00000002.json").write_text("{")
    with pytest.warns(UserWarning, match=r"00000002\.json is corrupt"):
        history = read_history(tmp_path)
    assert history.number == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said already
        third = claim(tmp_path, JobHistory(), [])
    assert third.incarnation == 3
    assert set(read_history(tmp_path).runs) == {first.run, third.run}


def make_socket(path: Path) -> None:
    """Make a socket. Its address is shorter than the path."""
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
        made.bind(path.name)


def make_huge_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, Path.mkdir, make_socket, make_huge_file, lambda path: path.symlink_to(path)],
    ids=["pipe", "directory", "socket", "huge file", "loop of links"],
)
def test_what_is_no_file_of_an_entry_is_passed_over(make: Callable[[Path], None], tmp_path: Path) -> None:
    first = claim(tmp_path, JobHistory(), [])
    make(tmp_path / FOLDER / "00000005.json")
    with pytest.warns(UserWarning, match=r"00000005\.json is corrupt"):
        history = read_history(tmp_path)
    assert history.number == 1
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        read_history(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert stored_history.read_entries(tmp_path).unreadable == 1
    assert claim(tmp_path, JobHistory(), []).incarnation == 6
    assert stored_history.read_token(tmp_path) == history.job.token
    assert first.run in read_history(tmp_path).runs


@pytest.mark.parametrize("name", ["00000005.json", "999999999.json"])
def test_an_entry_with_the_number_of_another_one_is_passed_over(name: str, tmp_path: Path) -> None:
    first = claim(tmp_path, JobHistory(), [])
    for data in ((tmp_path / FOLDER / "00000001.json").read_bytes(), b"{}"):
        (tmp_path / FOLDER / name).write_bytes(data)
        with (
            mock.patch.object(stored_history, "_passed_over", set()),
            pytest.warns(UserWarning, match="move it elsewhere"),
        ):
            assert read_history(tmp_path).runs.keys() == {first.run}
    assert claim(tmp_path, JobHistory(), []).incarnation == int(name.removesuffix(".json")) + 1


def test_above_the_highest_number_of_all_no_job_claims(tmp_path: Path) -> None:
    claim(tmp_path, JobHistory(), [])
    (tmp_path / FOLDER / f"{10**12 - 1}.json").write_bytes(b"")
    names = set((tmp_path / FOLDER).iterdir())
    with (
        pytest.warns(UserWarning, match="move it elsewhere"),
        pytest.raises(StateError, match=r"999999999999\.json is left for a job: move that file elsewhere"),
    ):
        claim(tmp_path, JobHistory(), [])
    assert set((tmp_path / FOLDER).iterdir()) == names


@pytest.mark.parametrize("name", ["5.json", "00000000005.json", "-0000005.json", "\u0665" * 8 + ".json"])
def test_files_with_other_names_are_no_entries(name: str, tmp_path: Path) -> None:
    claim(tmp_path, JobHistory(), [])
    (tmp_path / FOLDER / name).write_text("{}")
    assert claim(tmp_path, JobHistory(), []).incarnation == 2


def test_a_directory_that_has_lost_its_history_gets_higher_numbers(tmp_path: Path) -> None:
    saved = info("r" * 16, 7, 3)
    continued = claim(tmp_path, JobHistory(base=base_of(saved, newest=3)), [saved])
    assert continued.incarnation == 8
    assert read_history(tmp_path).is_current(saved)


def test_a_claim_after_a_look_that_is_outdated_gets_another_number(tmp_path: Path) -> None:
    """The number of the claim that it has not seen is taken, so the job looks again."""
    first = claim(tmp_path, JobHistory(), [])
    saved = info(first.run, first.incarnation, 1)
    seen = stored_history.read_newest(tmp_path)
    second = claim(tmp_path, JobHistory(base=base_of(saved, newest=1)), [saved], seen=seen)
    with mock.patch.object(claims, "_claimed", {}), pytest.raises(StateError, match="another job has continued"):
        claim(tmp_path, JobHistory(base=base_of(saved, newest=1)), [saved], seen=seen)
    other, history = claims.claim(tmp_path, JobHistory(), [saved], seen=seen)
    assert (other.incarnation, history.runs[first.run].incarnation) == (3, second.incarnation)
