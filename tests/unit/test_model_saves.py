"""Tests of a training that saves its weights alone, besides its checkpoints, into a run directory of their own."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import rankless
from rankless import model_saves
from rankless.errors import InvalidArgumentError, StateError, StorageError, SupersededError
from rankless.run import claims
from rankless.run.model_origins import place_of
from rankless.save import shard_writer
from rankless.storage.location import parse_location
from tests.helpers.pool import Ranks


def build(value: float = 0.0) -> torch.nn.Linear:
    model = torch.nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(value)
    return model


def train(path: Any, until: int, *, tag: str | None = None, **options: Any) -> int:
    """Train as users do: after step N all weights are N. Return the step from which the training went on."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankless.Checkpointer(path, model=model, optimizer=optimizer, signals=(), **options) as checkpointer:
        begin = checkpointer.resume(tag)
        for step in range(begin + 1, until + 1):
            with torch.no_grad():
                model.weight.fill_(step)
            checkpointer.step(step, {"loss": 1 / step})
    return begin


def train_and_fail(path: Path, until: int, **options: Any) -> None:
    """Train until after a step, and end as a killed process does: nothing more is saved."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankless.Checkpointer(path, model=model, optimizer=optimizer, signals=(), **options) as checkpointer:
        for step in range(checkpointer.resume() + 1, until + 1):
            checkpointer.step(step)
        raise RuntimeError("killed")


def values(path: Path) -> dict[str, float]:
    """Return the first weight of each checkpoint of a run directory."""
    tags = [info.tag for info in rankless.list_checkpoints(path)]
    return {tag: float(rankless.open(path, tag)["model/weight"][0, 0]) for tag in tags}


@contextmanager
def another_process() -> Iterator[None]:
    """Let claims of this process be those of another one."""
    with mock.patch.object(claims, "_claimed", {}):
        yield


@pytest.mark.parametrize("options", [{}, {"async_save": True}], ids=["sync", "async"])
def test_the_weights_have_a_cadence_of_their_own(tmp_path: Path, options: dict[str, Any]) -> None:
    train(tmp_path / "run", 7, save_every=4, save_model_every=2, **options)
    assert list(values(tmp_path / "run")) == ["step_4", "step_7"]
    assert values(tmp_path / "run-models") == {"step_2": 2, "step_4": 4, "step_6": 6}
    manifest = rankless.open(tmp_path / "run-models", "step_6")
    assert manifest.step == 6
    assert {name.partition("/")[0] for name in manifest} == {"model"}


def test_they_are_loaded_as_a_model_and_best_knows_their_metrics(tmp_path: Path) -> None:
    train(tmp_path / "run", 4, save_model_every=2)
    model = build()
    rankless.load_model(model, tmp_path / "run-models/step_2")
    assert model.weight[0, 0] == 2
    best = rankless.open(tmp_path / "run-models", rankless.best("loss"))
    assert best.step == 4


def test_a_run_directory_brings_its_own_retention(tmp_path: Path) -> None:
    models = rankless.RunDirectory(tmp_path / "weights", keep=2)
    train(tmp_path / "run", 9, save_every=3, keep=1, save_model_every=2, models=models)
    assert list(values(tmp_path / "run")) == ["step_9"]
    assert list(values(tmp_path / "weights")) == ["step_6", "step_8"]


def test_a_time_is_an_interval(tmp_path: Path) -> None:
    train(tmp_path / "run", 3, save_model_every=timedelta(microseconds=1))
    assert list(values(tmp_path / "run-models")) == ["step_1", "step_2", "step_3"]


def test_a_resumed_training_continues_them(tmp_path: Path) -> None:
    train(tmp_path / "run", 4, save_model_every=2)
    with another_process():
        assert train(tmp_path / "run", 8, save_model_every=2) == 4
    assert values(tmp_path / "run-models") == {"step_2": 2, "step_4": 4, "step_6": 6, "step_8": 8}
    assert len({rankless.open(tmp_path / "run-models", tag).identity.run for tag in ("step_2", "step_8")}) == 1  # type: ignore[union-attr]


def current(path: Path) -> list[str]:
    return [info.tag for info in rankless.list_checkpoints(path) if info.is_current]


def test_a_training_that_goes_back_abandons_later_weights(tmp_path: Path) -> None:
    train(tmp_path / "run", 6, save_every=3, save_model_every=2)
    with another_process(), warnings.catch_warnings(record=True, action="always") as caught:
        assert train(tmp_path / "run", 5, tag="step_3", save_model_every=2) == 3
    assert current(tmp_path / "run-models") == ["step_2", "step_4"]
    assert values(tmp_path / "run-models").keys() == {"step_2", "step_4", "step_4@1", "step_6"}
    assert not any("run-models" in str(one.message) for one in caught)  # nothing for the user to do


@pytest.mark.parametrize("every", [2, 3])
def test_weights_are_abandoned_that_are_all_of_later_steps(tmp_path: Path, every: int) -> None:
    """A training was killed before its first checkpoint, or goes back to before the weights that are kept."""
    train(tmp_path / "run", 8, save_every=1, save_model_every=4)
    with another_process():
        assert train(tmp_path / "run", 3, tag="step_1", save_model_every=every) == 1
    assert current(tmp_path / "run-models") == [f"step_{every}"]
    assert {"step_4", "step_8"} < values(tmp_path / "run-models").keys()
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    with another_process():
        assert train(tmp_path / "run", every, save_model_every=every) == 0
    assert current(tmp_path / "run-models") == [f"step_{every}"]
    assert len(rankless.list_checkpoints(tmp_path / "run-models")) == 4


def test_a_training_without_resume_does_not_begin_where_weights_are(tmp_path: Path) -> None:
    train(tmp_path / "run", 4, save_model_every=2)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    checkpointer = rankless.Checkpointer(tmp_path / "run", model=build(), signals=(), save_model_every=2)
    with pytest.raises(StateError, match="run-models has weights, the latest are 'step_4': call resume"):
        checkpointer.step(1)


def test_a_run_of_checkpoints_is_not_replaced_by_weights(tmp_path: Path) -> None:
    train(tmp_path / "full", 4, save_every=2)
    before = values(tmp_path / "full")
    with pytest.raises(StateError, match="'step_4' has an optimizer, and not only weights"):
        train(tmp_path / "run", 4, save_model_every=2, models=tmp_path / "full")
    assert values(tmp_path / "full") == before
    handler = signal.getsignal(signal.SIGTERM)
    options = {"save_model_every": 2, "models": tmp_path / "full"}
    with pytest.raises(StateError, match="has an optimizer"):
        rankless.Checkpointer(tmp_path / "other", model=build(), **options).resume()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_weights_with_values_of_each_rank_are_weights(tmp_path: Path) -> None:
    train(tmp_path / "run", 2, save_every=2, save_model_every=2)
    rankless.save_checkpoint(tmp_path / "run-models", "step_1", build(), step=1, rng=True)  # has ranks.safetensors
    with another_process():
        assert train(tmp_path / "run", 4, save_model_every=2) == 2
    assert "step_4" in values(tmp_path / "run-models")


def test_at_a_signal_weights_that_are_due_are_saved(tmp_path: Path) -> None:
    with rankless.Checkpointer(tmp_path / "run", model=build(), save_model_every=3) as checkpointer:
        for step in range(checkpointer.resume() + 1, 10):
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            if checkpointer.step(step):
                break
    assert list(values(tmp_path / "run")) == list(values(tmp_path / "run-models")) == ["step_3"]


def test_an_older_job_saves_no_more_weights(tmp_path: Path) -> None:
    train(tmp_path / "run", 4, save_every=2, save_model_every=2)
    model = build()
    older = rankless.Checkpointer(tmp_path / "run", model=model, signals=(), save_model_every=1)
    older.resume(strict=False)
    with another_process():
        train(tmp_path / "run", 5, save_model_every=1)
    with pytest.raises(SupersededError):
        older.step(5)
    assert values(tmp_path / "run-models")["step_5"] == 5


def test_a_failure_is_only_a_warning_if_it_may_be(tmp_path: Path) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise StorageError(28, "no space left")

    with mock.patch.object(shard_writer, "write_file_ranges", fail):
        with pytest.raises(StorageError, match="no space"):
            train(tmp_path / "first", 1, save_model_every=1)
        with warnings.catch_warnings(record=True, action="always") as caught, pytest.raises(StorageError):
            train(tmp_path / "second", 2, save_model_every=1, on_failure="warn")  # only the last save raises
    assert sum("second-models/step_" in str(one.message) for one in caught) == 2


@contextmanager
def weights_that_cannot_be_written() -> Iterator[None]:
    write = shard_writer.write_file_ranges

    def refuse(*arguments: Any, **options: Any) -> Any:
        if "run-models" in repr(arguments):
            raise StorageError(28, "no space left")
        return write(*arguments, **options)

    with mock.patch.object(shard_writer, "write_file_ranges", refuse):
        yield


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.filterwarnings("ignore:.*run-models")
def test_the_last_weights_of_a_block_are_saved_or_it_raises(tmp_path: Path, async_save: bool) -> None:
    """Also if failures may be warnings: nothing makes up for them any more."""
    with weights_that_cannot_be_written(), pytest.raises(StorageError, match="no space"):
        train(tmp_path / "run", 3, save_model_every=3, async_save=async_save, on_failure="warn")
    assert list(values(tmp_path / "run")) == ["step_3"]


@pytest.mark.filterwarnings("ignore:.*file/weights")
def test_a_place_that_no_weights_can_be_saved_in_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file/weights"):
        train(tmp_path / "run", 3, save_model_every=3, models=tmp_path / "file/weights", on_failure="warn")
    assert list(values(tmp_path / "run")) == ["step_3"]


def test_weights_of_another_training_are_not_continued(tmp_path: Path) -> None:
    """Neither are weights that somebody has put there: they would be abandoned, and removed by a policy."""
    weights = tmp_path / "weights"
    train(tmp_path / "a", 4, save_model_every=2, models=rankless.RunDirectory(weights, keep=1))
    with another_process(), pytest.raises(StateError, match=r"are of the training in \.\./a.* is in \.\./b"):
        train(tmp_path / "b", 4, save_model_every=2, models=rankless.RunDirectory(weights, keep=1))
    assert current(weights) == ["step_4"]
    rankless.save_checkpoint(tmp_path / "final", "final", build(), step=9)
    with another_process(), pytest.raises(StateError, match=r"are of something else"):
        train(tmp_path / "b", 4, save_model_every=2, models=tmp_path / "final")
    (tmp_path / "moved").mkdir()
    for name in ("a", "weights"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    with another_process():
        assert train(tmp_path / "moved/a", 6, save_model_every=2, models=tmp_path / "moved/weights") == 4
    assert current(tmp_path / "moved/weights") == ["step_4", "step_6"]


@pytest.mark.parametrize("keep", [None, 1])
def test_weights_that_the_training_has_left_are_abandoned(tmp_path: Path, keep: int | None) -> None:
    """A job without weights has saved these steps again, also if the checkpoint before them was removed since."""
    run = tmp_path / "run"
    with pytest.raises(RuntimeError):  # killed after step 8: the newest checkpoint is step_6
        train_and_fail(run, 8, save_every=3, save_model_every=1)
    assert train(run, 11, save_every=3, keep=keep) == 6
    with another_process():
        assert train(run, 12, save_model_every=1) == 11
    assert current(tmp_path / "run-models") == [f"step_{step}" for step in (1, 2, 3, 4, 5, 6, 12)]
    assert {"step_7", "step_8"} < values(tmp_path / "run-models").keys()


def test_a_job_that_was_superseded_while_it_started_leaves_the_weights_alone(tmp_path: Path) -> None:
    """Else both jobs would end: each would have superseded the other one's saves of either kind."""
    train(tmp_path / "run", 4, save_every=2, save_model_every=2)
    read, others = model_saves.read_history, iter([None])

    def read_after_another_job(run: Path) -> Any:
        for _ in others:
            with another_process():
                train(tmp_path / "run", 6, save_model_every=2)
        return read(run)

    with mock.patch.object(model_saves, "read_history", read_after_another_job), pytest.raises(SupersededError):
        train(tmp_path / "run", 8, save_model_every=2)
    assert current(tmp_path / "run-models") == ["step_2", "step_4", "step_6"]


