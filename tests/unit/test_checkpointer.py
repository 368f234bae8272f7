"""Tests of the checkpointer of one training, in one process: when it saves, what it resumes, and what it refuses."""

from __future__ import annotations

import gc
import math
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import rankless
from rankless.errors import (
    InvalidArgumentError,
    MismatchError,
    NoCheckpointError,
    StateError,
    StorageError,
    TagExistsError,
)
from rankless.save import shard_writer
from tests.helpers.stateful import Counter


def build_training(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 3)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def train_step(training: dict[str, Any]) -> torch.Tensor:
    loss: torch.Tensor = training["model"](torch.randn(2, 3)).square().mean()
    loss.backward()
    training["optimizer"].step()
    training["optimizer"].zero_grad()
    return loss


def train(path: Path, until: int, *, signal_at: int = 0, **options: Any) -> tuple[int, dict[str, Any]]:
    """Train as users do. Return the step at which the training began, and its objects."""
    training = build_training(seed=until)
    with rankless.Checkpointer(path, **training, **options) as checkpointer:
        start = checkpointer.resume()
        for step in range(start + 1, until + 1):
            loss = train_step(training)
            if step == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
            if checkpointer.step(step, {"loss": loss}):
                break
    return start, training


def list_steps(path: Path) -> list[tuple[str, float | None]]:
    return [(info.tag, info.step) for info in rankless.list_checkpoints(path)]


@pytest.mark.parametrize("options", [{}, {"async_save": True}], ids=["synchronous", "asynchronous"])
def test_a_loop_of_three_lines_saves_what_is_due_and_resumes_exactly(tmp_path: Path, options: dict[str, Any]) -> None:
    assert train(tmp_path / "parts", 5, save_every=2, **options)[0] == 0
    assert list_steps(tmp_path / "parts") == [("step_2", 2), ("step_4", 4), ("step_5", 5)]
    start, resumed = train(tmp_path / "parts", 9, save_every=2, **options)
    assert start == 5
    torch.manual_seed(5)
    uninterrupted = build_training(seed=5)
    for _ in range(9):
        train_step(uninterrupted)
    for name, tensor in uninterrupted["model"].state_dict().items():
        assert torch.equal(tensor, resumed["model"].state_dict()[name])


def test_a_signal_saves_the_step_and_ends_the_loop(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    train(tmp_path, 9, save_every=100, signal_at=3, async_save=True)
    assert list_steps(tmp_path) == [("step_3", 3)]
    assert signal.getsignal(signal.SIGTERM) is before


def test_who_goes_on_after_a_signal_is_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with rankless.Checkpointer(tmp_path, **build_training()) as checkpointer:
        os.kill(os.getpid(), signal.SIGUSR1) if checkpointer.step(1) else os.kill(os.getpid(), signal.SIGTERM)
        assert checkpointer.step(2)
        assert checkpointer.step(3)
    assert "signal to stop before step 3: leave the loop" in caplog.text
    assert list_steps(tmp_path) == [("step_2", 2), ("step_3", 3)]  # at the signal, and at the end of the block


def test_after_a_signal_only_due_steps_are_saved(tmp_path: Path) -> None:
    with rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2), save_every=5) as checkpointer:
        for step in range(1, 8):
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            checkpointer.step(step)
    assert list_steps(tmp_path) == [("step_2", 2), ("step_5", 5), ("step_7", 7)]


def test_two_checkpointers_both_learn_of_a_signal(tmp_path: Path) -> None:
    first, second = (rankless.Checkpointer(tmp_path / name, model=nn.Linear(2, 2)) for name in "ab")
    with first, second:
        assert not first.step(1)
        assert not second.step(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert first.step(2)
        assert second.step(2)


def test_without_signals_no_handler_is_installed(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2), signals=()) as checkpointer:
        assert not checkpointer.step(1)
        assert signal.getsignal(signal.SIGTERM) is before


