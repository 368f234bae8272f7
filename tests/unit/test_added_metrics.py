"""Tests of metrics that are added to finished checkpoints."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch

import rankless
from rankless import KeepBest, KeepLast
from rankless.errors import InvalidArgumentError, NoCheckpointError
from tests.helpers.commands import invoke, invoke_json


def save(path: Path, step: int, **options: object) -> None:
    rankless.save_checkpoint(path, f"s{step}", {"w": torch.ones(2)}, step=step, **options)  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        save(tmp_path, step, metrics={"loss": step})
    return tmp_path


def test_added_metrics_count_like_those_of_the_save(run: Path) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in (run / "s2").rglob("*")}
    info = rankless.add_metrics(run, "s2", {"score": torch.tensor(0.5), "size of the test/set": 10})
    assert info.metrics == {"loss": 2, "score": 0.5, "size of the test/set": 10}
    rankless.add_metrics(run, rankless.LATEST, {"score": 0.25})
    assert [info.metrics.get("score") for info in rankless.list_checkpoints(run)] == [None, 0.5, 0.25]
    assert rankless.open(run, rankless.best("score", "max")).metrics["score"] == 0.5
    assert rankless.restore(run, rankless.best("score"), model={"w": torch.zeros(2)}).tag == "s3"
    assert invoke_json("show", run / "s2")["metrics"]["score"] == 0.5
    assert invoke_json("ls", run)["checkpoints"][1]["metrics"]["score"] == 0.5
    assert {file.name: file.stat().st_mtime_ns for file in (run / "s2").rglob("*")} == before


def test_a_metric_can_be_added_again_and_need_not_be_finite(run: Path) -> None:
    rankless.add_metrics(run, "s1", {"score": 1, "other": math.nan})
    rankless.add_metrics(run, "s1", {"score": 2})
    assert rankless.list_checkpoints(run)[0].metrics == {"loss": 1, "score": 2, "other": None}


def test_the_best_by_an_added_metric_is_kept(run: Path) -> None:
    keep = KeepLast(1) | KeepBest("score", 1, "max", required=False)
    for tag, score in (("s1", 1), ("s2", 3), ("s3", 2)):
        rankless.add_metrics(run, tag, {"score": score})
    directory = rankless.RunDirectory(run)
    directory.load("s3", model={"w": torch.zeros(2)})
    directory.save("s4", {"w": torch.ones(2)}, step=4, keep=keep)
    assert [info.tag for info in rankless.list_checkpoints(run)] == ["s2", "s4"]
    assert sorted(file.name.split(".")[1] for file in run.glob(".*.metric")) == ["s2"]
    with pytest.raises(InvalidArgumentError, match="required=False"):
        directory.save("s5", {"w": torch.ones(2)}, step=5, keep=KeepBest("score"))


@pytest.mark.parametrize(
    ("tag", "metrics", "error"),
    [
        ("s9", {"score": 1}, NoCheckpointError),
        ("s1", {"loss": 1}, InvalidArgumentError),
        ("s1", {"score": "high"}, InvalidArgumentError),
        ("s1", [1], InvalidArgumentError),
    ],
)
def test_wrong_calls_are_refused(run: Path, tag: str, metrics: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        rankless.add_metrics(run, tag, metrics)  # type: ignore[arg-type]
    assert not list(run.glob(".*.metric*"))


def test_metrics_of_a_checkpoint_that_was_replaced_do_not_belong_to_the_new_one(run: Path) -> None:
    rankless.add_metrics(run, "s2", {"score": 1})
    rankless.add_metrics(run, "s3", {"score": 2})
    save(run, 2, overwrite=True)
    shutil.rmtree(run / "s3")
    assert all("score" not in info.metrics for info in rankless.list_checkpoints(run))
    invoke("prune", run, "--leftovers")
    assert not list(run.glob(".*.metric"))


def test_a_corrupt_metric_is_ignored_with_a_warning_that_names_the_file(run: Path) -> None:
    rankless.add_metrics(run, "s2", {"score": 1})
    (file,) = run.glob(".*.metric")
    file.write_bytes(b"{")
    with pytest.warns(UserWarning, match=r"s2.*\.metric is corrupt"):
        assert [info.metrics for info in rankless.list_checkpoints(run)] == [{"loss": 1}, {"loss": 2}, {"loss": 3}]


def test_links_and_large_files_are_not_followed(run: Path) -> None:
    rankless.add_metrics(run, "s2", {"score": 1})
    (file,) = run.glob(".*.metric")
    outside = run.parent / "outside"
    file.rename(outside)
    file.symlink_to(outside)
    with pytest.warns(UserWarning, match="ignored"):
        assert "score" not in rankless.list_checkpoints(run)[1].metrics


def test_the_longest_tag_can_have_a_metric(tmp_path: Path) -> None:
    tag = "x" * 200
    rankless.save_checkpoint(tmp_path, tag, {"w": torch.ones(2)})
    rankless.add_metrics(tmp_path, tag, {"score": 1.0})
    assert rankless.list_checkpoints(tmp_path)[0].metrics == {"score": 1.0}
