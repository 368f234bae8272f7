"""Versions of weights that one process publishes: their bytes, their order, what is kept and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import rankless
from rankless.errors import CorruptCheckpointError, InvalidArgumentError, NoCheckpointError, WeightsConflictError
from rankless.formats.weights import version_reader
from rankless.ondisk.block_crcs import crc64
from rankless.storage.object_path import ObjectPath
from rankless.weights import published_copy, version_output, weights_folders
from tests.helpers.corruption import flip_tensor_bit
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import FakeS3, store_at


class Net(torch.nn.Module):
    """Parameters that step, one that is frozen, a tied one, and buffers of other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(301, 64)
        self.up = torch.nn.Linear(64, 333)
        self.head = torch.nn.Linear(64, 301, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = torch.nn.Parameter(torch.randn(50), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(7, dtype=torch.bool))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("wide", torch.zeros(9, dtype=torch.float64))


class Training:
    """A model that changes a little in each step, and the folder that ``save_model`` writes of it."""

    def __init__(self, folder: Path, dtype: str | None = "bfloat16") -> None:
        torch.manual_seed(0)
        self.model, self.folder, self.dtype, self.steps = Net(), folder, dtype, 0
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-4)

    def step(self) -> None:
        self.steps += 1
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.model.seen += 1
        self.model.mask[self.steps % 7] ^= True
        self.model.wide += 0.1

    def expected(self, **options: object) -> dict[str, bytes]:
        """Return the files that ``save_model`` writes of the model now."""
        folder = self.folder / f"expected_{self.steps}"
        rankless.save_model(self.model, folder, shard=True, dtype=self.dtype, **options)
        return {file.name: file.read_bytes() for file in folder.iterdir()}


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.resolve().iterdir()}


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


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


def test_a_follower_that_is_behind_takes_levels(training: Training, tmp_path: Path) -> None:
    """A level is a delta over eight versions: fewer bytes than these have together."""
    weights = tmp_path / "weights"
    follower = rankless.WeightFollower(weights, tmp_path / "followed")
    with rankless.WeightPublisher(weights, dtype="bfloat16") as publisher:
        for step in range(20):
            training.step()
            publisher.publish(training.model, step=step).wait()  # type: ignore[union-attr]
            if not step:
                follower.update()
    follower.update()
    assert files_of(tmp_path / "followed/current") == training.expected()
    deltas = [json.loads(version.path.read_text())["deltas"] for version in rankless.list_weight_versions(weights)]
    assert [number for number, ways in enumerate(deltas, 1) if len(ways) == 2] == [9, 17]
    sizes = [sum(part["size"] for part in ways[0]["parts"]) for ways in deltas[1:]]
    assert follower.read_bytes < sum(sizes)
    follower.close()


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


def test_what_has_not_changed_is_linked(tmp_path: Path) -> None:
    state = {"frozen": torch.randn(3000), "trained": torch.randn(3000)}
    weights, followed = tmp_path / "weights", tmp_path / "followed"
    options = {"max_shard_size": 12_000, "async_save": False}
    with (
        rankless.WeightPublisher(weights, **options) as publisher,
        rankless.WeightFollower(weights, followed) as follower,
    ):
        publisher.publish(state)
        follower.update()
        first = {file.name: file.stat().st_ino for file in (followed / "current").resolve().iterdir()}
        state["trained"] += 1
        publisher.publish(state)
        follower.update()
        second = {file.name: file.stat().st_ino for file in (followed / "current").resolve().iterdir()}
    assert sum(first[name] == second[name] for name in first if name.endswith(".safetensors")) == 1


def test_a_busy_publisher_may_leave_a_version_out(training: Training, tmp_path: Path) -> None:
    with rankless.WeightPublisher(tmp_path / "weights", on_busy="skip") as publisher:
        handles = [publisher.publish(training.model, step=step) for step in range(5)]
    published = [handle for handle in handles if handle is not None]
    assert handles[0] is not None
    assert len(rankless.list_weight_versions(tmp_path / "weights")) == len(published)