def test_the_end_of_a_block_after_an_error_saves_nothing(tmp_path: Path) -> None:
    checkpointer = rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2))
    with pytest.raises(ZeroDivisionError), checkpointer:
        _step_and_fail(checkpointer)
    assert not list_steps(tmp_path)


def _step_and_fail(checkpointer: rankless.Checkpointer) -> None:
    checkpointer.step(1)
    raise ZeroDivisionError


def fail_to_write(*_: Any, **__: Any) -> None:
    raise StorageError(28, "the disk is full")


def test_the_end_of_a_block_raises_the_error_of_a_background_save(tmp_path: Path) -> None:
    checkpointer = rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2), async_save=True, save_every=1)
    with (
        mock.patch.object(shard_writer, "write_file_ranges", fail_to_write),
        pytest.raises(StorageError, match="the disk is full"),
        checkpointer,
    ):
        checkpointer.step(1)
    assert not list_steps(tmp_path)


def test_an_error_in_the_block_is_raised_and_names_the_failed_save(tmp_path: Path) -> None:
    checkpointer = rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2), async_save=True, save_every=1)
    with (
        mock.patch.object(shard_writer, "write_file_ranges", fail_to_write),
        pytest.raises(ZeroDivisionError) as caught,
        checkpointer,
    ):
        _step_and_fail(checkpointer)
    assert "the disk is full" in "".join(caught.value.__notes__)


def test_a_state_that_has_changed_is_not_saved_under_the_last_step(tmp_path: Path) -> None:
    """The loop is left between the optimizer's step and ``step()``."""
    with pytest.warns(UserWarning, match="step 3 is not saved at the end of the block"):
        _leave_before_step(tmp_path)
    assert list_steps(tmp_path) == [("step_2", 2)]


def _leave_before_step(path: Path) -> None:
    training = build_training()
    with rankless.Checkpointer(path, **training, save_every=2) as checkpointer:
        for step in (1, 2, 3, 4):
            train_step(training)
            if step == 4:
                break
            checkpointer.step(step)


def test_metrics_are_those_of_the_call(tmp_path: Path) -> None:
    running, array = torch.tensor([1.0]), np.array(2.0)
    with rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2)) as checkpointer:
        checkpointer.step(1, {"running": running, "array": array, "number": np.float32(3), "nan": math.nan})
        running += 1
    (info,) = rankless.list_checkpoints(tmp_path)
    assert info.metrics == {"running": 1.0, "array": 2.0, "number": 3.0, "nan": None}


@pytest.mark.parametrize("value", [torch.ones(2), np.ones(2), "1", None, [1.0]])
def test_a_metric_that_is_no_number_is_refused_at_once(tmp_path: Path, value: Any) -> None:
    with rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2)) as checkpointer:
        checkpointer.step(1)
        with pytest.raises(InvalidArgumentError, match="the metric 'loss' must be a number"):
            checkpointer.step(2, {"loss": value})
        with pytest.raises(InvalidArgumentError, match="metrics must be a dict"):
            checkpointer.step(2, [1.0])  # type: ignore[arg-type]
    assert list_steps(tmp_path) == [("step_1", 1)]


def test_a_training_does_not_begin_in_the_run_of_another_one(tmp_path: Path) -> None:
    train(tmp_path, 3)
    with pytest.raises(StateError, match=r"the latest is 'step_3': call resume\(\) before step\(\)"):
        rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2)).step(1)
    for path in (tmp_path / "step_3", tmp_path / "step_3/"):
        with pytest.raises(InvalidArgumentError, match="is a checkpoint itself"):
            rankless.Checkpointer(path, model=nn.Linear(2, 2)).resume()


@pytest.mark.parametrize("option", ["bogus", "step", "overwrite", "user_content"])
def test_an_unknown_argument_is_refused_at_once(tmp_path: Path, option: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"no argument '{option}'"):
        rankless.Checkpointer(tmp_path, **{option: 1})


