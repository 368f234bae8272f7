"""Folders of Accelerate and of the ``Trainer`` with DeepSpeed have the model and optimizer of its files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import rankless
from rankless.errors import CorruptCheckpointError, RanklessError
from tests.helpers.equality import equal_bits
from tests.helpers.pool import Ranks
from tests.interop.accelerate.fixtures import DEEPSPEED, SavedRun, make_scheduler, restore_generators, unpack_fixtures

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_fixtures(tmp_path_factory.mktemp("accelerate"))


@pytest.fixture(params=DEEPSPEED)
def run(folder: Path, request: pytest.FixtureRequest) -> SavedRun:
    return SavedRun(folder, request.param)


def assert_restored(run: SavedRun, path: Path) -> rankless.RestoreResult:
    model = run.make_model()
    groups = rankless.open(path).values["optimizer"]["groups"]
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": [parameters[name] for name in group["params"]]} for group in groups])
    scheduler = make_scheduler(optimizer)
    result = rankless.restore(path, model=model, optimizer=optimizer, scheduler=scheduler)
    assert set(result.exact) == {"model", "optimizer", "scheduler", "user_content"}
    assert result.reconstructed == ("rng",)
    assert all(equal_bits(value, run.weights[name]) for name, value in model.state_dict().items())
    for name, states in run.moments.items():
        assert all(equal_bits(optimizer.state[parameters[name]][state], value) for state, value in states.items())
    assert scheduler.last_epoch == run.scheduler["last_epoch"]
    return result


def test_a_plain_training_is_restored_exactly(run: SavedRun) -> None:
    content = assert_restored(run, run.folder).user_content
    assert content["global_steps"] == 3
    assert content.get("trainer_state", {"global_step": 3})["global_step"] == 3
    assert ("accelerate" in content) == run.case.startswith("acc")


def test_conversions_keep_everything(run: SavedRun, tmp_path: Path) -> None:
    rankless.convert(run.folder, tmp_path / "native", to="native")
    assert_restored(run, tmp_path / "native")
    assert not rankless.diff(run.folder, tmp_path / "native")


def test_each_rank_gets_the_states_of_its_generators(ranks: Ranks, run: SavedRun) -> None:
    for rank, states in enumerate(ranks(2, restore_generators, run.folder)):
        assert states["python"] == run.generators(rank)["python"]
        assert torch.equal(states["cpu"], run.generators(rank)["cpu"])


def test_every_byte_is_verified(run: SavedRun) -> None:
    results = [*rankless.open(run.folder).verify()]
    assert results
    assert not any(result.problem for result in results)


def test_a_file_of_deepspeed_that_is_missing_is_named(run: SavedRun, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "state")
    file = next((tmp_path / "state").rglob("zero_pp_rank_1_mp_rank_00_optim_states.pt"))
    file.unlink()
    with pytest.raises(RanklessError, match="rank"):
        rankless.open(tmp_path / "state")


@pytest.mark.parametrize("call", [rankless.open, rankless.restore])
def test_a_copy_without_the_file_that_names_the_tag_is_refused(
    run: SavedRun, tmp_path: Path, call: Callable[[Path], object]
) -> None:
    """Without it the model and the optimizer would be passed over, and the rest be called verified."""
    copy = shutil.copytree(run.folder, tmp_path / "copy")
    (copy / "latest").unlink()
    with pytest.raises(CorruptCheckpointError, match="'latest'"):
        call(copy)