class TestDamage:
    @pytest.fixture
    def weights(self, training: Training, tmp_path: Path) -> Path:
        with rankless.WeightPublisher(tmp_path / "weights", dtype="bfloat16") as publisher:
            for step in range(4):
                training.step()
                publisher.publish(training.model, step=step)
        return tmp_path / "weights"

    def test_a_flipped_bit_in_a_part_is_found_and_another_way_is_taken(
        self, training: Training, weights: Path, tmp_path: Path
    ) -> None:
        """The follower has version 3: with the part of version 4 corrupt, nothing leads there, and it stays."""
        with rankless.WeightFollower(weights, tmp_path / "followed") as follower:
            last = rankless.list_weight_versions(weights)[-1]
            aside = last.path.rename(tmp_path / "aside")
            follower.update()
            before = files_of(tmp_path / "followed/current")
            aside.rename(last.path)
            (part,) = next(weights.glob("delta-4-*")).iterdir()
            raw = bytearray(part.read_bytes())
            raw[-20] ^= 1
            part.write_bytes(raw)
            with pytest.raises(CorruptCheckpointError, match=r"version 4|delta-4"):
                follower.update()
            assert files_of(tmp_path / "followed/current") == before
            with rankless.WeightPublisher(weights, dtype="bfloat16") as publisher:
                publisher.publish(training.model, step=4)
            assert follower.update().number == 5  # type: ignore[union-attr]
            assert files_of(tmp_path / "followed/current") == training.expected()

    def test_a_damaged_folder_of_the_follower_is_put_together_anew(
        self, training: Training, weights: Path, tmp_path: Path
    ) -> None:
        with rankless.WeightFollower(weights, tmp_path / "followed") as follower:
            last = rankless.list_weight_versions(weights)[-1]
            aside = last.path.rename(tmp_path / "aside")
            follower.update()
            aside.rename(last.path)
            flip_tensor_bit((tmp_path / "followed/current").resolve() / "model.safetensors", "up.weight")
            follower.update()
            assert files_of(tmp_path / "followed/current") == training.expected()
            assert follower.read_bytes > rankless.list_weight_versions(weights)[0].nbytes

    def test_a_flipped_bit_in_an_anchor_is_never_loaded(self, weights: Path) -> None:
        flip_tensor_bit(next(weights.glob("anchor-1-*")) / "model.safetensors", "up.weight")
        with pytest.raises(CorruptCheckpointError, match=r"up\.weight"):
            rankless.load_model(Net(), weights)

    def test_a_corrupt_manifest_is_named(self, weights: Path) -> None:
        path = rankless.list_weight_versions(weights)[-1].path
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
        with pytest.raises(CorruptCheckpointError, match=path.name):
            rankless.load_model(Net(), weights)

    def test_removed_versions_are_no_checkpoint(self, weights: Path) -> None:
        first = rankless.list_weight_versions(weights)[0]
        first.path.unlink()
        with pytest.raises(NoCheckpointError, match="no way leads to version 4"):
            rankless.load_model(Net(), weights)
        with pytest.raises(NoCheckpointError):
            rankless.load_model(Net(), first.path)


class TestFollowedFolders:
    def test_one_folder_has_one_follower(self, tmp_path: Path, training: Training) -> None:
        with rankless.WeightPublisher(tmp_path / "weights") as publisher:
            publisher.publish(training.model)
        with rankless.WeightFollower(tmp_path / "weights", tmp_path / "followed") as follower:
            follower.update()
            other = rankless.WeightFollower(tmp_path / "weights", tmp_path / "followed")
            with pytest.raises(rankless.StateError, match="another process follows"):
                other.update()
        assert other.update() is not None
        other.close()

    def test_files_of_others_stay(self, tmp_path: Path, training: Training) -> None:
        followed = tmp_path / "followed"
        (followed / "1-notes").mkdir(parents=True)
        (followed / "config.json").write_text("mine")
        with (
            rankless.WeightPublisher(tmp_path / "weights", async_save=False) as publisher,
            rankless.WeightFollower(tmp_path / "weights", followed) as follower,
        ):
            for _ in range(4):
                training.step()
                publisher.publish(training.model)
                follower.update()
        assert (followed / "config.json").read_text() == "mine"
        assert sorted(path.name[:2] for path in followed.iterdir() if path.name[0].isdigit()) == ["1-", "3-", "4-"]

    @pytest.mark.parametrize("kind", ["folder", "file", "link"])
    def test_something_else_at_current_is_refused(self, tmp_path: Path, training: Training, kind: str) -> None:
        current = tmp_path / "followed/current"
        if kind == "folder":
            current.mkdir(parents=True)
        else:
            current.parent.mkdir()
            current.write_text("mine") if kind == "file" else current.symlink_to("..")
        with rankless.WeightPublisher(tmp_path / "weights") as publisher:
            publisher.publish(training.model)
        follower = rankless.WeightFollower(tmp_path / "weights", tmp_path / "followed")
        with pytest.raises(InvalidArgumentError, match="current"):
            follower.update()
        assert current.exists()

    def test_a_model_follows_from_memory_and_nothing_is_left(self, tmp_path: Path, training: Training) -> None:
        model = Net()
        with (
            rankless.WeightPublisher(tmp_path / "weights", async_save=False) as publisher,
            rankless.WeightFollower(tmp_path / "weights", model) as follower,
        ):
            for step in range(3):
                training.step()
                publisher.publish(training.model, step=step)
                assert follower.update().step == step  # type: ignore[union-attr]
                assert torch.equal(model.up.weight, training.model.up.weight)
            place = follower.folder
            assert place is not None
            assert place.exists()
        assert not place.exists()