@pytest.mark.parametrize("timeout", [0, -1, "10", None, True, math.nan])
def test_the_timeout_is_a_number_of_seconds(tmp_path: Path, timeout: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="timeout must be a number of seconds above 0"):
        rankless.Checkpointer(tmp_path, timeout=timeout)


@pytest.mark.parametrize("signal_at", [0, 8, 10])
def test_saves_that_nobody_planned_need_no_metric(tmp_path: Path, signal_at: int) -> None:
    """The metric is known only every five steps, and the job ends between them."""
    options: dict[str, Any] = {"save_every": 5, "keep": rankless.KeepBest("val_loss")}
    with rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2), **options) as checkpointer:
        for step in range(1, max(8, signal_at) + 1):
            if step == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
            if checkpointer.step(step, {"val_loss": 1.0} if step == 5 else None):
                break
    assert list_steps(tmp_path) == [("step_5", 5), (f"step_{max(8, signal_at)}", max(8, signal_at))]


def test_a_planned_save_needs_the_metric_of_its_policy(tmp_path: Path) -> None:
    checkpointer = rankless.Checkpointer(
        tmp_path, model=nn.Linear(2, 2), save_every=1, keep=rankless.KeepBest("val_loss"), signals=()
    )
    with pytest.raises(InvalidArgumentError, match="KeepBest needs 'val_loss'"):
        checkpointer.step(1)


def test_integers_of_numpy_are_steps(tmp_path: Path) -> None:
    with rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2), save_every=np.int64(2)) as checkpointer:
        checkpointer.step(np.int32(2))
    assert list_steps(tmp_path) == [("step_2", 2)]


def test_handlers_are_removed_in_any_order(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    runs = [rankless.Checkpointer(tmp_path / name, model=nn.Linear(2, 2)) for name in "abc"]
    for run in runs:
        run.step(1)
    runs[1].close()
    runs[0].close()
    os.kill(os.getpid(), signal.SIGTERM)
    assert runs[2].step(2)
    runs[2].close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_ends_with_its_checkpointer(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    checkpointer = rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2))
    checkpointer.step(1)
    assert signal.getsignal(signal.SIGTERM) is not before
    del checkpointer
    gc.collect()
    assert signal.getsignal(signal.SIGTERM) is before


def test_in_a_thread_it_tells_how_to_go_without_signals(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as thread:
        with pytest.raises(InvalidArgumentError, match=r"pass signals=\(\)"):
            thread.submit(rankless.Checkpointer(tmp_path / "a", model=nn.Linear(2, 2)).step, 1).result()
        assert not thread.submit(rankless.Checkpointer(tmp_path / "b", signals=()).step, 1).result()


def test_content_and_metrics_belong_to_the_step(tmp_path: Path) -> None:
    with rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2)) as checkpointer:
        checkpointer.step(1, {"loss": 0.5}, user_content={"note": "first"}, per_rank_content=7)
        checkpointer.step(2, {"loss": torch.tensor(0.25)}, user_content={"note": "second"}, per_rank_content=8)
    (info,) = rankless.list_checkpoints(tmp_path)
    assert info.metrics == {"loss": 0.25}
    resumed = rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2), signals=())
    assert resumed.restored is None
    assert resumed.resume() == resumed.last_step == 2
    assert resumed.restored is not None
    assert resumed.restored.user_content == {"note": "second"}
    assert rankless.restore(tmp_path, rng=False).per_rank_content == 8


def test_a_metric_keeps_no_activations(tmp_path: Path) -> None:
    training = build_training()
    with rankless.Checkpointer(tmp_path, **training, signals=()) as checkpointer:
        checkpointer.step(1, {"loss": training["model"](torch.randn(2, 3)).square().mean()})
        assert checkpointer._pending["metrics"]["loss"].grad_fn is None


