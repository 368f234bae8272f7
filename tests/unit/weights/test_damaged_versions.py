"""Corrupt, missing and hostile files of published weights: found and named, or another way is taken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rankless
from rankless.errors import CorruptCheckpointError, NoCheckpointError
from rankless.ondisk.block_crcs import crc64
from tests.helpers.corruption import flip_tensor_bit
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import FakeS3, store_at
from tests.helpers.published_training import Net, Training, files_of


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

    def test_after_the_largest_number_there_is_none(self, training: Training, tmp_path: Path) -> None:
        (tmp_path / "weights/versions").mkdir(parents=True)
        (tmp_path / f"weights/versions/{2**63 - 1:020}.json").write_text("{}")
        with pytest.raises(rankless.StateError, match="largest number"):
            rankless.WeightPublisher(tmp_path / "weights", async_save=False).publish(training.model)


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

    @pytest.mark.parametrize(("every", "count", "corrupt"), [(3, 5, 4), (16, 19, 17), (16, 26, 17)])
    def test_another_anchor_is_taken_if_one_is_corrupt(
        self, training: Training, tmp_path: Path, every: int, count: int, corrupt: int
    ) -> None:
        """A way from a whole anchor over levels and deltas is found, though it is not the second cheapest."""
        weights = tmp_path / "weights"
        with rankless.WeightPublisher(weights, anchor_every=every, async_save=False, keep=None) as publisher:
            for step in range(count):
                training.step()
                publisher.publish(training.model, step=step)
        flip_tensor_bit(next(weights.glob(f"anchor-{corrupt}-*")) / "model.safetensors", "up.weight")
        with rankless.WeightFollower(weights, tmp_path / "followed") as follower:
            follower.update()
        training.dtype = None
        assert files_of(tmp_path / "followed/current") == training.expected()