def test_waiting_for_weights(tmp_path: Path, training: Training) -> None:
    weights = tmp_path / "weights"
    assert rankless.wait_for_weights(weights, timeout=0.1, poll_seconds=0.05) is None
    with rankless.WeightPublisher(weights) as publisher:
        publisher.publish(training.model, step=7)
    version = rankless.wait_for_weights(weights)
    assert version is not None
    assert version.step == 7
    assert rankless.wait_for_weights(weights, after=version, timeout=0.1) is None


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


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": "int8"}, "dtype must be one of bfloat16, float16, float32, float64"),
        ({"anchor_every": 0}, "anchor_every must be an integer of at least 1"),
        ({"keep": 0}, "keep must be an integer of at least 1"),
        ({"on_busy": "never"}, "on_busy must be 'wait' or 'skip'"),
        ({"on_failure": "ignore"}, "on_failure must be 'raise' or 'warn'"),
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

    def test_a_directory_that_was_made_anew(self, training: Training, tmp_path: Path) -> None:
        """Another publisher has reached the same number: only the id says that it is another version."""
        weights = tmp_path / "weights"
        first = rankless.WeightPublisher(weights, async_save=False)
        first.publish(training.model, step=0)
        follower = rankless.WeightFollower(weights, tmp_path / "followed")
        follower.update()
        before = files_of(tmp_path / "followed/current")
        shutil.rmtree(weights)
        training.step()
        rankless.WeightPublisher(weights, async_save=False).publish(training.model, step=0)
        with pytest.raises(WeightsConflictError):
            first.publish(training.model, step=1)
        with pytest.raises(rankless.StateError, match="made anew"):
            follower.update()
        follower.close()
        with (
            rankless.WeightFollower(weights, tmp_path / "followed") as again,
            pytest.raises(rankless.StateError, match="made anew"),
        ):
            again.update()
        assert files_of(tmp_path / "followed/current") == before

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

    def test_a_load_that_has_failed_is_tried_again(self, training: Training, tmp_path: Path) -> None:
        with rankless.WeightPublisher(tmp_path / "weights") as publisher:
            publisher.publish(training.model)
        model = Net()
        with rankless.WeightFollower(tmp_path / "weights", model) as follower:
            with (
                mock.patch("rankless.weights.follower.load_model", side_effect=KeyboardInterrupt),
                pytest.raises(KeyboardInterrupt),
            ):
                follower.update()
            assert follower.version is None
            assert follower.update() is not None
        assert torch.equal(model.up.weight, training.model.up.weight)

    def test_versions_are_removed_while_they_are_followed(self, training: Training, tmp_path: Path) -> None:
        weights = tmp_path / "weights"
        publisher = rankless.WeightPublisher(weights, anchor_every=1, keep=1, async_save=False)
        publisher.publish(training.model, step=0)
        read = version_reader.WeightsReader.read_stored
        is_first = [True]

        def read_late(self: Any, *arguments: Any) -> None:
            if is_first.pop() if is_first else False:
                training.step()
                publisher.publish(training.model, step=1)
            read(self, *arguments)

        with (
            mock.patch.object(version_reader.WeightsReader, "read_stored", read_late),
            rankless.WeightFollower(weights, tmp_path / "followed") as follower,
        ):
            assert follower.update().number == 2  # type: ignore[union-attr]
        assert files_of(tmp_path / "followed/current") == files_of(next(weights.glob("anchor-2-*")))

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

    def test_a_folder_in_memory_is_removed_at_the_end_of_the_process(self, training: Training, tmp_path: Path) -> None:
        with rankless.WeightPublisher(tmp_path / "weights") as publisher:
            publisher.publish({"w": torch.zeros(3)})
        code = (
            "import rankless, torch\n"
            f"follower = rankless.WeightFollower({str(tmp_path / 'weights')!r}, {{'w': torch.ones(3)}})\n"
            "follower.update()\nprint(follower.folder)"
        )
        result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        assert not Path(result.stdout.strip()).exists()


