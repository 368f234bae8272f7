"""Tests the checkpoint manager for torchtitan with torchtitan's models, optimizers, schedulers and adapters.

The oracle is torchtitan's own checkpoint manager. Gradients are a function of each element, so a step gives the same
bits in any layout.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan.models.llama3", exc_type=ImportError)

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import CheckpointManager as TitanManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.models.llama3 import model_registry

import holdfast
from holdfast.errors import InvalidArgumentError, MismatchError, NoCheckpointError
from holdfast.torchtitan import CheckpointManager
from tests.helpers.pool import Ranks


class Loader:
    """A data loader of one rank, as torchtitan's are: its state depends on the rank."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {f"dp_rank_{dist.get_rank()}": self.position, "world_size": dist.get_world_size()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state[f"dp_rank_{dist.get_rank()}"]


class Training:
    """torchtitan's objects for two layers of its debug model of Llama 3, under FSDP2."""

    def __init__(self, manager: Any, folder: str, *, seed: int = 0, **options: Any) -> None:
        spec = model_registry("debugmodel")
        config = dataclasses.replace(spec.model, layers=spec.model.layers[:2])
        torch.manual_seed(seed)
        with torch.device("meta"):
            self.model = config.build()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.model.to_empty(device="cpu")
        with torch.no_grad():
            self.model.init_weights(buffer_device=None)
            for number, parameter in enumerate(self.model.parameters()):
                parameter.fill_(0.01 * (number + 1 + seed))
        adamw = dataclasses.replace(default_adamw(lr=1e-2), implementation="for-loop")
        self.optimizers = adamw.build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=10
        )
        self.step, self.loader = 0, Loader()
        self.checkpointer = manager.Config(enable=True, interval=2, **options).build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=spec.state_dict_adapter(config, None),
            base_folder=folder,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])

    def train(self, steps: int) -> Training:
        while self.step < steps:
            self.step += 1
            for number, parameter in enumerate(self.model.parameters()):
                parameter.grad = parameter.detach() * (0.5 + number) + self.step
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.loader.position += 1 + dist.get_rank()
            self.checkpointer.save(self.step, last_step=self.step == steps)
        self.checkpointer.maybe_wait_for_saving()
        self.checkpointer.close()
        return self

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.full_tensor().clone() for name, tensor in self.model.state_dict().items()}

    def everything(self) -> dict[str, Any]:
        moments = {
            f"{number}.{name}": state.full_tensor() if hasattr(state, "full_tensor") else state
            for number, states in enumerate(self.optimizers.optimizers[0].state.values())
            for name, state in states.items()
        }
        settings = [group["lr"] for group in self.optimizers.optimizers[0].param_groups]
        return self.weights() | moments | {"lr": settings, "schedulers": self.schedulers.state_dict()}


def assert_equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


FULL = {"last_save_model_only": False}


def train_uninterrupted(folder: str) -> dict[str, Any]:
    return Training(CheckpointManager, folder, **FULL).train(6).everything()


def train_and_resume(folder: str, options: dict[str, Any], loader: bool) -> dict[str, Any]:
    Training(CheckpointManager, folder, **FULL).train(4)
    return resume(folder, options, loader)


def resume(folder: str, options: dict[str, Any], loader: bool) -> dict[str, Any]:
    training = Training(CheckpointManager, folder, seed=1, **FULL, **options)
    assert training.checkpointer.load()
    assert training.step == 4
    assert training.loader.position == (4 * (1 + dist.get_rank()) if loader else 0)
    return training.train(6).everything()


@pytest.mark.parametrize("options", [{}, {"staging": "overlapped"}, {"async_save": False}])
def test_a_resumed_run_is_equal_to_an_uninterrupted_one(ranks: Ranks, tmp_path: Path, options: dict[str, Any]) -> None:
    expected = ranks(2, train_uninterrupted, str(tmp_path / "one"))
    assert_equal(ranks(2, train_and_resume, str(tmp_path / "two"), options, True), expected)
    tags = [info.tag for info in holdfast.list_checkpoints(tmp_path / "two/checkpoint")]
    assert tags == ["step-2", "step-4", "step-6"]


@pytest.mark.parametrize("size", [1, 3])
def test_a_run_resumes_on_another_number_of_ranks(ranks: Ranks, tmp_path: Path, size: int) -> None:
    expected = ranks(2, train_uninterrupted, str(tmp_path / "one"))[0]
    ranks(2, train_to_4, str(tmp_path / "two"))
    with pytest.raises(AssertionError) as caught:
        ranks(size, resume, str(tmp_path / "two"), {}, True)
    assert isinstance(caught.value.__cause__, MismatchError)
    options = {"exclude_from_loading": ["dataloader"]}
    assert_equal(ranks(size, resume, str(tmp_path / "two"), options, False), [expected] * size)


def train_to_4(folder: str) -> None:
    Training(CheckpointManager, folder, **FULL).train(4)


