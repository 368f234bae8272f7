"""Tests of a training that goes on although storage fails in its saves, for so long as it is allowed to."""

from __future__ import annotations

import time
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
from rankless.engine.io.checkpoint_files import CheckpointFiles
from rankless.errors import InvalidArgumentError, StorageError
from rankless.save import drain_attempts, failure_tolerance
from tests.helpers.pool import Ranks


@contextmanager
def full_disk() -> Iterator[None]:
    """On this rank no file can be made."""
    with mock.patch.object(CheckpointFiles, "create_files", side_effect=StorageError(28, "No space left on device")):
        yield


def train(path: Path | str, fails_at: set[int], last: int = 5, **options: Any) -> list[str]:
    """Save each step. Return what was warned of."""
    model = torch.nn.Linear(2, 2)
    chosen = {"on_failure": "warn", "save_every": 1, **options}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with rankless.Checkpointer(path, model=model, signals=(), **chosen) as checkpointer:
            for step in range(checkpointer.resume() + 1, last + 1):
                with full_disk() if step in fails_at else warnings.catch_warnings():
                    checkpointer.step(step)
    return [str(warning.message) for warning in caught]


def listed(path: Path | str) -> list[str]:
    return [info.tag for info in rankless.list_checkpoints(path)]


def test_steps_that_could_not_be_saved_are_warnings(tmp_path: Path) -> None:
    first, second = train(tmp_path, {2, 3})
    assert "step_2" in first
    assert "No space left on device" in second
    assert listed(tmp_path) == ["step_1", "step_4", "step_5"]


def test_a_save_by_time_is_tried_again_after_the_interval(tmp_path: Path) -> None:
    """A bucket that is down keeps each attempt waiting for minutes."""
    checkpointer = rankless.Checkpointer(
        tmp_path, model=torch.nn.Linear(2, 2), save_every=timedelta(seconds=0.4), signals=(), on_failure="warn"
    )
    checkpointer.resume()
    with full_disk(), warnings.catch_warnings(record=True, action="always") as caught:
        for step in range(1, 61):
            time.sleep(0.02)
            checkpointer.step(step)
    assert 1 <= len(caught) <= 10


def test_a_warning_names_the_line_of_the_training(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    checkpointer = rankless.Checkpointer(tmp_path, model=model, save_every=1, signals=(), on_failure="warn")
    checkpointer.resume()
    with full_disk(), pytest.warns(UserWarning, match="step_1") as caught:
        checkpointer.step(1)
    assert {warning.filename for warning in caught} == {__file__}


def test_the_last_step_must_leave_the_local_tier(tmp_path: Path) -> None:
    """Else the status of the job would be 0, and the last step only on the hosts."""
    local = rankless.LocalTier(tmp_path / "tier", on_failure="warn")
    model = torch.nn.Linear(2, 2)
    checkpointer = rankless.Checkpointer(tmp_path / "run", model=model, signals=(), local=local)
    checkpointer.resume()
    with mock.patch.object(drain_attempts, "_FIRST_SECONDS", 0.001), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with full_disk(), pytest.raises(StorageError, match="No space left"), checkpointer:
            checkpointer.step(1)
    with rankless.Checkpointer(tmp_path / "run", model=model, signals=(), local=local) as checkpointer:
        assert checkpointer.resume() == 1
    assert listed(tmp_path / "run") == ["step_1"]


def test_the_error_is_raised_by_default(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No space left"):
        train(tmp_path, {2}, on_failure="raise")


def test_the_last_step_must_be_saved(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    checkpointer = rankless.Checkpointer(tmp_path, model=model, signals=(), on_failure="warn")
    checkpointer.resume()
    with full_disk(), pytest.raises(StorageError, match="No space left"), checkpointer:
        checkpointer.step(1)


def test_a_save_that_was_asked_for_by_hand_raises_its_error(tmp_path: Path) -> None:
    checkpointer = rankless.Checkpointer(tmp_path, model=torch.nn.Linear(2, 2), signals=(), on_failure="warn")
    checkpointer.resume()
    checkpointer.step(1)
    with full_disk(), pytest.raises(StorageError, match="No space left"):
        checkpointer.save()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_after_so_much_time_without_a_checkpoint_the_failure_is_an_error(tmp_path: Path) -> None:
    clock, model = Clock(), torch.nn.Linear(2, 2)
    options: dict[str, Any] = {"save_every": 1, "signals": (), "on_failure": "warn", "max_unsaved": timedelta(hours=1)}
    with mock.patch.object(failure_tolerance.FailureTolerance.__init__, "__kwdefaults__", {"clock": clock}):
        checkpointer = rankless.Checkpointer(tmp_path, model=model, **options)
    checkpointer.resume()
    for step in range(1, 4):  # the hour begins anew with each of these
        clock.now += 3000
        checkpointer.step(step)
    with full_disk():
        clock.now += 3500
        with pytest.warns(UserWarning, match=r"step_4 .* nothing was saved for 3500 s"):
            checkpointer.step(4)
        clock.now += 200
        with pytest.raises(StorageError, match="No space left") as caught:
            checkpointer.step(5)
    assert caught.value.__notes__ == ["nothing was saved for 3700 s, which is longer than max_unsaved"]
    assert listed(tmp_path) == ["step_1", "step_2", "step_3"]


def test_saves_in_the_background(tmp_path: Path) -> None:
    """The error of a save is that of the next one, which has begun by then."""
    messages = train(tmp_path, {2}, async_save=True)
    assert any("No space left" in message for message in messages)
    assert {"step_1", "step_4", "step_5"} <= set(listed(tmp_path))


def _train_on_ranks(path: str) -> tuple[list[str], list[str]]:
    return train(path, {2} if dist.get_rank() == 0 else set()), listed(path)


def test_all_ranks_go_on_although_one_has_failed(ranks: Ranks, tmp_path: Path) -> None:
    for messages, tags in ranks(3, _train_on_ranks, str(tmp_path)):
        assert any("No space left" in message for message in messages)
        assert tags == ["step_1", "step_3", "step_4", "step_5"]


@pytest.mark.parametrize(
    "options",
    [
        {"on_failure": "ignore"},
        {"max_unsaved": timedelta(hours=1)},
        {"on_failure": "warn", "max_unsaved": 3600},
        {"on_failure": "warn", "max_unsaved": timedelta(0)},
        {"on_failure": "warn", "local": "/dev/shm/never"},
    ],
)
def test_what_is_no_rule_for_failures_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"on_failure|max_unsaved"):
        rankless.Checkpointer(tmp_path, **options)


def _train_with_other_rules(path: str) -> str:
    on_failure = "warn" if dist.get_rank() else "raise"
    checkpointer = rankless.Checkpointer(path, model=torch.nn.Linear(2, 2), signals=(), on_failure=on_failure)
    with pytest.raises(rankless.RankMismatchError) as caught:
        checkpointer.resume()
    return str(caught.value)


def test_ranks_must_have_the_same_rule(ranks: Ranks, tmp_path: Path) -> None:
    """Else some would raise the error, and others would wait for them."""
    assert all("on_failure" in message for message in ranks(2, _train_with_other_rules, str(tmp_path)))
