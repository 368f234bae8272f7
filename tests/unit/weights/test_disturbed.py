"""What other programs, late lists and lost answers do to a weights directory, and what happens then."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from msgspec.structs import replace

import rankless
from rankless.errors import CorruptCheckpointError, StorageError, WeightsConflictError
from rankless.formats.weights import difference_parts
from rankless.formats.weights.recently_used import RecentlyUsed
from rankless.formats.weights.routes import find_route
from rankless.formats.weights.version_files import list_numbers, manifest_path, read_manifest
from rankless.ondisk.block_crcs import crc64
from rankless.ondisk.weight_versions import Anchor, Delta, PublishedFile, VersionKey, VersionManifest, encode_version
from rankless.weights import choose_version, followed_folder, version_output, weights_folders


class Job:
    """A publisher, and a model that changes before each version."""

    def __init__(self, weights: Path, **options: Any) -> None:
        self.model, self.weights = torch.nn.Linear(64, 64), weights
        self.publisher = rankless.WeightPublisher(weights, **options)

    def publish(self) -> rankless.WeightVersion:
        with torch.no_grad():
            self.model.weight[0] += 1
        handle = self.publisher.publish(self.model)
        assert handle is not None
        return handle.wait()

    def assert_loads(self, version: rankless.WeightVersion) -> None:
        loaded = torch.nn.Linear(64, 64)
        rankless.load_model(loaded, version.path)
        assert torch.equal(loaded.weight, self.model.weight)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return tmp_path / "weights"


@contextmanager
def late_list(*modules: Any, missing: int = 1) -> Iterator[None]:
    """Lists lack the newest versions, as those of a store of objects may for a while."""

    def list_late(directory: Path) -> list[int]:
        return list_numbers(directory)[:-missing]

    with ExitStack() as patches:
        for module in modules:
            patches.enter_context(mock.patch.object(module, "list_numbers", list_late))
        yield


def encode_with_other_id(manifest: VersionManifest) -> bytes:
    raw = encode_version(manifest).replace(manifest.id.encode(), b"f" * 16)
    body = raw[: raw.rindex(b',"crc64nvme"')]
    return body + b',"crc64nvme":"%016x"}\n' % crc64(body)


def make_manifests(count: int, anchor_every: int, nbytes: int) -> dict[int, VersionManifest]:
    """Versions whose deltas are small, and their anchors large."""
    keys = [VersionKey(number, f"{number:016x}") for number in range(count + 1)]
    manifests = {}
    for key in keys[1:]:
        base, of_anchor = keys[key.number - 1], keys[(key.number - 1) // anchor_every * anchor_every + 1]
        deltas = [Delta(base, [PublishedFile("part", nbytes, "0" * 16)])] if base.number else []
        manifests[key.number] = VersionManifest(
            format="rankless-weights",
            version=1,
            number=key.number,
            id=key.id,
            time=0.0,
            step=None,
            metrics={},
            training=None,
            folder=f"delta-{key.number}",
            anchor=Anchor(of_anchor.number, of_anchor.id, f"anchor-{of_anchor.number}"),
            deltas=deltas,
            files=[],
            small_files=[PublishedFile("config.json", 10**9, "0" * 16)],
        )
    return manifests


def test_a_way_is_found_among_many_versions_with_small_deltas() -> None:
    manifests, read = make_manifests(20_000, anchor_every=100, nbytes=1), list[int]()

    def read_one(number: int) -> VersionManifest:
        read.append(number)
        return manifests[number]

    target = manifests[19_950]
    route = find_route(Path("weights"), target, read_one)
    assert (route.start.number, len(route.steps), len(read)) == (19_901, 49, 49)
    avoiding = find_route(Path("weights"), target, read_one, avoided={"anchor-19901"})
    assert avoiding.start.number == 19_801
    near = find_route(Path("weights"), target, read_one, have=[manifests[19_700].key])
    assert (near.start.number, near.anchor, len(near.steps)) == (19_700, "", 250)
    far = find_route(Path("weights"), target, read_one, have=[manifests[5].key])
    assert far.start.number == 19_901, "it does not look at all versions"


@pytest.mark.parametrize("disturb", ["link", "chmod", "copy"])
def test_a_backup_is_no_conflict(weights: Path, disturb: str) -> None:
    job = Job(weights)
    version = job.publish()
    if disturb == "link":
        os.link(version.path, weights / "backup")
    elif disturb == "chmod":
        version.path.chmod(0o664)
    else:
        shutil.copytree(weights, weights.with_name("copy"))
        shutil.rmtree(weights)
        weights.with_name("copy").rename(weights)
    version = job.publish()
    assert (version.number, version.is_anchor) == (2, False)
    job.assert_loads(version)


def test_another_version_under_the_same_number_is_a_conflict(weights: Path) -> None:
    job = Job(weights)
    path = job.publish().path
    path.write_bytes(encode_with_other_id(read_manifest(weights, 1)))
    with pytest.raises(WeightsConflictError, match="which this job has not published"):
        job.publish()
    assert job.publish().is_anchor


def test_the_publication_after_a_conflict_at_the_end_works(weights: Path) -> None:
    job, other = Job(weights, async_save=False), Job(weights)
    job.publish()
    commit = weights_folders.commit_version

    def commit_late(directory: Path, manifest: VersionManifest) -> str:
        path = manifest_path(directory, manifest.number)
        path.write_bytes(encode_with_other_id(manifest))
        return commit(directory, manifest)

    with (
        mock.patch.object(version_output, "commit_version", commit_late),
        pytest.raises(WeightsConflictError, match="let only one job"),
    ):
        job.publish()
    version = job.publish()
    assert (version.number, version.is_anchor) == (3, True)
    job.assert_loads(version)
    assert other.publish().number == 4


def test_a_number_is_not_used_again_if_its_version_was_removed(weights: Path) -> None:
    job = Job(weights, async_save=False)
    for _ in range(3):
        version = job.publish()
    with rankless.WeightFollower(weights, weights.with_name("followed")) as follower:
        assert follower.update() == version
        version.path.unlink()
        with pytest.raises(WeightsConflictError):
            job.publish()
        version = job.publish()
        assert (version.number, version.is_anchor) == (4, True)
        assert follower.update() == version


def test_a_commit_without_an_answer_and_a_late_list(weights: Path) -> None:
    job = Job(weights, async_save=False)
    job.publish()
    commit = weights_folders.commit_version

    def lose_answer(directory: Path, manifest: VersionManifest) -> str:
        commit(directory, manifest)
        raise StorageError(5, "the answer was lost")

    with mock.patch.object(version_output, "commit_version", lose_answer), pytest.raises(StorageError):
        job.publish()
    with late_list(version_output):
        version = job.publish()
    assert (version.number, version.is_anchor) == (3, True)
    job.assert_loads(version)


def test_a_follower_that_begins_again_while_the_list_is_late(weights: Path) -> None:
    job, folder = Job(weights), weights.with_name("followed")
    for _ in range(3):
        version = job.publish()
    with rankless.WeightFollower(weights, folder) as follower:
        assert follower.update() == version
    with late_list(choose_version), rankless.WeightFollower(weights, folder) as follower:
        assert follower.update() == version
        assert follower.update() is None


def test_a_corrupt_manifest_of_the_own_version_does_not_hold_up_a_follower(weights: Path) -> None:
    """The newer version is an anchor, which is based on nothing."""
    version = Job(weights).publish()
    with rankless.WeightFollower(weights, weights.with_name("followed")) as follower:
        assert follower.update() == version
        version.path.write_bytes(version.path.read_bytes()[:-9])
        with pytest.raises(CorruptCheckpointError, match=version.path.name):
            follower.update()
        newest = Job(weights).publish()
        assert newest.is_anchor
        assert follower.update() == newest


@pytest.mark.parametrize("harm", ["corrupt", "unreadable"])
def test_a_way_leads_around_a_manifest_that_cannot_be_read(weights: Path, harm: str) -> None:
    job = Job(weights, anchor_every=2)
    first = job.publish()
    with rankless.WeightFollower(weights, weights.with_name("followed")) as follower:
        assert follower.update() == first
        path = job.publish().path
        newest = job.publish()
        assert newest.is_anchor
        path.unlink()
        path.write_bytes(b"{}") if harm == "corrupt" else os.mkfifo(path)
        assert follower.update() == newest
    job.assert_loads(newest)


def test_a_corrupt_manifest_does_not_hold_up_retention(weights: Path) -> None:
    """Each job publishes one anchor."""
    versions = [Job(weights, keep=1, async_save=False).publish()]
    versions[0].path.write_bytes(b"{}")
    versions += [Job(weights, keep=1, async_save=False).publish() for _ in range(2)]
    assert [version.path.exists() for version in versions] == [True, False, True]
    assert sorted(path.name[:8] for path in weights.glob("anchor-*")) == ["anchor-1", "anchor-3"]


def test_a_follower_that_has_the_newest_version_reads_its_manifest_once(weights: Path) -> None:
    Job(weights).publish()
    with rankless.WeightFollower(weights, weights.with_name("followed")) as follower:
        follower.update()
        with mock.patch.object(choose_version, "read_manifest", wraps=read_manifest) as read:
            assert [follower.update() for _ in range(10)] == [None] * 10
    assert read.call_count <= 1


def test_versions_that_are_removed_at_the_beginning_of_an_update(weights: Path) -> None:
    job = Job(weights, anchor_every=1)
    job.publish()
    read, removed = followed_folder.read_manifest, list[int]()

    def remove_first(directory: Path, number: int) -> VersionManifest:
        if number <= 2:
            job.publish()
            manifest_path(directory, number).unlink()
            removed.append(number)
        return read(directory, number)

    with (
        mock.patch.object(followed_folder, "read_manifest", remove_first),
        rankless.WeightFollower(weights, weights.with_name("followed")) as follower,
    ):
        version = follower.update()
    assert removed == [1, 2]
    assert version is not None
    assert version.number == 3
    job.assert_loads(version)


def test_a_publisher_in_a_fork_does_not_wait_for_its_parent(weights: Path) -> None:
    job = Job(weights, on_busy="skip")
    job.publish()
    job.publisher._handle = mock.Mock(**{"done.return_value": False})
    job.publisher._state.process = -1
    assert job.publish().number == 2


@pytest.mark.parametrize("arguments", [["--exec", '"abc'], ["--exec", ""], ["--poll", "inf"], ["--poll", "nan"]])
def test_wrong_arguments_of_the_command(weights: Path, arguments: list[str]) -> None:
    Job(weights).publish()
    command = [sys.executable, "-m", "rankless", "follow", weights, weights.with_name("followed"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (result.returncode, "error: " in result.stderr, "Traceback" in result.stderr) == (2, True, False)


def test_the_command_says_that_the_directory_was_made_anew(weights: Path) -> None:
    job = Job(weights)
    for _ in range(2):
        job.publish()
    command = [sys.executable, "-m", "rankless", "follow", weights, weights.with_name("followed"), "--once"]
    subprocess.run(command, check=True, timeout=60)
    shutil.rmtree(weights)
    Job(weights).publish()
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (result.returncode == 0, "was made anew" in result.stderr) == (False, True)


def test_a_header_without_checksums_is_refused(weights: Path) -> None:
    job = Job(weights)
    version = job.publish()
    manifest = read_manifest(weights, 1)
    header = json.loads(manifest.files[0].header)
    header["__metadata__"] = {"format": "pt"}
    files = [replace(manifest.files[0], header=json.dumps(header, separators=(",", ":")))]
    version.path.write_bytes(encode_version(replace(manifest, files=files)))
    with pytest.raises(CorruptCheckpointError, match="has no CRCs of"):
        rankless.load_model(torch.nn.Linear(64, 64), version.path)


def test_a_table_with_too_many_ranges_is_refused(weights: Path) -> None:
    job = Job(weights)
    job.publish()
    version = job.publish()
    with (
        mock.patch.object(difference_parts, "MOST_RANGES", 0),
        pytest.raises(CorruptCheckpointError, match="no table of ranges that a publisher writes"),
    ):
        rankless.load_model(torch.nn.Linear(64, 64), version.path)


def test_many_small_values_are_not_all_kept() -> None:
    kept = RecentlyUsed[memoryview](2**20)
    for key in range(100_000):
        kept.find(key, lambda: memoryview(b""))
    assert len(kept._kept) <= 1024
    assert len(kept._turns) <= 1024