def test_save_takes_another_tag(tmp_path: Path) -> None:
    with rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2), signals=()) as checkpointer:
        checkpointer.step(3, {"loss": 1.0})
        checkpointer.save("best")
        checkpointer.step(4, {"loss": 0.5})
        with pytest.raises(TagExistsError):
            checkpointer.save("best")
        checkpointer.save("best", overwrite=True)
    assert list_steps(tmp_path) == [("best", 4), ("step_4", 4)]


def test_registered_objects_are_saved_and_resumed(tmp_path: Path) -> None:
    with rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2), stateful={"scaler": Counter(3)}) as checkpointer:
        checkpointer.register("ema", Counter(4))
        checkpointer.step(1)
    scaler, ema = Counter(), Counter()
    resumed = rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2), stateful={"scaler": scaler}, signals=())
    resumed.register("ema", ema)
    resumed.resume()
    assert (scaler.count, ema.count) == (3, 4)


def test_new_objects_are_an_error_unless_they_may_be_new(tmp_path: Path) -> None:
    with rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2), stateful={"scaler": Counter(3)}) as checkpointer:
        checkpointer.step(1)
    training = build_training()
    scheduler = torch.optim.lr_scheduler.StepLR(training["optimizer"], 1)
    scaler = Counter()
    objects = {"ema": Counter(5), "scaler": scaler}
    resumed = rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2), scheduler=scheduler, stateful=objects, signals=())
    for new_ok, missing in (((), "stateful object 'ema'"), ("ema", "scheduler"), ({"scheduler"}, "ema")):
        with pytest.raises(MismatchError, match=missing):
            resumed.resume(new_ok=new_ok)
    with pytest.warns(UserWarning, match="stateful object 'ema'"):
        assert resumed.resume(new_ok={"ema", "scheduler"}) == 1
    assert (objects["ema"].count, scaler.count) == (5, 3)


def test_one_new_object_does_not_allow_others_to_be_missing(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", nn.Linear(2, 2), step=1)
    objects = {"ema": Counter(), "scaler": Counter()}
    resumed = rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2), stateful=objects, signals=())
    with pytest.raises(MismatchError) as caught:
        resumed.resume(new_ok={"ema"})
    assert "stateful object 'scaler'" in str(caught.value)
    assert "'ema'" not in str(caught.value)
    assert "allow_missing=('stateful/scaler',)" in str(caught.value)


def test_strict_is_chosen_for_each_component(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", {"net": nn.Linear(2, 2), "head": nn.Linear(2, 2)}, step=1)
    models = {"net": nn.Linear(2, 2, bias=False), "head": nn.Linear(2, 2)}
    resumed = rankless.Checkpointer(tmp_path, model=models, signals=())
    for strict in (True, {"model/head": False}, {"model/net": True}, {"model": True}):
        with pytest.raises(MismatchError, match="only in the checkpoint: bias"):
            resumed.resume(strict=strict)
    for strict in (False, {"model/net": False}, {"model": False}):
        assert resumed.resume(strict=strict) == 1


@pytest.mark.parametrize("strict", [{"model/other": False}, {"models": False}, {"model": 0}, "model", None])
def test_strict_names_only_components(tmp_path: Path, strict: Any) -> None:
    rankless.save_checkpoint(tmp_path, "s", nn.Linear(2, 2), step=1)
    with pytest.raises(InvalidArgumentError, match="strict"):
        rankless.restore(tmp_path, None, nn.Linear(2, 2), strict=strict)


@pytest.mark.parametrize("missing", ["stateful/other", "scaler", "model/net"])
def test_allow_missing_names_only_components(tmp_path: Path, missing: str) -> None:
    rankless.save_checkpoint(tmp_path, "s", nn.Linear(2, 2), step=1)
    with pytest.raises(InvalidArgumentError, match="each of allow_missing"):
        rankless.restore(tmp_path, None, nn.Linear(2, 2), stateful={"scaler": Counter()}, allow_missing=[missing])


def test_names_that_cannot_be_registered(tmp_path: Path) -> None:
    checkpointer = rankless.Checkpointer(tmp_path, stateful={"ema": Counter()})
    for name, reason in (
        ("ema", "already registered"),
        ("model", "pass model="),
        ("a/b", "remove slashes"),
        ("", "tag"),
    ):
        with pytest.raises(InvalidArgumentError, match=reason):
            checkpointer.register(name, Counter())
    with pytest.raises(InvalidArgumentError, match="must have state_dict"):
        checkpointer.register("number", 3)
    with pytest.raises(InvalidArgumentError, match="new_ok has 'emma', but this Checkpointer saves ema"):
        checkpointer.resume(new_ok={"emma"})
    several = rankless.Checkpointer(checkpointer.path, model={"net": nn.Linear(2, 2), "ema": nn.Linear(2, 2)})
    with pytest.raises(InvalidArgumentError, match="saves model/net, model/ema"):
        several.resume(new_ok={"ema"})


@pytest.mark.parametrize("save_every", [0, -1, 1.5, True, "10"])
def test_save_every_is_a_positive_integer(tmp_path: Path, save_every: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="save_every must be a"):
        rankless.Checkpointer(tmp_path, save_every=save_every)


def test_steps_increase(tmp_path: Path) -> None:
    with rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2), signals=()) as checkpointer:
        checkpointer.step(0)
        for step in (0, -1, 1.5, None):
            with pytest.raises(InvalidArgumentError, match="step"):
                checkpointer.step(step)  # type: ignore[arg-type]
        checkpointer.step(5)
        for step in (4, 5):
            with pytest.raises(InvalidArgumentError, match="comes after step 5"):
                checkpointer.step(step)
    resumed = rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2), signals=())
    with pytest.raises(InvalidArgumentError, match=r"the first one is resume\(\) \+ 1"):
        resumed.step(resumed.resume())


