"""Tests of the end of a training: the last step is saved, as it was, whatever earlier saves have met."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rankless
from rankless.components.component_content import ComponentContent
from rankless.errors import InvalidArgumentError, MismatchError, RankTimeoutError, StorageError
from rankless.save.tier_content import TierContent
from rankless.save.training_content import TrainingContent
from rankless.storage.object_path import make_object_path
from tests.helpers.failing_saves import one_failing_save
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import AWS, FakeS3, store_at
from tests.helpers.fsdp1 import wrap_fsdp1
from tests.helpers.pool import Ranks
from tests.helpers.stateful import Counter


def train(path: Path | str, until: int, *, signal_at: int = 0, **options: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankless.Checkpointer(
        path, model=model, optimizer=optimizer, save_every=2, async_save=True, **options
    ) as checkpointer:
        for step in range(checkpointer.resume() + 1, until + 1):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            if step == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
            if checkpointer.step(step):
                break


def saved_steps(path: Path | str) -> list[float | None]:
    return [info.step for info in rankless.list_checkpoints(path)]


@pytest.mark.parametrize(
    ("failing", "options", "expected"),
    [
        pytest.param(3, {"until": 7}, [2, 4, 7], id="the save before"),
        pytest.param(3, {"until": 7, "staging": "overlapped"}, [2, 4, 7], id="the save before, overlapped"),
        pytest.param(3, {"until": 6}, [2, 4, 6], id="the save of the last step"),
        pytest.param(2, {"until": 9}, [2, 6], id="the save before a step that is due"),
        pytest.param(1, {"until": 9, "signal_at": 3}, [3], id="the save before a signal"),
    ],
)
def test_the_last_step_is_saved_if_an_earlier_save_has_failed(
    tmp_path: Path, failing: int, options: dict[str, Any], expected: list[float]
) -> None:
    with one_failing_save(failing), pytest.raises(StorageError, match="an error for a moment") as caught:
        train(tmp_path, **options)
    assert saved_steps(tmp_path) == expected
    assert f"step {expected[-1]} " in "".join(caught.value.__notes__[1:])  # the first one has the traceback


def test_the_last_step_leaves_the_local_tier_if_an_earlier_save_has_failed(tmp_path: Path) -> None:
    local = rankless.LocalTier(tmp_path / "tier", drain_every=100)
    with one_failing_save(3, TierContent), pytest.raises(StorageError, match="an error for a moment"):
        train(tmp_path / "run", 7, local=local)
    assert saved_steps(tmp_path / "run") == [7]


def test_the_last_step_is_in_the_object_store_if_an_earlier_save_has_failed() -> None:
    with FakeS3(AWS).connected():
        run = make_object_path(store_at("http://fake"), f"{BUCKET}/run")
        with one_failing_save(3, TrainingContent), pytest.raises(StorageError, match="an error for a moment"):
            train(run, 7)
        assert saved_steps(run) == [2, 4, 7]


def test_if_all_saves_fail_the_first_error_names_the_others(tmp_path: Path) -> None:
    with (
        mock.patch.object(TrainingContent, "write_and_commit", side_effect=lambda: 1 / 0),
        pytest.raises(ZeroDivisionError) as caught,
    ):
        train(tmp_path, 3)
    assert "a save has failed, too: ZeroDivisionError" in "".join(caught.value.__notes__)
    assert not saved_steps(tmp_path)


def step_both(generator: rankless.Checkpointer, critic: rankless.Checkpointer) -> None:
    generator.step(1)
    critic.step(1)
    with one_failing_save(1):
        handle = critic.save()
        while not handle.done():
            time.sleep(0.001)


def test_of_two_checkpointers_both_save_their_last_step(tmp_path: Path) -> None:
    generator, critic = (
        rankless.Checkpointer(tmp_path / name, model=nn.Linear(2, 2), async_save=True, signals=()) for name in "gc"
    )
    with pytest.raises(StorageError, match="an error for a moment"), generator, critic:
        step_both(generator, critic)
    assert saved_steps(tmp_path / "g") == saved_steps(tmp_path / "c") == [1]


def save_checkpoint(folder: Path, name: str) -> None:
    rankless.save_checkpoint(folder, name, {"w": torch.ones(2)}, async_save=True)


def save_by_checkpointer(folder: Path, name: str) -> None:
    rankless.Checkpointer(folder, model={"w": torch.ones(2)}, async_save=True, signals=()).save(name)


def save_one_file(folder: Path, name: str) -> None:
    del name
    rankless.save_model({"w": torch.ones(2)}, folder / "next", async_save=True)


@pytest.mark.parametrize(
    ("save", "kind"),
    [
        (save_checkpoint, TrainingContent),
        (save_by_checkpointer, TrainingContent),
        (save_one_file, ComponentContent),
    ],
)
def test_a_save_is_made_before_it_raises_the_error_of_an_earlier_one(
    tmp_path: Path, save: Callable[[Path, str], None], kind: type[Any]
) -> None:
    with one_failing_save(1, kind):
        save(tmp_path, "first")
        with pytest.raises(StorageError, match="an error for a moment") as caught:
            save(tmp_path, "next")
    rankless.finalize()
    assert torch.equal(rankless.open(tmp_path / "next")["model/w"], torch.ones(2))
    assert "has begun all the same" in "".join(caught.value.__notes__)


def test_a_save_that_fails_leaves_the_error_of_an_earlier_one_to_finalize(tmp_path: Path) -> None:
    with one_failing_save(1):
        save_checkpoint(tmp_path, "first")
        with pytest.raises(InvalidArgumentError):
            save_checkpoint(tmp_path, "a/b")
    with pytest.raises(StorageError, match="an error for a moment"):
        rankless.finalize()


def test_finalize_drains_the_tier_also_if_a_background_save_has_failed(tmp_path: Path) -> None:
    directory = rankless.RunDirectory(tmp_path / "run", local=rankless.LocalTier(tmp_path / "tier", drain_every=100))
    directory.save("first", {"w": torch.ones(2)})
    with one_failing_save(1, TierContent):
        directory.save("second", {"w": torch.ones(2)}, async_save=True)
        with pytest.raises(StorageError, match="an error for a moment"):
            directory.finalize()
    assert [info.tag for info in directory.list()] == ["first"]


def step_without_optimizer(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


def write_to_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data += 1


def replace_weight(model: nn.Module) -> None:
    model.weight = nn.Parameter(torch.ones(2, 2))


def run_forward(model: nn.Module) -> None:
    model.train()(torch.randn(3, 2))  # changes the statistics of batch norm


def leave_after(checkpointer: rankless.Checkpointer, change: Callable[[], object]) -> None:
    with checkpointer:
        checkpointer.step(1)
        change()


@pytest.mark.parametrize("change", [step_without_optimizer, write_to_data, replace_weight, run_forward])
def test_a_changed_model_is_not_saved_as_the_last_step(tmp_path: Path, change: Callable[[nn.Module], None]) -> None:
    model = nn.BatchNorm1d(2) if change is run_forward else nn.Linear(2, 2)
    checkpointer = rankless.Checkpointer(tmp_path, model={"a": model}, signals=())
    with pytest.warns(UserWarning, match="step 1 is not saved at the end of the block"):
        leave_after(checkpointer, partial(change, model))
    assert not saved_steps(tmp_path)


@pytest.mark.parametrize("argument", ["optimizer", "stateful"])
def test_steps_of_each_optimizer_count(tmp_path: Path, argument: str) -> None:
    model = nn.Linear(2, 2)
    objects: dict[str, Any] = {argument: {"sgd": torch.optim.SGD(model.parameters())}}
    checkpointer = rankless.Checkpointer(tmp_path, model={"a": model}, signals=(), **objects)
    with pytest.warns(UserWarning, match="step 1 is not saved at the end of the block"):
        leave_after(checkpointer, objects[argument]["sgd"].step)
    assert not saved_steps(tmp_path)


def evaluate_before_the_end(path: str, kind: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = fully_shard(model, mesh=mesh) if kind == "fsdp2" else wrap_fsdp1(model, use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankless.Checkpointer(path, model=model, signals=()) as checkpointer:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        checkpointer.step(1)
        with torch.no_grad():
            model.eval()(torch.ones(2, 4))


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_an_evaluation_after_the_last_step_changes_nothing(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    ranks(2, evaluate_before_the_end, str(tmp_path), kind)
    assert saved_steps(tmp_path) == [1]


def test_content_is_that_of_its_step(tmp_path: Path) -> None:
    tensor = torch.zeros(3)
    content: dict[str, Any] = {"losses": [1.0], "array": np.zeros(2), "tensor": tensor}
    with rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2), signals=()) as checkpointer:
        checkpointer.step(1, user_content=content, per_rank_content=content)
        content["losses"].append(2.0)
        content["array"] += 1
        tensor += 1
    restored = rankless.restore(tmp_path, rng=False)
    for saved in (restored.user_content, restored.per_rank_content):
        assert saved["losses"] == [1.0]
        assert not saved["array"].any()
        assert not saved["tensor"].any()


def test_large_content_and_content_inside_itself_are_not_copied(tmp_path: Path) -> None:
    large = {"tensor": torch.zeros(2**18 + 1)}
    endless: list[Any] = []
    endless.append(endless)
    with rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2), signals=()) as checkpointer:
        checkpointer.step(1, user_content=endless)
        checkpointer.step(2, user_content=large)
        large["tensor"] += 1
    assert rankless.load_checkpoint(tmp_path)["tensor"].all()


def test_a_failed_resume_gives_signals_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    rankless.save_checkpoint(tmp_path, "step_1", model=nn.Linear(2, 2), step=1)
    checkpointer = rankless.Checkpointer(tmp_path, model=nn.Linear(3, 3))
    with pytest.raises(MismatchError):
        checkpointer.resume()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_failed_resume_in_a_block_leaves_signals_to_its_end(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    rankless.save_checkpoint(tmp_path, "step_1", model=nn.Linear(2, 2), step=1)
    model = nn.Linear(2, 2)
    with rankless.Checkpointer(tmp_path, model=model, stateful={"new": Counter()}) as checkpointer:
        with pytest.raises(MismatchError):
            checkpointer.resume()
        assert signal.getsignal(signal.SIGTERM) is not before
        assert checkpointer.resume(new_ok="new") == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_state_of_any_dtype_that_did_not_change_is_saved(tmp_path: Path) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int8)
    state = {str(dtype): torch.zeros(2, 3).to(dtype).t() for dtype in dtypes}
    state |= {"empty": torch.zeros(0), "scalar": torch.tensor(math.nan), "deep": torch.zeros(1, 1, 1)}
    with rankless.Checkpointer(tmp_path, model=state, signals=()) as checkpointer:
        checkpointer.step(1)
    assert saved_steps(tmp_path) == [1]


def test_the_end_does_not_wait_a_third_time_for_a_rank_that_is_dead(tmp_path: Path) -> None:
    checkpointer = rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2), signals=(), async_save=True)
    error = RankTimeoutError("rank 1 did not arrive")
    with (
        mock.patch.object(TrainingContent, "prepare", side_effect=error),
        mock.patch.object(rankless.RunDirectory, "drain") as drain,
        pytest.raises(RankTimeoutError, match="rank 1"),
        checkpointer,
    ):
        checkpointer.step(1)
    drain.assert_not_called()