@pytest.mark.parametrize("checkpoints", [10, 100])
def test_a_training_that_was_killed_twice_saves_its_weights_again(tmp_path: Path, checkpoints: int) -> None:
    """The second job has abandoned all weights, and was killed before it saved some."""
    run, options = tmp_path / "run", {"save_every": checkpoints, "save_model_every": 15}
    for until in (16, 12):
        with pytest.raises(RuntimeError), another_process():
            train_and_fail(run, until, **options)
    for until in (20, 31):
        with another_process():
            train(run, until, **options)
    assert current(tmp_path / "run-models") == ["step_15", "step_30"]


def test_weights_of_a_job_that_saved_no_checkpoint_are_abandoned(tmp_path: Path) -> None:
    """Another job has begun the training anew, and has saved no weights."""
    run = tmp_path / "run"
    with pytest.raises(RuntimeError), another_process():
        train_and_fail(run, 3, save_every=4, save_model_every=1)
    with another_process():
        train(run, 6, save_every=3)
    with another_process():
        assert train(run, 8, save_model_every=2) == 6
    assert current(tmp_path / "run-models") == ["step_8"]


def test_weights_are_current_again_with_the_checkpoint_that_the_training_goes_on_from(tmp_path: Path) -> None:
    run, options = tmp_path / "run", {"save_every": 2, "save_model_every": 2}
    train(run, 6, **options)
    with another_process():
        train(run, 3, tag="step_2", **options)
    with another_process():
        assert train(run, 8, tag="step_6", **options) == 6
    assert current(tmp_path / "run-models") == ["step_2", "step_4", "step_6", "step_8"]