def test_a_checkpoint_without_a_step_is_not_resumed(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", nn.Linear(2, 2))
    with pytest.raises(StateError, match="'s' has no step"):
        rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2), signals=()).resume()


def test_a_training_does_not_begin_anew_if_its_checkpoints_cannot_be_read(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", nn.Linear(2, 2), step=1)
    (tmp_path / "s/manifest.json").write_text("{")
    with pytest.raises(NoCheckpointError, match="none of the 1 checkpoint"):
        rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2), signals=()).resume()
    with pytest.raises(NoCheckpointError, match="no checkpoint 'other'"):
        rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2), signals=()).resume("other")


def test_what_a_person_sees(tmp_path: Path) -> None:
    checkpointer = rankless.Checkpointer(tmp_path, **build_training(), stateful={"ema": Counter()}, signals=())
    checkpointer.step(7)
    assert repr(checkpointer) == f"<Checkpointer of model, optimizer, ema in {str(tmp_path)!r}, step 7>"


def test_the_last_step_is_saved_again_if_its_background_save_had_failed(tmp_path: Path) -> None:
    with rankless.Checkpointer(tmp_path, model=nn.Linear(2, 2), async_save=True, signals=()) as checkpointer:
        checkpointer.resume()
        checkpointer.step(1)
        with mock.patch("rankless.run.pending_dir.PendingDirectory.publish", side_effect=StorageError(28, "full")):
            checkpointer.save()
            with pytest.raises(StorageError):
                checkpointer.finalize()
    assert [info.tag for info in rankless.list_checkpoints(tmp_path)] == ["step_1"]


def test_a_handle_says_what_it_is_of_and_how_far(tmp_path: Path) -> None:
    saved = rankless.save_checkpoint(tmp_path, "a", nn.Linear(1, 1))
    assert repr(saved) == f"<SaveHandle of '{tmp_path / 'a'}', done>"
    with mock.patch.object(shard_writer, "write_file_ranges", fail_to_write):
        failed = rankless.save_checkpoint(tmp_path, "b", nn.Linear(1, 1), async_save=True)
        with pytest.raises(StorageError):
            failed.wait()
    assert repr(failed) == f"<SaveHandle of '{tmp_path / 'b'}', failed: StorageError>"
