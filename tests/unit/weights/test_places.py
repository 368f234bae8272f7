"""What is refused as a place of published weights, and what ``rankless follow`` says."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

import rankless
from rankless.cli.checkpoint_argument import resolve_path
from rankless.errors import InvalidArgumentError, MismatchError, StateError
from rankless.weights.directory_check import check_weights_directory
from tests.helpers.commands import invoke_json
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import FakeS3, store_at
from tests.helpers.training import train_run


def publish(folder: Path, *, times: int = 1) -> None:
    model = torch.nn.Linear(8, 8)
    with rankless.WeightPublisher(folder) as publisher:
        for _ in range(times):
            publisher.publish(model)


def follow(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rankless", "follow", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with a checkpoint."""
    rankless.save_checkpoint(tmp_path / "run", "first", train_run("plain").model)
    return tmp_path / "run"


@pytest.mark.parametrize("tag", ["", "first"], ids=["run directory", "checkpoint"])
@pytest.mark.parametrize(
    "use",
    [
        publish,
        lambda path: rankless.wait_for_weights(path, timeout=0),
        lambda path: rankless.WeightFollower(path, into=torch.nn.Linear(8, 8)).update(),
    ],
    ids=["publish", "wait", "follow"],
)
def test_checkpoints_are_no_published_weights(run: Path, tag: str, use: Callable[[Path], object]) -> None:
    before = sorted(run.rglob("*"))
    with pytest.raises(InvalidArgumentError, match="has checkpoints, and no published weights"):
        use(run / tag)
    assert [path for path in sorted(run.rglob("*")) if path not in before] == []


def test_the_command_refuses_a_run_directory(run: Path, tmp_path: Path) -> None:
    result = follow(run, tmp_path / "followed")
    assert result.returncode != 0
    assert "has checkpoints, and no published weights" in result.stderr


@pytest.mark.parametrize(
    "save",
    [
        lambda path: rankless.save_checkpoint(path, "step_1", torch.nn.Linear(2, 2)),
        lambda path: rankless.RunDirectory(path).save("step_1", torch.nn.Linear(2, 2)),
    ],
    ids=["function", "run directory"],
)
def test_a_weights_directory_is_no_run_directory(tmp_path: Path, save: Callable[[Path], object]) -> None:
    publish(tmp_path / "weights")
    before = {path.name for path in (tmp_path / "weights").iterdir()}
    with pytest.raises(InvalidArgumentError, match="has published weights: pass another directory"):
        save(tmp_path / "weights")
    assert {path.name for path in (tmp_path / "weights").iterdir()} == before


def test_a_weights_directory_in_a_bucket_is_no_run_directory() -> None:
    with FakeS3().served() as url:
        weights = store_at(url).path(f"{BUCKET}/weights")
        publish(weights)
        with pytest.raises(InvalidArgumentError, match="has published weights: pass another directory"):
            rankless.save_checkpoint(weights, "step_1", torch.nn.Linear(2, 2))


def test_a_tag_may_be_called_as_the_folder_of_manifests(tmp_path: Path) -> None:
    for tag in ("versions", "step_1"):
        rankless.save_checkpoint(tmp_path, tag, torch.nn.Linear(2, 2))
    assert [info.tag for info in rankless.list_checkpoints(tmp_path)] == ["versions", "step_1"]


def test_a_file_is_no_weights_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for use in (publish, rankless.list_weight_versions, rankless.wait_for_weights):
        with pytest.raises(InvalidArgumentError, match="is a file: pass the weights directory"):
            use(tmp_path / "file")


def test_a_follower_warns_once_of_a_directory_without_versions(tmp_path: Path) -> None:
    with rankless.WeightFollower(tmp_path / "weighty", into=torch.nn.Linear(2, 2)) as follower:
        with pytest.warns(UserWarning, match="there is no published version in"):
            assert follower.update() is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert follower.update() is None


def test_a_closed_follower_does_not_follow(tmp_path: Path) -> None:
    publish(tmp_path / "weights")
    follower = rankless.WeightFollower(tmp_path / "weights", tmp_path / "followed")
    follower.update()
    follower.close()
    with pytest.raises(StateError, match="is closed: make a new one"):
        follower.update()


def test_a_model_that_fits_in_part_may_follow(tmp_path: Path) -> None:
    publish(tmp_path / "weights")
    larger = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model = {"weight": larger[0].weight.detach(), "other": larger[1].weight.detach()}
    with (
        rankless.WeightFollower(tmp_path / "weights", model) as follower,
        pytest.raises(MismatchError, match="Pass strict=False"),
    ):
        follower.update()
    with rankless.WeightFollower(tmp_path / "weights", model, strict=False) as follower:
        assert follower.update() is not None


@pytest.mark.parametrize("after", ["3", -1, 1.5])
def test_what_is_waited_for_is_a_version(tmp_path: Path, after: object) -> None:
    with pytest.raises(InvalidArgumentError, match="after must be an integer of at least 0"):
        rankless.wait_for_weights(tmp_path, after=after, timeout=0)  # type: ignore[arg-type]


