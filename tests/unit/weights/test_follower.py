"""Folders and models that follow published weights: what they read, what they keep, and what they remove."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import rankless
from rankless.cli.follow import go_to_newest
from rankless.components.component_calls import load_model
from rankless.errors import InvalidArgumentError, WeightsConflictError
from rankless.formats.weights import version_reader
from rankless.storage.file_lock import FileLock
from rankless.weights.followed_folder import FollowedFolder
from tests.helpers.corruption import flip_tensor_bit
from tests.helpers.published_training import Net, Training, files_of


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


class TestFollowedFolders:
    def test_one_folder_has_one_follower(self, tmp_path: Path, training: Training) -> None:
        with rankless.WeightPublisher(tmp_path / "weights") as publisher:
            publisher.publish(training.model)
        with rankless.WeightFollower(tmp_path / "weights", tmp_path / "followed") as follower:
            follower.update()
            other = rankless.WeightFollower(tmp_path / "weights", tmp_path / "followed")
            with pytest.raises(rankless.StateError, match="another follower has"):
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

    @pytest.mark.parametrize("place", ["memory", "disk"])
    def test_a_folder_for_a_model_has_one_version(self, tmp_path: Path, training: Training, place: str) -> None:
        folder = None if place == "memory" else tmp_path / "host"
        with (
            rankless.WeightPublisher(tmp_path / "weights", async_save=False) as publisher,
            rankless.WeightFollower(tmp_path / "weights", Net(), folder=folder) as follower,
        ):
            for number in range(1, 4):
                training.step()
                publisher.publish(training.model)
                follower.update()
                assert follower.folder is not None
                assert [path.name.split("-")[0] for path in follower.folder.glob("[0-9]*-*")] == [str(number)]

    @pytest.mark.parametrize("moment", ["before the lock", "after the removal"])
    def test_a_new_folder_in_memory_that_another_follower_takes_for_a_dead_one(
        self, tmp_path: Path, training: Training, moment: str
    ) -> None:
        """Another follower of this host looks at it before it is locked."""
        locks = list[FileLock]()

        def lock_late(path: Path, *, create: bool = True) -> FileLock:
            if not create:
                return FileLock(path, create=False)
            if not locks:
                locks.append(FileLock(path))
                if moment == "after the removal":
                    shutil.rmtree(path.parent)
                    locks[0].close()
            elif locks[0].is_open:
                locks[0].close()
            return FileLock(path)

        with (
            rankless.WeightPublisher(tmp_path / "weights", async_save=False) as publisher,
            rankless.WeightFollower(tmp_path / "weights", Net()) as follower,
        ):
            publisher.publish(training.model)
            with mock.patch("rankless.weights.followed_folder.FileLock", lock_late):
                assert follower.update() is not None


class TestFoldersOfAnEarlierProcess:
    """What an earlier process has put into a folder was proven then. Bytes may have changed since."""

    @pytest.mark.parametrize("harm", ["flip", "remove"])
    def test_are_proven_once_and_mended(self, tmp_path: Path, training: Training, harm: str) -> None:
        weights, current = tmp_path / "weights", tmp_path / "followed/current"
        with rankless.WeightPublisher(weights, async_save=False) as publisher:
            publisher.publish(training.model)
        with rankless.WeightFollower(weights, tmp_path / "followed") as follower:
            follower.update()
        file = current.resolve() / "model.safetensors"
        flip_tensor_bit(file, "up.weight") if harm == "flip" else file.unlink()
        training.dtype = None
        model = Net()
        with rankless.WeightFollower(weights, tmp_path / "followed") as again:
            again.update()
            assert files_of(current) == training.expected()
        with rankless.WeightFollower(weights, model) as other:
            other.update()
        assert torch.equal(model.up.weight, training.model.up.weight)

    def test_stay_while_they_are_proven(self, tmp_path: Path, training: Training) -> None:
        weights, current = tmp_path / "weights", tmp_path / "followed/current"
        with rankless.WeightPublisher(weights, async_save=False) as publisher:
            publisher.publish(training.model)
        for _ in range(2):
            with rankless.WeightFollower(weights, tmp_path / "followed") as follower:
                follower.update()
            before = files_of(current), current.readlink()
        assert (files_of(current), current.readlink()) == before

    def test_a_whole_one_is_left_alone(self, tmp_path: Path, training: Training) -> None:
        """A reader may open its files by name at any time, and somebody may have put a tokenizer there."""
        weights, current = tmp_path / "weights", tmp_path / "followed/current"
        with rankless.WeightPublisher(weights, async_save=False) as publisher:
            publisher.publish(training.model)
        with rankless.WeightFollower(weights, tmp_path / "followed") as follower:
            follower.update()
        (current / "tokenizer.json").write_text("{}")
        before = {path.name: path.stat().st_ino for path in current.iterdir()}
        with rankless.WeightFollower(weights, tmp_path / "followed") as again:
            again.update()
            assert again.verified_bytes > 0
        assert {path.name: path.stat().st_ino for path in current.iterdir()} == before
        assert [path.name for path in current.parent.iterdir() if path.name.startswith(".pending")] == []


def test_waiting_for_weights(tmp_path: Path, training: Training) -> None:
    weights = tmp_path / "weights"
    assert rankless.wait_for_weights(weights, timeout=0.1, poll_seconds=0.05) is None
    with rankless.WeightPublisher(weights) as publisher:
        publisher.publish(training.model, step=7)
    version = rankless.wait_for_weights(weights)
    assert version is not None
    assert version.step == 7
    assert rankless.wait_for_weights(weights, after=version, timeout=0.1) is None


def test_a_directory_that_was_made_anew(training: Training, tmp_path: Path) -> None:
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
    training.step()
    rankless.WeightPublisher(weights, async_save=False).publish(training.model, step=1)
    with (
        rankless.WeightFollower(weights, tmp_path / "followed") as again,
        pytest.raises(rankless.StateError, match="made anew"),
    ):
        again.update()
    assert files_of(tmp_path / "followed/current") == before


def test_a_load_that_has_failed_is_tried_again(training: Training, tmp_path: Path) -> None:
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


class TestFoldersOfOthers:
    """Somebody else changes or removes what a follower has put together, while it lives."""

    @pytest.fixture
    def weights(self, tmp_path: Path, training: Training) -> Path:
        training.dtype = None
        with rankless.WeightPublisher(tmp_path / "weights", async_save=False) as publisher:
            publisher.publish(training.model, step=0)
        return tmp_path / "weights"

    @pytest.mark.parametrize("harm", ["flip", "remove file", "remove version", "remove folder"])
    @pytest.mark.parametrize("place", ["memory", "disk"])
    def test_a_model_is_loaded_from_a_mended_folder(
        self, tmp_path: Path, training: Training, weights: Path, place: str, harm: str
    ) -> None:
        model, folder = Net(), None if place == "memory" else tmp_path / "host"
        real, is_first = load_model, [True]

        def load_harmed(target: Any, path: Path, **options: Any) -> object:
            if is_first.pop() if is_first else False:
                _harm(path, harm)
            return real(target, path, **options)

        with (
            mock.patch("rankless.weights.follower.load_model", load_harmed),
            rankless.WeightFollower(weights, model, folder=folder) as follower,
        ):
            with pytest.raises(rankless.RanklessError):
                follower.update()
            assert follower.version is None
            assert follower.update() is not None
        assert torch.equal(model.up.weight, training.model.up.weight)

    @pytest.mark.parametrize("harm", ["remove version", "remove folder"])
    def test_a_removed_folder_is_put_together_again(
        self, tmp_path: Path, training: Training, weights: Path, harm: str
    ) -> None:
        current = tmp_path / "followed/current"
        with rankless.WeightFollower(weights, tmp_path / "followed") as follower:
            follower.update()
            assert follower.update() is None
            _harm(current.resolve(), harm)
            assert follower.update() is not None
            assert files_of(current) == training.expected()
            assert follower.update() is None

    def test_the_command_puts_a_removed_version_together_again(
        self, tmp_path: Path, training: Training, weights: Path
    ) -> None:
        current = tmp_path / "followed/current"
        with FollowedFolder(tmp_path / "followed") as followed:
            assert go_to_newest(weights, followed, as_json=True) is not None
            shutil.rmtree(current.resolve())
            assert go_to_newest(weights, followed, as_json=True) is not None
            assert go_to_newest(weights, followed, as_json=True) is None
        assert files_of(current) == training.expected()

    def test_a_removed_link_is_made_again(self, tmp_path: Path, training: Training, weights: Path) -> None:
        current = tmp_path / "followed/current"
        with rankless.WeightFollower(weights, tmp_path / "followed") as follower:
            follower.update()
            inode = (current / "model.safetensors").stat().st_ino
            current.unlink()
            assert follower.update() is not None
            assert follower.update() is None
            assert files_of(current) == training.expected()
            assert (current / "model.safetensors").stat().st_ino == inode
            current.unlink()
            current.write_text("mine")
            with pytest.raises(InvalidArgumentError, match="current"):
                follower.update()
        assert current.read_text() == "mine"

    def test_a_folder_that_another_follower_has_made_again_is_left_to_it(self, tmp_path: Path, weights: Path) -> None:
        first, second = (rankless.WeightFollower(weights, tmp_path / "followed") for _ in range(2))
        first.update()
        shutil.rmtree(tmp_path / "followed")
        second.update()
        with pytest.raises(rankless.StateError, match="another follower has"):
            first.update()
        second.close()
        assert first.update() is None
        first.close()

    def test_the_command_locks_a_folder_that_it_makes_again(self, tmp_path: Path, weights: Path) -> None:
        with FollowedFolder(tmp_path / "followed") as followed:
            go_to_newest(weights, followed, as_json=True)
            shutil.rmtree(tmp_path / "followed")
            assert go_to_newest(weights, followed, as_json=True) is not None
            with pytest.raises(rankless.StateError, match="another follower has"):
                FollowedFolder(tmp_path / "followed")


def _harm(version: Path, harm: str) -> None:
    """Change or remove the folder of a version, or all that the follower has."""
    if harm == "flip":
        flip_tensor_bit(version / "model.safetensors", "up.weight")
    elif harm == "remove file":
        (version / "model.safetensors").unlink()
    else:
        shutil.rmtree(version if harm == "remove version" else version.parent)


def test_versions_are_removed_while_they_are_followed(training: Training, tmp_path: Path) -> None:
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


def test_a_folder_in_memory_is_removed_at_the_end_of_the_process(training: Training, tmp_path: Path) -> None:
    with rankless.WeightPublisher(tmp_path / "weights") as publisher:
        publisher.publish({"w": torch.zeros(3)})
    code = (
        "import rankless, torch\n"
        f"follower = rankless.WeightFollower({str(tmp_path / 'weights')!r}, {{'w': torch.ones(3)}})\n"
        "follower.update()\nprint(follower.folder)"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not Path(result.stdout.strip()).exists()
