"""Tests that what a checkpoint has is not lost because its object came late, or never."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import rankless
from rankless.errors import StateError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    model = nn.Linear(2, 2)
    average = AveragedModel(model)
    average.n_averaged.fill_(7)
    with rankless.Checkpointer(tmp_path, model=model, save_every=1, signals=(), stateful={"ema": average}) as trained:
        trained.step(1)
    return tmp_path


def average_of(checkpointer: Any) -> AveragedModel:
    average = AveragedModel(nn.Linear(2, 2))
    checkpointer.register("ema", average)
    return average


def test_an_object_that_is_registered_after_resume_is_loaded_and_saved_on(run: Path) -> None:
    saved = rankless.open(run)
    expected = AveragedModel(nn.Linear(2, 2))
    rankless.load_checkpoint(run, None, stateful={"ema": expected})
    with rankless.Checkpointer(run, model=nn.Linear(2, 2), save_every=1, signals=()) as resumed:
        resumed.resume()
        average = average_of(resumed)
        assert torch.equal(average.module.weight, expected.module.weight)
        assert average.n_averaged == 7
        resumed.step(2)
    last = AveragedModel(nn.Linear(2, 2))
    rankless.load_checkpoint(run, "step_2", stateful={"ema": last})
    assert torch.equal(last.module.weight, expected.module.weight)
    assert saved.path.name == "step_1"


def test_after_a_save_without_the_object_its_state_is_not_replaced_unnoticed(run: Path) -> None:
    with rankless.Checkpointer(run, model=nn.Linear(2, 2), save_every=1, signals=()) as resumed:
        resumed.resume()
        resumed.step(2)
        with pytest.raises(StateError, match=r"step_1 has the state of 'ema'.*rankless\.restore"):
            average_of(resumed)


def test_a_new_object_keeps_its_state(run: Path) -> None:
    with rankless.Checkpointer(run, model=nn.Linear(2, 2), signals=()) as resumed:
        resumed.resume()
        resumed.register("scaler", AveragedModel(nn.Linear(2, 2)))


def test_what_nothing_was_passed_for_is_logged_once(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rankless")
    restored = rankless.restore(run, None, nn.Linear(2, 2))
    assert restored.not_requested == ("stateful/ema",)
    lines = [record.getMessage() for record in caplog.records if "ema" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].endswith("step_1 also has, and nothing was passed for: stateful/ema")


def test_retention_keeps_the_only_checkpoint_with_the_state_of_an_object(run: Path) -> None:
    with rankless.Checkpointer(run, model=nn.Linear(2, 2), save_every=1, signals=(), keep=1) as resumed:
        resumed.resume()
        for step in (2, 3):
            resumed.step(step)
        with pytest.raises(StateError, match=r"this job has saved without it since.*rankless\.restore"):
            average_of(resumed)
        assert [info.tag for info in resumed.list()] == ["step_1", "step_3"]
        average = AveragedModel(nn.Linear(2, 2))
        rankless.restore(run, "step_1", stateful={"ema": average})
        assert average.n_averaged == 7
    with rankless.Checkpointer(run, model=nn.Linear(2, 2), save_every=1, signals=(), keep=1) as later:
        later.resume()  # the latest has no such state, so it is not missing any more
        later.step(4)
    assert [info.tag for info in rankless.list_checkpoints(run)] == ["step_4"]


def test_after_the_object_is_registered_retention_is_as_ever(run: Path) -> None:
    with rankless.Checkpointer(run, model=nn.Linear(2, 2), save_every=1, signals=(), keep=1) as resumed:
        resumed.resume()
        average_of(resumed)
        resumed.step(2)
    assert [info.tag for info in rankless.list_checkpoints(run)] == ["step_2"]


def test_the_only_checkpoint_with_the_state_of_an_object_is_not_overwritten(run: Path) -> None:
    with rankless.Checkpointer(run, model=nn.Linear(2, 2), signals=()) as resumed:
        resumed.resume()
        with pytest.raises(StateError, match=r"step_1 alone has the state of 'ema'"):
            resumed.save(overwrite=True)
        average_of(resumed)
        resumed.save(overwrite=True)


def test_a_save_of_any_name_is_one_without_the_object(run: Path) -> None:
    with rankless.Checkpointer(run, model=nn.Linear(2, 2), signals=()) as resumed:
        resumed.resume()
        resumed.step(2)
        resumed.save("best")
        with pytest.raises(StateError, match="this job has saved without it since"):
            average_of(resumed)


def test_a_later_step_replaces_a_checkpoint_that_has_a_state_which_nothing_takes_any_more(tmp_path: Path) -> None:
    """A training that keeps one checkpoint under one name may drop an object."""
    model = nn.Linear(2, 2)
    stateful = {"ema": AveragedModel(model)}
    with rankless.Checkpointer(tmp_path, model=model, signals=(), stateful=stateful) as trained:
        trained.step(1)
        trained.save("last")
    shutil.rmtree(tmp_path / "step_1", ignore_errors=True)
    with rankless.Checkpointer(tmp_path, model=model, signals=()) as resumed:
        resumed.resume("last")
        resumed.step(2)
        with pytest.warns(UserWarning, match="is replaced, which alone has the state of 'ema'"):
            resumed.save("last", overwrite=True)
        resumed.step(3)
        resumed.save("last", overwrite=True)
    assert rankless.open(tmp_path, "last").step == 3
