"""Tests transformers' Trainer and Accelerate with rankless checkpoints against uninterrupted runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers

import rankless
from rankless.errors import InvalidArgumentError, StorageError
from rankless.transformers import CheckpointMixin, Trainer
from tests.helpers.failing_saves import one_failing_save
from tests.helpers.pool import Ranks
from tests.helpers.run_directories import list_names
from tests.helpers.trainer_runs import Numbers, launch, make_arguments, make_model, train, train_with_accelerate


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


def test_a_run_resumes_as_if_it_had_not_stopped(ranks: Ranks, tmp_path: Path) -> None:
    """Bit for bit, with dropout; in the middle of an epoch of eight steps."""
    whole = ranks(2, train, tmp_path / "whole", 8, False, 0.1)[0]
    ranks(2, train, tmp_path / "run", 5, False, 0.1)
    resumed = ranks(2, train, tmp_path / "run", 8, str(tmp_path / "run/checkpoint-3"), 0.1)[0]
    assert resumed["losses"] == whole["losses"]
    assert same(resumed["weights"], whole["weights"])


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_it_resumes_on_another_number_of_ranks(ranks: Ranks, tmp_path: Path, before: int, after: int) -> None:
    whole = ranks(1, train, tmp_path / "whole", 6)[0]
    ranks(before, train, tmp_path / "run", 3)
    saved = rankless.open(tmp_path / "run")
    results = ranks(after, train, tmp_path / "run", 6, True)
    assert results[0]["losses"] == pytest.approx(whole["losses"], rel=1e-4)
    # The gradients of keys' biases are rounding errors, which Adam makes steps of.
    for name in (name for name in whole["weights"] if not name.endswith("c_attn.bias")):
        torch.testing.assert_close(results[0]["weights"][name], whole["weights"][name], rtol=1e-3, atol=1e-5)
    assert saved.values["user_content"]["trainer_state"]["global_step"] == 3
    state = transformers.TrainerState.load_from_json(str(tmp_path / "run/checkpoint-6/trainer_state.json"))
    logged = state.log_history[-1]
    metrics = {"loss": logged["loss"], "grad_norm": logged["grad_norm"], "learning_rate": logged["learning_rate"]}
    assert rankless.open(tmp_path / "run").metrics == pytest.approx(metrics)
    assert (state.global_step, len(state.log_history)) == (6, 6)


FSDP = {1: "FullyShardedDataParallel", 2: "FSDPGPT2LMHeadModel"}


def sharded(version: int, **options: Any) -> dict[str, Any]:
    return {"fsdp": True, "fsdp_config": {"version": version}, **options}


@pytest.mark.parametrize("version", FSDP)
def test_under_fsdp_a_run_resumes_as_if_it_had_not_stopped(ranks: Ranks, tmp_path: Path, version: int) -> None:
    """Bit for bit, with dropout."""
    whole = ranks(2, _train, tmp_path / "whole", 6, sharded(version, dropout=0.1))[0]
    ranks(2, _train, tmp_path / "run", 3, sharded(version, dropout=0.1))
    resumed = ranks(2, _train, tmp_path / "run", 6, sharded(version, dropout=0.1, resume=True))[0]
    assert whole["kind"] == resumed["kind"] == FSDP[version]
    assert resumed["losses"] == whole["losses"]
    assert same(resumed["weights"], whole["weights"])


@pytest.mark.parametrize("version", FSDP)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_under_fsdp_it_resumes_on_another_number_of_ranks(
    ranks: Ranks, tmp_path: Path, version: int, before: int, after: int
) -> None:
    whole = ranks(1, train, tmp_path / "whole", 6)[0]
    ranks(before, _train, tmp_path / "run", 3, sharded(version))
    result = ranks(after, _train, tmp_path / "run", 6, sharded(version, resume=True))[0]
    assert result["losses"] == pytest.approx(whole["losses"], rel=1e-4)
    for name in (name for name in whole["weights"] if not name.endswith("c_attn.bias")):
        torch.testing.assert_close(result["weights"][name], whole["weights"][name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("version", FSDP)
def test_under_fsdp_what_is_saved_opens_with_transformers(ranks: Ranks, tmp_path: Path, version: int) -> None:
    trained = ranks(2, _train, tmp_path, 3, sharded(version))[0]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-3/model")
    assert same(loaded.state_dict(), trained["weights"])


def test_what_is_saved_opens_with_transformers(ranks: Ranks, tmp_path: Path) -> None:
    trained = ranks(2, train, tmp_path, 3)[0]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-3/model")
    assert same(loaded.state_dict(), trained["weights"])


def test_arguments_mean_what_they_mean(ranks: Ranks, tmp_path: Path) -> None:
    asynchronous = {"async_save": True, "save_total_limit": 2}
    assert ranks(1, _train, tmp_path / "a", 12, asynchronous)[0]["tags"] == ["checkpoint-9", "checkpoint-12"]
    only = ranks(1, _train, tmp_path / "b", 3, {"save_only_model": True})[0]
    assert only["tags"] == ["checkpoint-3"]
    assert not [name for name in rankless.open(tmp_path / "b") if name.startswith("optimizer")]


def train_with_a_failing_save(path: Path) -> None:
    with one_failing_save(1):
        train(path, 12, async_save=True)


def test_a_later_state_is_saved_although_an_earlier_save_has_failed(ranks: Ranks, tmp_path: Path) -> None:
    (outcome,) = ranks.outcomes(1, train_with_a_failing_save, tmp_path)
    assert isinstance(outcome, StorageError)
    assert [info.tag for info in rankless.list_checkpoints(tmp_path)] == ["checkpoint-6"]


def test_a_checkpoint_of_transformers_own_is_left_to_it(ranks: Ranks, tmp_path: Path) -> None:
    theirs = ranks(1, _theirs, tmp_path, 3)[0]
    resumed = ranks(1, train, tmp_path, 6, True)[0]
    assert resumed["losses"][:3] == theirs
    assert len(resumed["losses"]) == 6
    assert resumed["tags"] == ["checkpoint-6"]


def test_what_accelerate_wraps_is_saved_as_what_it_is(ranks: Ranks, tmp_path: Path) -> None:
    weights = ranks(2, train_with_accelerate, tmp_path)[0]
    plain = torch.nn.Linear(6, 6)
    optimizer = torch.optim.AdamW(plain.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    rankless.load_checkpoint(tmp_path, None, plain, optimizer, scheduler)
    assert same(dict(plain.state_dict()), weights)
    assert optimizer.state[plain.weight]["step"] == 3
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] < 0.1


class Counting(transformers.Trainer):
    """A ``Trainer`` of another library, with a state of its own in a file of its checkpoints."""

    count, name = 0, "count.txt"

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        self.count += 1
        return super().training_step(*args, **options)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        path = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}", self.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(self.count))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.count = int(Path(checkpoint, self.name).read_text())


class MixedCounting(CheckpointMixin, Counting):
    """The same, with checkpoints of rankless."""


def _count(path: Path, steps: int, name: str = "count.txt") -> int:
    with launch():
        trainer = MixedCounting(make_model(), make_arguments(path, 1, steps), train_dataset=Numbers())
        trainer.name = name
        trainer.train(resume_from_checkpoint=rankless.has_checkpoint(path))
        return trainer.count


def test_a_subclass_keeps_files_of_its_own_in_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(1, _count, tmp_path, 3) == [3]
    assert ranks(1, _count, tmp_path, 6) == [6]
    assert list_names(tmp_path) == ["checkpoint-3", "checkpoint-6"]


def test_a_file_that_cannot_be_kept_is_named(ranks: Ranks, tmp_path: Path) -> None:
    (error,) = ranks.outcomes(1, _count, tmp_path, 3, "folder/count.txt")
    assert isinstance(error, InvalidArgumentError)
    assert "the folder 'folder'" in str(error)


class Signal(transformers.TrainerCallback):
    """What SIGTERM does with ``enable_jit_checkpoint``, some seconds later: here after the third step."""

    trainer: Any

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.trainer.state.global_step == 3:
            for callback in self.trainer.callback_handler.callbacks:
                if type(callback).__name__ == "JITCheckpointCallback":
                    callback.jit_manager.is_checkpoint_requested = True


def _train_until_signal(path: Path) -> None:
    with launch():
        options = {"enable_jit_checkpoint": True, "save_strategy": "no"}
        arguments = make_arguments(path, dist.get_world_size(), 8, **options)
        trainer = Trainer(make_model(0.1), arguments, train_dataset=Numbers())
        signal = Signal()
        signal.trainer = trainer
        trainer.add_callback(signal)
        trainer.train()


def test_a_checkpoint_at_a_signal_resumes_as_if_nothing_had_happened(ranks: Ranks, tmp_path: Path) -> None:
    whole = ranks(2, train, tmp_path / "whole", 8, False, 0.1)[0]
    ranks(2, _train_until_signal, tmp_path / "run")
    assert [info.tag for info in rankless.list_checkpoints(tmp_path / "run")] == ["checkpoint-3"]
    resumed = ranks(2, train, tmp_path / "run", 8, True, 0.1)[0]
    assert resumed["losses"] == whole["losses"]
    assert same(resumed["weights"], whole["weights"])


def _train(path: Path, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    return train(path, steps, **options)


def _theirs(path: Path, steps: int) -> list[float]:
    with mock.patch("tests.helpers.trainer_runs.Trainer", _plain):
        return train(path, steps)["losses"]


def _plain(*args: Any, async_save: bool, checkpoint_dir: None, **options: Any) -> transformers.Trainer:
    assert not async_save
    assert checkpoint_dir is None
    return transformers.Trainer(*args, **options)