def export_with(manager: Any, folder: str, options: dict[str, Any]) -> None:
    Training(manager, folder, **options).train(3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_last_save_writes_what_torchtitan_exports_for_hugging_face(
    ranks: Ranks, tmp_path: Path, dtype: str
) -> None:
    options = {"last_save_in_hf": True, "export_dtype": dtype}
    ranks(2, export_with, CheckpointManager, str(tmp_path / "ours"), options)
    ranks(2, export_with, TitanManager, str(tmp_path / "theirs"), options)
    ours, theirs = (holdfast.open(tmp_path / side / "checkpoint/step-3") for side in ("ours", "theirs"))
    assert set(ours) == set(theirs)
    assert_equal({name: ours[name] for name in ours}, {name: theirs[name] for name in theirs})


def start_from(manager: Any, folder: str, path: str, options: dict[str, Any]) -> dict[str, Any]:
    training = Training(manager, folder, seed=1, initial_load_path=path, **options)
    assert training.checkpointer.load()
    training.checkpointer.close()
    assert training.step == (0 if options.get("initial_load_model_only", True) else 4)
    return training.everything()


def weights_after(steps: int, folder: str) -> dict[str, torch.Tensor]:
    return Training(CheckpointManager, folder, load_only=True).train(steps).weights()


@pytest.mark.parametrize("size", [1, 3])
def test_a_run_starts_from_weights_of_hugging_face(ranks: Ranks, tmp_path: Path, size: int) -> None:
    options = {"last_save_in_hf": True}
    ranks(2, export_with, TitanManager, str(tmp_path / "theirs"), options)
    expected = ranks(2, weights_after, 3, str(tmp_path / "none"))[0]
    path = str(tmp_path / "theirs/checkpoint/step-3")
    for actual in ranks(size, start_from, CheckpointManager, str(tmp_path / "new"), path, {"initial_load_in_hf": True}):
        assert_equal({name: actual[name] for name in expected}, expected)


@pytest.mark.parametrize("model_only", [True, False])
def test_a_run_starts_from_a_checkpoint_of_torchtitan(ranks: Ranks, tmp_path: Path, model_only: bool) -> None:
    ranks(2, save_with_titan, str(tmp_path / "theirs"))
    path = str(tmp_path / "theirs/checkpoint/step-4")
    options = {"initial_load_model_only": model_only}
    expected = ranks(2, start_from, TitanManager, str(tmp_path / "a"), path, options)
    assert_equal(ranks(2, start_from, CheckpointManager, str(tmp_path / "b"), path, options), expected)


def save_with_titan(folder: str) -> None:
    Training(TitanManager, folder, **FULL).train(4)


def save_seed_then_load(folder: str) -> tuple[bool, bool]:
    training = Training(CheckpointManager, folder, seed=3)
    expected = training.weights()
    training.checkpointer.save(0, last_step=True)
    training.checkpointer.close()
    resumed = Training(CheckpointManager, folder, seed=4)
    assert resumed.checkpointer.load()
    assert_equal(resumed.weights(), expected)
    return resumed.step == 0, len(resumed.optimizers.optimizers[0].state) == 0


def test_a_seed_checkpoint_has_only_the_model(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, save_seed_then_load, str(tmp_path)) == [(True, True)] * 2


def go_back(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    expected = Training(CheckpointManager, folder, **FULL).train(6).everything()
    training = Training(CheckpointManager, folder, seed=1, **FULL)
    assert training.checkpointer.load(step=2)
    assert training.step == 2
    return training.train(6).everything(), expected


def test_a_run_that_goes_back_saves_its_steps_again(ranks: Ranks, tmp_path: Path) -> None:
    for actual, expected in ranks(2, go_back, str(tmp_path)):
        assert_equal(actual, expected)


def run_with_options(folder: str) -> list[str]:
    options: dict[str, Any] = {"enable_first_step_checkpoint": True, "keep_latest_k": 2}
    training = Training(CheckpointManager, folder, **options)
    assert not training.checkpointer.load()
    training.train(7)
    with pytest.raises(NoCheckpointError, match="step-4"):
        Training(CheckpointManager, folder).checkpointer.load(step=4)
    return [info.tag for info in holdfast.list_checkpoints(Path(folder, "checkpoint"))]


def test_options_keep_their_meaning(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, run_with_options, str(tmp_path)) == [["step-6", "step-7"]] * 2


def load_only(folder: str) -> bool:
    Training(CheckpointManager, folder, load_only=True).train(4)
    return Path(folder, "checkpoint").exists()


def test_load_only_saves_nothing(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, load_only, str(tmp_path)) == [False, False]


def build_wrongly(folder: str) -> None:
    for options in ({"exclude_from_loading": ["datalaoder"]}, {"staging": "lazy"}):
        with pytest.raises(InvalidArgumentError):
            Training(CheckpointManager, folder, **options)
    with pytest.raises(InvalidArgumentError):
        Training(CheckpointManager, "s3://bucket")
    disabled = CheckpointManager.Config(enable=False).build(
        dataloader=None, model_parts=[], optimizers=None, lr_schedulers=None, states={}, sd_adapter=None
    )
    assert not disabled.load()
    assert not disabled.save(2)
    disabled.maybe_wait_for_saving()
    disabled.close()


def test_wrong_options_are_refused_when_the_manager_is_built(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, build_wrongly, str(tmp_path))