def no_memory(nbytes: int) -> Any:
    raise MemoryError(nbytes)


class TestHostileManifests:
    """Manifests with right CRCs that no publisher writes."""

    @pytest.fixture
    def manifest(self, training: Training, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
        with rankless.WeightPublisher(tmp_path / "weights") as publisher:
            for step in range(2):
                training.step()
                publisher.publish(training.model, step=step)
        path = rankless.list_weight_versions(tmp_path / "weights")[-1].path
        table = json.loads(path.read_text())
        del table["crc64nvme"]
        return path, table

    @pytest.mark.parametrize(
        "change",
        [
            lambda table: table.update(folder="mydata"),
            lambda table: table["anchor"].update(folder="mydata"),
            lambda table: table["deltas"][0]["parts"][0].update(name="../precious.txt"),
            lambda table: table["files"][0].update(name="/etc/passwd"),
            lambda table: table["files"][0].update(data_start=2**40, size=2**41),
            lambda table: table["files"][0].update(data_start=2**62),
            lambda table: table["deltas"][0].update(parts=table["deltas"][0]["parts"] * 100),
            lambda table: table["deltas"][0]["base"].update(number=2),
            lambda table: table["deltas"][0]["base"].update(number=2**70),
            lambda table: table.update(deltas=[]),
            lambda table: table["files"].append(table["files"][0]),
            lambda table: table.update(number=5),
        ],
    )
    def test_is_refused(self, manifest: tuple[Path, dict[str, Any]], change: Callable[[Any], None]) -> None:
        path, table = manifest
        change(table)
        body = json.dumps(table, separators=(",", ":")).encode().removesuffix(b"}")
        path.write_bytes(body + b',"crc64nvme":"%016x"}\n' % crc64(body))
        with pytest.raises((CorruptCheckpointError, NoCheckpointError)):
            rankless.load_model(Net(), path)

    def test_a_number_that_no_publisher_reaches_is_no_version(self, training: Training, tmp_path: Path) -> None:
        (tmp_path / "weights/versions").mkdir(parents=True)
        (tmp_path / "weights/versions/99999999999999999999.json").write_text("{}")
        with rankless.WeightPublisher(tmp_path / "weights") as publisher:
            publisher.publish(training.model)
        assert [version.number for version in rankless.list_weight_versions(tmp_path / "weights")] == [1]


class TestWhatIsMissingOrLate:
    def test_a_level_without_a_part_of_this_rank(self, training: Training, tmp_path: Path) -> None:
        weights = tmp_path / "weights"
        follower = rankless.WeightFollower(weights, tmp_path / "followed")
        with rankless.WeightPublisher(weights, async_save=False) as publisher:
            for step in range(12):
                training.step()
                publisher.publish(training.model, step=step)
                if step == 4:
                    shutil.rmtree(next(weights.glob("delta-4-*")))
        follower.update()
        follower.close()
        training.dtype = None
        assert files_of(tmp_path / "followed/current") == training.expected()

    def test_a_list_that_is_late(self, training: Training) -> None:
        """Of a bucket, the next number follows from what is asked for by its name."""
        bucket = FakeS3()
        with bucket.served() as url:
            weights = store_at(url).path(f"{BUCKET}/weights")
            publisher = rankless.WeightPublisher(weights, async_save=False)
            publisher.publish(training.model, step=0)
            bucket.list_lag = 3600.0
            training.step()
            publisher.publish(training.model, step=1)
            training.step()
            rankless.WeightPublisher(weights, async_save=False).publish(training.model, step=2)
            bucket.list_lag = 0.0
            versions = rankless.list_weight_versions(weights)
            assert [(version.number, version.is_anchor) for version in versions] == [(1, True), (2, False), (3, True)]

    def test_another_anchor_is_taken_if_one_is_corrupt(self, training: Training, tmp_path: Path) -> None:
        weights = tmp_path / "weights"
        with rankless.WeightPublisher(weights, anchor_every=3, async_save=False, keep=None) as publisher:
            for step in range(5):
                training.step()
                publisher.publish(training.model, step=step)
        flip_tensor_bit(next(weights.glob("anchor-4-*")) / "model.safetensors", "up.weight")
        with rankless.WeightFollower(weights, tmp_path / "followed") as follower:
            follower.update()
        training.dtype = None
        assert files_of(tmp_path / "followed/current") == training.expected()
