"""Versions of weights that one process publishes: their bytes, their order, what is kept and what is refused."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import rankless
from rankless.errors import InvalidArgumentError, WeightsConflictError
from rankless.storage.object_path import ObjectPath
from rankless.weights import published_copy, version_output, weights_folders
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import FakeS3, store_at
from tests.helpers.published_training import Net, Training, files_of


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", None, "float16"])
@pytest.mark.parametrize("options", [{}, {"max_shard_size": 40_000}], ids=["one file", "several files"])
def test_each_version_is_what_save_model_writes(
    tmp_path: Path, dtype: str | None, async_save: bool, options: dict[str, int]
) -> None:
    training = Training(tmp_path, dtype)
    weights, expected = tmp_path / "weights", []
    with (
        rankless.WeightPublisher(
            weights, dtype=dtype, anchor_every=7, keep=None, async_save=async_save, **options
        ) as p,
        rankless.WeightFollower(weights, tmp_path / "followed") as follower,
    ):
        for step in range(20):
            training.step()
            handle = p.publish(training.model, step=step, metrics={"loss": 1.0 / (step + 1), "bad": float("nan")})
            assert handle is not None
            version = handle.wait()
            expected.append(training.expected(**options))
            assert (version.number, version.step, version.metrics["bad"]) == (step + 1, step, None)
            assert version.is_anchor == (step % 7 == 0)
            if step % 3 == 0:
                updated = follower.update()
                assert updated is not None
                assert updated.number == version.number
                assert files_of(tmp_path / "followed/current") == expected[-1]
        assert follower.update() is not None
        assert follower.update() is None
    for version, files in zip(rankless.list_weight_versions(weights), expected, strict=True):
        folder = tmp_path / "stored" / str(version.number)
        folder.mkdir(parents=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        assert not rankless.diff(version.path, folder).tensors
        if version.is_anchor:
            assert files_of(next(weights.glob(f"anchor-{version.number}-*"))) == files


def test_a_delta_is_a_small_part_of_the_model(training: Training, tmp_path: Path) -> None:
    with rankless.WeightPublisher(tmp_path / "weights", dtype=torch.bfloat16) as publisher:
        for step in range(3):
            training.step()
            publisher.publish(training.model, step=step)
    first, *later = rankless.list_weight_versions(tmp_path / "weights")
    assert first.written_bytes >= first.nbytes
    assert all(version.written_bytes < 0.7 * version.nbytes for version in later)


def test_the_newest_anchors_are_kept_with_what_is_based_on_them(training: Training, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    (weights / "mine").mkdir(parents=True)
    (weights / "mine/notes.txt").write_text("years of work")
    with rankless.WeightPublisher(weights, anchor_every=3, keep=2) as publisher:
        for step in range(11):
            training.step()
            publisher.publish(training.model, step=step)
    versions = rankless.list_weight_versions(weights)
    assert [version.number for version in versions] == [7, 8, 9, 10, 11]
    assert {int(folder.name.split("-")[1]) for folder in weights.glob("*-*-*")} == {7, 8, 9, 10, 11}
    assert (weights / "mine/notes.txt").read_text() == "years of work"
    for version in versions:
        rankless.load_model(Net(), version.path)


def test_the_next_job_begins_with_an_anchor_and_a_higher_number(training: Training, tmp_path: Path) -> None:
    for step in (5, 3):
        training.step()
        with rankless.WeightPublisher(tmp_path / "weights") as publisher:
            publisher.publish(training.model, step=step)
    versions = rankless.list_weight_versions(tmp_path / "weights")
    assert [(version.number, version.step, version.is_anchor) for version in versions] == [(1, 5, True), (2, 3, True)]


def test_a_training_that_goes_back_publishes_an_anchor(training: Training, tmp_path: Path) -> None:
    with rankless.WeightPublisher(tmp_path / "weights") as publisher:
        for step in (1, 2, 1, 2):
            training.step()
            publisher.publish(training.model, step=step)
    versions = rankless.list_weight_versions(tmp_path / "weights")
    assert [version.is_anchor for version in versions] == [True, False, True, False]


def test_a_version_names_the_point_of_its_training(training: Training, tmp_path: Path) -> None:
    run = rankless.RunDirectory(tmp_path / "run")
    with rankless.WeightPublisher(tmp_path / "weights", training=run) as publisher:
        publisher.publish(training.model, step=0)
        info = run.save("step_1", training.model, step=1).wait()
        publisher.publish(training.model, step=1)
    first, second = rankless.list_weight_versions(tmp_path / "weights")
    assert first.training is None
    assert second.training is not None
    assert (second.training.run, second.training.checkpoint, second.training.tag) == (info.run, info.id, "step_1")


def test_of_two_publishers_one_is_refused_until_it_begins_anew(training: Training, tmp_path: Path) -> None:
    first, second = (rankless.WeightPublisher(tmp_path / "weights", async_save=False) for _ in range(2))
    first.publish(training.model, step=1)
    second.publish(training.model, step=1)
    training.step()
    with pytest.raises(WeightsConflictError, match="let only one job publish"):
        first.publish(training.model, step=2)
    assert [version.number for version in rankless.list_weight_versions(tmp_path / "weights")] == [1, 2]
    first.publish(training.model, step=2)
    model = Net()
    rankless.load_model(model, tmp_path / "weights")
    assert torch.equal(model.up.weight, training.model.up.weight)
    assert rankless.list_weight_versions(tmp_path / "weights")[-1].is_anchor


def test_other_shapes_or_names_begin_anew(training: Training, tmp_path: Path) -> None:
    with rankless.WeightPublisher(tmp_path / "weights", keep=None, async_save=False) as publisher:
        publisher.publish(training.model)
        publisher.publish({"other": torch.zeros(3)})
        publisher.publish({"other": torch.zeros(4)})
        publisher.publish({"other": torch.ones(4)})
    versions = rankless.list_weight_versions(tmp_path / "weights")
    assert [version.is_anchor for version in versions] == [True, True, True, False]
    state = {"other": torch.zeros(4)}
    rankless.load_model(state, tmp_path / "weights")
    assert state["other"].tolist() == [1.0] * 4


def test_in_a_bucket_with_a_model_that_follows(training: Training, tmp_path: Path) -> None:
    with FakeS3().served() as url:
        weights = store_at(url).path(f"{BUCKET}/weights")
        assert isinstance(weights, ObjectPath)
        with (
            rankless.WeightPublisher(weights, dtype="bfloat16", anchor_every=4, keep=1) as publisher,
            rankless.WeightFollower(weights, tmp_path / "followed") as follower,
        ):
            for step in range(10):
                training.step()
                publisher.publish(training.model, step=step).wait()  # type: ignore[union-attr]
                if step % 2:
                    follower.update()
                    assert files_of(tmp_path / "followed/current") == training.expected()
        assert [version.number for version in rankless.list_weight_versions(weights)] == [9, 10]
        names = {
            info.path.relative_to(weights).parts[0].split("-")[-2:][0] for info in weights.store.list_objects(weights)
        }
        assert names <= {"9", "10", "versions"}
        model = Net()
        rankless.load_model(model, weights)
        assert torch.equal(model.up.weight, training.model.up.weight.bfloat16().float())


def test_a_busy_publisher_may_leave_a_version_out(training: Training, tmp_path: Path) -> None:
    commit, may_commit = weights_folders.commit_version, threading.Event()

    def commit_later(directory: Path, manifest: Any) -> str:
        may_commit.wait(60)
        return commit(directory, manifest)

    with rankless.WeightPublisher(tmp_path / "weights", on_busy="skip") as publisher:
        with mock.patch.object(version_output, "commit_version", commit_later):
            first = publisher.publish(training.model, step=0)
            assert first is not None
            assert publisher.publish(training.model, step=1) is None
            may_commit.set()
            first.wait()
        assert publisher.publish(training.model, step=2) is not None
    assert [version.step for version in rankless.list_weight_versions(tmp_path / "weights")] == [0, 2]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": "int8"}, "dtype must be one of bfloat16, float16, float32, float64"),
        ({"anchor_every": 0}, "anchor_every must be an integer of at least 1"),
        ({"keep": 0}, "keep must be an integer of at least 1"),
        ({"on_busy": "never"}, "on_busy must be one of wait, skip"),
        ({"on_failure": "ignore"}, "on_failure must be one of raise, warn"),
    ],
)
def test_wrong_arguments(tmp_path: Path, options: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        rankless.WeightPublisher(tmp_path / "weights", **options)  # type: ignore[arg-type]


class TestOtherJobsAndProcesses:
    """What an attack has found: each case once published a version that nobody could read, or hid a failure."""

    def test_a_forked_process_begins_anew(self, training: Training, tmp_path: Path) -> None:
        publisher = rankless.WeightPublisher(tmp_path / "weights", async_save=False)
        publisher.publish(training.model, step=0)
        training.step()
        process = os.fork()
        if not process:
            try:
                publisher.publish(training.model, step=1)
            finally:
                os._exit(0)
        os.waitpid(process, 0)
        versions = rankless.list_weight_versions(tmp_path / "weights")
        assert [version.is_anchor for version in versions] == [True, True]
        rankless.load_model(Net(), tmp_path / "weights")

    def test_no_memory_for_the_copy(self, training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        publisher = rankless.WeightPublisher(tmp_path / "weights", async_save=False, keep=None)
        with monkeypatch.context() as patch:
            patch.setattr(published_copy, "aligned_buffer", no_memory)
            publisher.publish(training.model)
            training.step()
            publisher.publish(training.model)
        for _ in range(3):
            training.step()
            publisher.publish(training.model)
            model = Net()
            rankless.load_model(model, tmp_path / "weights")
            assert torch.equal(model.up.weight, training.model.up.weight)
        sizes = [version.written_bytes for version in rankless.list_weight_versions(tmp_path / "weights")]
        assert sizes[4] < sizes[1]

    def test_a_publisher_that_wakes_up_late(self, training: Training, tmp_path: Path) -> None:
        """Its number was used, and removed again, while it did not run: what it creates is not left."""
        weights = tmp_path / "weights"
        late = rankless.WeightPublisher(weights, async_save=False)
        late.publish(training.model, step=0)
        create = weights_folders.commit_version

        def commit_late(directory: Path, manifest: Any) -> str:
            other = rankless.WeightPublisher(weights, anchor_every=1, keep=1, async_save=False)
            with mock.patch.object(version_output, "commit_version", create):
                for step in range(4):
                    other.publish(training.model, step=step)
            return create(directory, manifest)

        training.step()
        with mock.patch.object(version_output, "commit_version", commit_late), pytest.raises(WeightsConflictError):
            late.publish(training.model, step=1)
        assert [version.number for version in rankless.list_weight_versions(weights)] == [5]
        rankless.load_model(Net(), weights)

    def test_a_later_version_appears_although_the_one_before_has_failed(
        self, training: Training, tmp_path: Path
    ) -> None:
        publisher = rankless.WeightPublisher(tmp_path / "weights", on_failure="warn")
        publisher.publish(training.model, step=0)
        publisher.wait()
        with mock.patch.object(version_output, "commit_version", side_effect=rankless.StorageError(5, "broken")):
            publisher.publish(training.model, step=1)
            time.sleep(0.5)  # the failure is that of the background
        with pytest.warns(UserWarning, match="was not published"):
            handle = publisher.publish(training.model, step=2)
        assert handle is not None
        assert handle.wait().step == 2
        publisher.wait()


def no_memory(nbytes: int) -> Any:
    raise MemoryError(nbytes)