def test_commands_take_the_number_of_a_version_as_tag(tmp_path: Path) -> None:
    publish(tmp_path / "weights", times=3)
    shown = invoke_json("show", tmp_path / "weights", "--tag", "2")
    assert shown["path"].endswith("/00000000000000000002.json")


@pytest.mark.parametrize("tag", ["7", "x", "9" * 5000, "\N{ARABIC-INDIC DIGIT TWO}"])
def test_a_version_that_is_not_there_is_named(tmp_path: Path, tag: str) -> None:
    publish(tmp_path / "weights", times=3)
    with pytest.raises(rankless.RanklessError, match=r"there is no version '.+: it has 1, 2, 3|more than 200 bytes"):
        resolve_path(str(tmp_path / "weights"), tag)


def test_weights_are_opened_by_the_number_of_a_version(tmp_path: Path) -> None:
    publish(tmp_path / "weights", times=3)
    with rankless.open_weights(tmp_path / "weights", tag="2") as weights:
        assert weights.names == {"weight", "bias"}
    with (
        pytest.raises(rankless.NoCheckpointError, match="it has 1, 2, 3"),
        rankless.open_weights(tmp_path / "weights", tag="4"),
    ):
        pass


def test_a_weights_directory_is_no_folder_to_follow_into(tmp_path: Path) -> None:
    publish(tmp_path / "weights")
    before = sorted((tmp_path / "weights").rglob("*"))
    with pytest.raises(InvalidArgumentError, match="has published weights: pass another directory"):
        rankless.WeightFollower(tmp_path / "weights", tmp_path / "weights").update()
    assert sorted((tmp_path / "weights").rglob("*")) == before


def test_the_command_says_that_it_waits_and_then_follows(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rankless", "follow", tmp_path / "weights", tmp_path / "followed", "--poll", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "there is no published version" in process.stderr.readline()
        publish(tmp_path / "weights")
        deadline = time.monotonic() + 60
        while not (tmp_path / "followed/current/model.safetensors").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
    assert (tmp_path / "followed/current/model.safetensors").exists()


def test_the_first_version_may_appear_while_somebody_looks(tmp_path: Path) -> None:
    publish(tmp_path / "weights")
    with mock.patch("rankless.weights.directory_check.list_numbers", side_effect=[[], [1]]):
        check_weights_directory(tmp_path / "weights")


def test_the_command_does_not_wait_for_a_first_version_that_is_corrupt(tmp_path: Path) -> None:
    publish(tmp_path / "weights")
    (version,) = rankless.list_weight_versions(tmp_path / "weights")
    version.path.write_bytes(b"{}")
    folders = tmp_path / "weights", tmp_path / "followed"
    command = [sys.executable, "-m", "rankless", "follow", *folders, "--poll", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(2)]
        process.terminate()
    assert ["the folder stays as it is" in line and version.path.name in line for line in lines] == [True, True]


def test_the_command_with_a_program(tmp_path: Path) -> None:
    publish(tmp_path / "weights", times=2)
    missing = follow(tmp_path / "weights", tmp_path / "followed", "--once", "--exec", "no-such-program")
    assert missing.returncode != 0
    assert "there is no program 'no-such-program'" in missing.stderr
    assert not (tmp_path / "followed").exists()

    failed = follow(tmp_path / "weights", tmp_path / "followed", "--once", "--exec", "false")
    assert failed.returncode == 1
    assert "has ended with status 1 after version 2" in failed.stderr

    again = follow(tmp_path / "weights", tmp_path / "followed", "--once", "--exec", "false")
    assert again.returncode == 0
    assert "version 2 is there already" in again.stdout


def test_a_version_that_does_not_fit_leaves_the_one_before(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 8)
    with (
        rankless.WeightPublisher(tmp_path / "weights") as publisher,
        rankless.WeightFollower(tmp_path / "weights", into=model) as follower,
    ):
        handle = publisher.publish(torch.nn.Linear(8, 8))
        assert handle is not None
        first = handle.wait()
        assert follower.update() == first
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        handle = publisher.publish(torch.nn.Linear(8, 9))
        assert handle is not None
        handle.wait()
        with pytest.raises(MismatchError, match=f"version 2 of {tmp_path / 'weights'} does not fit the model"):
            follower.update()
        assert follower.version == first
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name])


def test_metrics_may_be_tensors_and_training_must_be_a_run_directory(tmp_path: Path) -> None:
    with rankless.WeightPublisher(tmp_path / "weights") as publisher:
        publisher.publish(torch.nn.Linear(2, 2), metrics={"loss": torch.tensor(0.5, requires_grad=True)})
    (version,) = rankless.list_weight_versions(tmp_path / "weights")
    assert version.metrics == {"loss": 0.5}
    with pytest.raises(InvalidArgumentError, match="training must be the RunDirectory"):
        rankless.WeightPublisher(tmp_path / "other", training=str(tmp_path))  # type: ignore[arg-type]


def test_verification_names_what_was_written_for_a_version(tmp_path: Path) -> None:
    publish(tmp_path / "weights", times=2)
    command = [sys.executable, "-m", "rankless", "verify", tmp_path / "weights", "--all", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    own = [version["own_bytes"] for version in json.loads(result.stdout)["checkpoints"]]
    assert own == [version.written_bytes for version in rankless.list_weight_versions(tmp_path / "weights")]
