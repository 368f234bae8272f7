"""Tests ranks that are killed or stopped: the short forms of ``campaigns.kill`` and ``campaigns.stop``."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from campaigns import kill, stop
from campaigns.common import case_runner, interruption, points
from campaigns.common.interruption import Case
from campaigns.common.job import RankOutcome
from campaigns.common.state import ViolationError

SAVING = {point.name: point for point in points.SAVE_POINTS}
LOADING = {point.name: point for point in points.LOAD_POINTS}

KILLS = [
    Case(SAVING["writing"], 0, 2, "rank 0", "overwrite"),
    Case(SAVING["waiting for a stripe"], 2, 3, "file", "new", asynchronous=True),
    Case(SAVING["sending CRCs to the bucket"], 3, 4, "agent", "new"),
    Case(SAVING["merging the CRCs of the bucket"], 2, 4, "agent", "new"),
    Case(SAVING["renamed"], 0, 2, "agent", "retention"),
    Case(LOADING["reading"], 1, 2, "agent"),
]
STOPS = [
    Case(SAVING["writing small files"], 0, 2, "rank 0", "overwrite"),
    Case(SAVING["receiving a stripe"], 1, 3, "agent", "new", asynchronous=True),
    Case(SAVING["CRCs reported"], 0, 3, "agent", "new"),
    Case(SAVING["merging the CRCs of the bucket"], 2, 4, "agent", "new"),
    Case(SAVING["making a gloo group"], 1, 2, "agent", "new"),
    Case(LOADING["verifying checksums"], 0, 2, "rank 0"),
]


def test_who_is_killed_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    interruption.create_run(tmp_path / "template", tmp_path / "first")
    for case, killed in case_runner.run_cases(KILLS, partial(_in_a_folder, kill.kill_at_point, tmp_path), 2):
        assert killed.reached, case
        assert not killed.violation


def test_a_run_that_is_killed_again_and_again_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    killed = kill.kill_repeatedly(0, tmp_path, kills=3)
    assert len(killed) == 3
    assert not [item.violation for item in killed if item.violation]


@pytest.mark.full
def test_who_is_stopped_is_named_and_does_no_harm_when_it_is_woken(tmp_path: Path) -> None:
    interruption.create_run(tmp_path / "template", tmp_path / "first")
    work = partial(stop.stop_at_point, meanwhile=True)
    for case, stopped in case_runner.run_cases(STOPS, partial(_in_a_folder, work, tmp_path), 2):
        assert stopped.reached, case
        assert not stopped.violation


def survivors(case: Case, *ends: RankOutcome) -> None:
    others = [rank for rank in range(case.size) if rank != case.victim]
    interruption.check_survivors(SimpleNamespace(outcomes=dict(zip(others, ends, strict=True))), case, 0.0)


def test_survivors_that_raise_different_errors_are_told() -> None:
    error = RankOutcome(1.0, None, "RankTimeoutError", "rank 1 did not come", is_typed=True)
    case = Case(SAVING["writing"], 1, 3, "agent", "new")
    survivors(case, error, error)
    for other in (
        RankOutcome(1.0, "done"),
        replace(error, error="RankFailedError"),
        replace(error, message="rank 1 is gone"),
    ):
        with pytest.raises(ViolationError, match="not one error"):
            survivors(case, error, other)


def test_without_rank_0_survivors_need_only_raise_one_type() -> None:
    error = RankOutcome(1.0, None, "RankTimeoutError", "rank 0 did not come while writing", is_typed=True)
    case = Case(SAVING["writing"], 0, 3, "agent", "new")
    survivors(case, error, replace(error, message="rank 0 did not come while preparing"))
    with pytest.raises(ViolationError, match="not one error"):
        survivors(case, error, replace(error, error="RankFailedError"))


def test_a_load_that_only_some_survivors_end_well_is_told() -> None:
    error = RankOutcome(1.0, None, "RankTimeoutError", "rank 0 did not come", is_typed=True)
    with pytest.raises(ViolationError, match="some rank loaded"):
        survivors(Case(LOADING["reading"], 0, 3, "agent"), error, RankOutcome(1.0, "done"))


def _in_a_folder(work: Any, path: Path, case: Case) -> Any:
    folder = path / str(abs(hash(case)))
    folder.mkdir()
    return work(case, folder)
