"""Tests which checkpoint a job of each framework continues, and what stays of the checkpoints that it leaves.

All frameworks name their checkpoints themselves, and use the same names again when a job goes back to an older one.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rankless
from rankless.cli.main import app
from rankless.errors import TagExistsError
from tests.helpers.continued_runs import (
    ADAPTERS,
    LATEST,
    Job,
    evaluate_with_lightning,
    folder_of,
    run_job,
    weight_of,
    weights,
)
from tests.helpers.pool import Ranks

of_each_adapter = pytest.mark.parametrize("name", ADAPTERS)


def run(ranks: Ranks, base: Path, name: str, *jobs: Job, size: int = 1) -> list[str]:
    """Run jobs in one new process. Return rank 0's warnings about rollbacks."""
    return ranks(size, run_job, ADAPTERS[name], folder_of(ADAPTERS[name], base), *jobs)[0]


def of(base: Path, name: str) -> tuple[list[int], set[int]]:
    """Return the weights of the current checkpoints, oldest first, and those of the abandoned ones."""
    found = weights(folder_of(ADAPTERS[name], base))
    current = [weight for weight, is_current in found if is_current]
    return list(dict.fromkeys(current)), {weight for weight, is_current in found if not is_current}


@of_each_adapter
def test_the_latest_is_continued(ranks: Ranks, tmp_path: Path, name: str) -> None:
    assert run(ranks, tmp_path, name, Job(1, 3)) == []
    assert run(ranks, tmp_path, name, Job(10, 5, LATEST)) == []
    assert of(tmp_path, name) == ([1, 2, 3, 13, 23], set())


@of_each_adapter
@pytest.mark.parametrize("size", [1, 2])
def test_an_older_one_is_continued_and_the_later_ones_stay(ranks: Ranks, tmp_path: Path, name: str, size: int) -> None:
    run(ranks, tmp_path, name, Job(1, 3), size=size)
    assert len(run(ranks, tmp_path, name, Job(10, 4, 2), size=size)) == 1
    assert of(tmp_path, name) == ([1, 2, 12, 22], {3})
    (warning,) = run(ranks, tmp_path, name, Job(100, 3, 2), size=size)
    assert "again" in warning
    assert of(tmp_path, name) == ([1, 2, 102], {3, 12, 22})
    assert run(ranks, tmp_path, name, Job(1000, 4, LATEST), size=size) == []
    assert of(tmp_path, name) == ([1, 2, 102, 1102], {3, 12, 22})


@of_each_adapter
@pytest.mark.parametrize("size", [None, 0])
def test_a_copy_that_was_interrupted_in_the_newest_one_is_continued(
    ranks: Ranks, tmp_path: Path, name: str, size: int | None
) -> None:
    """The manifest of the third step is missing, or empty."""
    run(ranks, tmp_path, name, Job(1, 3))
    folder = folder_of(ADAPTERS[name], tmp_path)
    for newest in [info.path for info in rankless.list_checkpoints(folder) if weight_of(info.path) == 3]:
        (newest / "manifest.json").unlink() if size is None else os.truncate(newest / "manifest.json", size)
    run(ranks, tmp_path, name, Job(10, 4, 2))
    complete = [info.path for info in rankless.list_checkpoints(folder) if info.status == "complete"]
    assert list(dict.fromkeys(map(weight_of, complete))) == [1, 2, 12, 22]


@of_each_adapter
def test_one_process_goes_back(ranks: Ranks, tmp_path: Path, name: str) -> None:
    assert len(run(ranks, tmp_path, name, Job(1, 3), Job(10, 3, 1), Job(100, 4, LATEST))) == 1
    assert of(tmp_path, name) == ([1, 11, 21, 121], {2, 3})


@pytest.mark.parametrize(
    ("name", "limit", "left"),
    [
        ("transformers", {"save_total_limit": 2}, ([22, 32], set())),
        ("Accelerate", {"total_limit": 2}, ([22, 32], set())),
        ("NxD", {"num_kept_ckpts": 2}, ([22, 32], set())),
        # Lightning removes what its callback has saved, and never what it has resumed from.
        ("Lightning", {"save_top_k": 1}, ([1, 2, 32], {3})),
        ("Lightning, the same names", {"save_top_k": 1}, ([1, 2, 32], {3})),
    ],
)
def test_the_frameworks_limit_takes_abandoned_ones_first(
    ranks: Ranks, tmp_path: Path, name: str, limit: dict[str, Any], left: tuple[list[int], set[int]]
) -> None:
    run(ranks, tmp_path, name, Job(1, 3))
    ranks(1, run_job, partial(ADAPTERS[name], **limit), folder_of(ADAPTERS[name], tmp_path), Job(10, 5, 2))
    assert of(tmp_path, name) == left


@of_each_adapter
def test_a_job_that_loads_nothing_begins_a_run_of_its_own(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """It takes the names that its framework gives: Lightning's are free, Accelerate refuses, others overwrite."""
    run(ranks, tmp_path, name, Job(1, 3))
    (outcome,) = ranks.outcomes(1, run_job, ADAPTERS[name], folder_of(ADAPTERS[name], tmp_path), Job(10, 2))
    if name == "Accelerate":
        assert isinstance(outcome, TagExistsError)
        expected = [1, 2, 3]
    else:
        assert outcome == []
        expected = [1, 2, 3, 10, 20] if name == "Lightning" else [3, 10, 20]
    assert of(tmp_path, name) == (expected, set())
    run(ranks, tmp_path, name, Job(100, 4, LATEST))
    assert of(tmp_path, name)[0][-1] == (103 if name == "Accelerate" else 220)


@pytest.mark.parametrize("name", [name for name in ADAPTERS if name != "Lightning"])
def test_a_rollback_by_the_command_is_followed(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """Lightning's `last` means the file that was written last, but the path of the folder the latest checkpoint."""
    run(ranks, tmp_path, name, Job(1, 3))
    folder = folder_of(ADAPTERS[name], tmp_path)
    (first,) = [info.tag for info in rankless.list_checkpoints(folder) if weight_of(info.path) == 1]
    assert CliRunner().invoke(app, ["rollback", str(folder), first]).exit_code == 0
    assert run(ranks, tmp_path, name, Job(10, 3, LATEST)) == []
    assert of(tmp_path, name) == ([1, 11, 21], {2, 3})


def test_lightnings_evaluation_changes_nothing(ranks: Ranks, tmp_path: Path) -> None:
    run(ranks, tmp_path, "Lightning", Job(1, 3))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    ranks(1, evaluate_with_lightning, tmp_path, 1)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