@pytest.mark.parametrize("corrupt", [["step_6"], ["step_2", "step_4", "step_6"]])
def test_weights_of_another_training_are_safe_if_some_are_corrupt(tmp_path: Path, corrupt: list[str]) -> None:
    weights = tmp_path / "weights"
    train(tmp_path / "a", 6, save_model_every=2, models=weights)
    for tag in corrupt:
        (weights / tag / "state.json").write_text("{")
    with another_process(), pytest.raises(StateError, match=r"are of the training in|not known whose they are"):
        train(tmp_path / "b", 4, save_model_every=2, models=weights)
    assert current(weights) == ["step_2", "step_4", "step_6"]


def test_corrupt_weights_end_no_training(tmp_path: Path) -> None:
    train(tmp_path / "run", 6, save_every=2, save_model_every=2)
    (tmp_path / "run-models" / "step_6" / "state.json").write_text("{")
    with another_process(), pytest.warns(UserWarning, match=r"step_6 are corrupt, and passed over"):
        assert train(tmp_path / "run", 8, save_model_every=2) == 6
    assert current(tmp_path / "run-models") == ["step_2", "step_4", "step_8"]


@pytest.mark.parametrize(
    ("run", "weights", "place"),
    [("runs/a", "runs/a-models", "../a"), ("a/run", "b/c/weights", "../../../a/run"), ("a", "a/weights", "..")],
)
def test_the_place_of_a_training_is_relative(tmp_path: Path, run: str, weights: str, place: str) -> None:
    assert place_of(tmp_path / run, tmp_path / weights) == place
    assert place_of(parse_location(f"s3://b/{run}"), parse_location(f"s3://b/{weights}")) == place
    assert place_of(parse_location("s3://b/run"), tmp_path / weights) == "s3://b/run"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": "elsewhere"}, "models needs save_model_every"),
        ({"save_model_every": "auto"}, "must be a number of steps or a timedelta"),
        ({"save_model_every": 0}, "save_every"),
        ({"save_model_every": 1, "replica_groups": "job"}, "not for replica_groups"),
        ({"save_model_every": 1, "model": None}, "pass model= as well"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        rankless.Checkpointer(tmp_path / "run", **{"model": build(), **options})


def test_the_run_directory_must_be_another_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for models in (tmp_path / "run", tmp_path / "a/../run", tmp_path / "link"):
        with pytest.raises(InvalidArgumentError, match="must be another run directory"):
            rankless.Checkpointer(tmp_path / "run", model=build(), save_model_every=1, models=models)


def _train_on_ranks(path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(path, 4, save_every=4, save_model_every=2)
        assert train(path, 6, save_every=4, save_model_every=2) == 4


def _differ(path: str) -> None:
    with pytest.raises(rankless.RankMismatchError, match="save_model_every"):
        train(path, 1, save_model_every=1 + dist.get_rank())


def test_all_ranks_save_them_together(tmp_path: Path, ranks: Ranks) -> None:
    ranks(3, _train_on_ranks, str(tmp_path / "run"))
    assert values(tmp_path / "run-models") == {"step_2": 2, "step_4": 4, "step_6": 6}


def test_ranks_with_other_cadences_are_refused(tmp_path: Path, ranks: Ranks) -> None:
    ranks(2, _differ, str(tmp_path / "run"))
