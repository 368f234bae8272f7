"""Tests the checkpoint manager for torchtitan with torchtitan's models, optimizers, schedulers and adapters.

The oracle is torchtitan's own checkpoint manager. Gradients are a function of each element, so a step gives the same
bits in any layout.
"""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torchtitan.models.llama3", exc_type=ImportError)

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import CheckpointManager as TitanManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.models.llama3 import model_registry

import rankless
from rankless.errors import InvalidArgumentError, MismatchError, NoCheckpointError, StorageError, TagExistsError
from rankless.torchtitan import CheckpointManager
from tests.helpers.failing_saves import one_failing_save
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import FakeS3
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

    def __init__(self, manager: Any, folder: str, /, *, seed: int = 0, loader: Any = None, **options: Any) -> None:
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
        self.step, self.loader = 0, Loader() if loader is None else loader
        self.checkpointer = manager.Config(**{"enable": True, "interval": 2, **options}).build(
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
    tags = [info.tag for info in rankless.list_checkpoints(tmp_path / "two/checkpoint")]
    assert tags == ["step-2", "step-4", "step-6"]


def train_with_a_failing_save(folder: str, options: dict[str, Any]) -> None:
    with one_failing_save(1):
        Training(CheckpointManager, folder, **options).train(4)


@pytest.mark.parametrize("options", [{}, FULL], ids=["model only", "everything"])
def test_the_last_step_is_saved_although_an_earlier_save_has_failed(
    ranks: Ranks, tmp_path: Path, options: dict[str, Any]
) -> None:
    for outcome in ranks.outcomes(2, train_with_a_failing_save, str(tmp_path), options):
        assert isinstance(outcome, StorageError)
    assert [info.tag for info in rankless.list_checkpoints(tmp_path / "checkpoint")] == ["step-4"]


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
    ours, theirs = (rankless.open(tmp_path / side / "checkpoint/step-3") for side in ("ours", "theirs"))
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
    return [info.tag for info in rankless.list_checkpoints(Path(folder, "checkpoint"))]


def test_options_keep_their_meaning(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, run_with_options, str(tmp_path)) == [["step-6", "step-7"]] * 2


def load_only(folder: str) -> bool:
    Training(CheckpointManager, folder, load_only=True).train(4)
    return Path(folder, "checkpoint").exists()


def test_load_only_saves_nothing(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, load_only, str(tmp_path)) == [False, False]


def build_wrongly(folder: str) -> None:
    wrong = {"exclude_from_loading": ["datalaoder"], "staging": "lazy", "export_dtype": "bf16", "timeout": 0.0}
    for options in ({name: value} for name, value in wrong.items()):
        with pytest.raises(InvalidArgumentError):
            Training(CheckpointManager, folder, **options)
    with pytest.raises(InvalidArgumentError):
        Training(CheckpointManager, folder, folder="ftp://host/run")
    disabled = CheckpointManager.Config(enable=False).build(
        dataloader=None, model_parts=[], optimizers=None, lr_schedulers=None, states={}, sd_adapter=None
    )
    assert not disabled.load()
    assert not disabled.save(2)
    disabled.maybe_wait_for_saving()
    disabled.close()


def test_wrong_options_are_refused_when_the_manager_is_built(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, build_wrongly, str(tmp_path))


class Numbers(IterableDataset[torch.Tensor]):
    """The numbers from 1, with a position."""

    def __init__(self) -> None:
        self.last = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.last += 1
            yield torch.tensor(self.last)

    def state_dict(self) -> dict[str, int]:
        return {"last": self.last}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.last = state["last"]


def parallel_training(manager: Any, folder: str, degree: int, consecutive: bool) -> tuple[Training, int]:
    """Return a training with torchtitan's data loader and its data-parallel rank; its other ranks get equal data."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dp_rank = rank * degree // size if consecutive else rank % degree
    loader = ParallelAwareDataloader(Numbers(), dp_rank, degree, batch_size=1)
    return Training(manager, folder, loader=loader, **FULL), dp_rank


def save_positions(manager: Any, folder: str, degree: int) -> None:
    training, dp_rank = parallel_training(manager, folder, degree, consecutive=True)
    numbers = iter(training.loader)
    for _ in range(3 + dp_rank):
        next(numbers)
    training.checkpointer.save(2)
    training.checkpointer.maybe_wait_for_saving()
    training.checkpointer.close()


def load_positions(manager: Any, folder: str, degree: int) -> tuple[int, int]:
    training, dp_rank = parallel_training(manager, folder, degree, consecutive=False)
    assert training.checkpointer.load()
    return int(next(iter(training.loader))), dp_rank


@pytest.mark.parametrize("manager", [TitanManager, CheckpointManager], ids=["torchtitan", "rankless"])
@pytest.mark.parametrize(("size", "new_size", "degree"), [(1, 2, 1), (2, 1, 1), (4, 4, 2)])
def test_data_loaders_resume_by_their_data_parallel_rank(
    ranks: Ranks, tmp_path: Path, manager: Any, size: int, new_size: int, degree: int
) -> None:
    ranks(size, save_positions, manager, str(tmp_path), degree)
    assert ranks(new_size, load_positions, manager, str(tmp_path), degree) == [
        (4 + rank % degree, rank % degree) for rank in range(new_size)
    ]


@pytest.mark.parametrize(("degree", "new_degree"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("size", [1, 2])
def test_another_number_of_data_parallel_ranks_is_refused(
    ranks: Ranks, tmp_path: Path, size: int, degree: int, new_degree: int
) -> None:
    ranks(2, save_positions, CheckpointManager, str(tmp_path), degree)
    for outcome in ranks.outcomes(max(size, new_degree), load_positions, CheckpointManager, str(tmp_path), new_degree):
        assert isinstance(outcome, MismatchError)
        assert f"saved with {degree} data-parallel ranks, now there are {new_degree}" in str(outcome)


def save_seed(manager: Any, folder: str, options: dict[str, Any]) -> None:
    training = Training(manager, folder, seed=3, **options)
    training.checkpointer.save(0, last_step=True)
    training.checkpointer.close()


def seed_and_train(manager: Any, folder: str) -> list[int]:
    """Return the steps at which a launch script begins that makes the seed each time, as after a restart."""
    begins = []
    for steps in (4, 6):
        save_seed(manager, folder, {})
        training = Training(manager, folder, seed=1, **FULL)
        training.checkpointer.load()
        begins.append(training.step)
        training.train(steps)
    return begins


@pytest.mark.parametrize("manager", [TitanManager, CheckpointManager])
def test_a_new_seed_does_not_restart_a_run(ranks: Ranks, tmp_path: Path, manager: Any) -> None:
    assert ranks(2, seed_and_train, manager, str(tmp_path)) == [[0, 4]] * 2


def go_back_and_stop(manager: Any, folder: str) -> int:
    Training(manager, folder, **FULL).train(6)
    training = Training(manager, folder, seed=1, **FULL)
    training.checkpointer.load(step=2)
    training.train(4)
    again = Training(manager, folder, seed=2, **FULL)
    again.checkpointer.load()
    again.checkpointer.close()
    return again.step


@pytest.mark.parametrize(("manager", "latest"), [(TitanManager, 6), (CheckpointManager, 4)])
def test_the_latest_checkpoint_is_that_of_the_highest_step_but_for_abandoned_ones(
    ranks: Ranks, tmp_path: Path, manager: Any, latest: int
) -> None:
    assert ranks(1, go_back_and_stop, manager, str(tmp_path)) == [latest]


def train_from(folder: str, load_step: int, steps: int) -> int:
    """Load a step, or the latest one, and train. Return the step that was loaded."""
    training = Training(CheckpointManager, folder, **FULL)
    training.checkpointer.load(step=load_step)
    start = training.step
    training.train(steps)
    return start


def test_a_run_that_went_back_goes_on_with_its_new_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    """Although those that it has left have higher steps. They stay."""
    assert ranks(1, train_from, str(tmp_path), -1, 8) == [0]
    assert ranks(1, train_from, str(tmp_path), 2, 4) == [2]
    assert ranks(1, train_from, str(tmp_path), -1, 6) == [4]
    infos = rankless.list_checkpoints(tmp_path / "checkpoint")
    assert [info.tag for info in infos if info.is_current] == ["step-2", "step-4", "step-6"]
    assert {info.tag for info in infos if not info.is_current} == {"step-4@1", "step-6@1", "step-8"}


def load_step(manager: Any, folder: str, step: int) -> dict[str, Any]:
    training = Training(manager, folder, seed=1, load_only=True)
    assert training.checkpointer.load(step=step)
    training.checkpointer.close()
    return training.everything() | {"step": training.step, "position": training.loader.position}


def continue_to_6(folder: str) -> list[str]:
    training = Training(CheckpointManager, folder, seed=1, **FULL)
    assert training.checkpointer.load()
    assert training.step == 4
    training.train(6)
    again = Training(CheckpointManager, folder, seed=2, **FULL)
    assert again.checkpointer.load()
    assert again.step == 6
    return sorted(path.name for path in Path(folder, "checkpoint").iterdir() if not path.name.startswith("."))


@pytest.mark.parametrize("step", [-1, 2])
def test_a_run_goes_on_in_the_folder_of_torchtitans_manager(ranks: Ranks, tmp_path: Path, step: int) -> None:
    ranks(2, save_with_titan, str(tmp_path))
    expected = ranks(2, load_step, TitanManager, str(tmp_path), step)
    assert_equal(ranks(2, load_step, CheckpointManager, str(tmp_path), step), expected)
    if step == -1:
        assert ranks(2, continue_to_6, str(tmp_path)) == [["step-2", "step-4", "step-6"]] * 2


def load_from(folder: str, options: dict[str, Any], step: int) -> None:
    Training(CheckpointManager, folder, **options).checkpointer.load(step=step)


def test_checkpoints_of_torchtitan_in_the_way_are_found_before_the_training(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_with_titan, str(tmp_path))
    for outcome in ranks.outcomes(2, load_from, str(tmp_path), {}, 2):
        assert isinstance(outcome, TagExistsError)
        assert f"{tmp_path}/checkpoint has step-4, which are not checkpoints of rankless" in str(outcome)
    for outcome in ranks.outcomes(2, load_from, str(tmp_path), {"load_only": True}, 6):
        assert isinstance(outcome, NoCheckpointError)
        assert "there are step-2, step-4" in str(outcome)


def test_a_run_of_exports_alone_is_not_begun_again(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, export_with, CheckpointManager, str(tmp_path), {"last_save_in_hf": True, "interval": 10})
    (outcome,) = ranks.outcomes(1, load_from, str(tmp_path), {}, -1)
    assert isinstance(outcome, NoCheckpointError)
    assert "has only exported weights (step-3)" in str(outcome)


def start_from_seed(manager: Any, folder: str) -> dict[str, torch.Tensor]:
    training = Training(manager, folder, seed=1)
    assert training.checkpointer.load()
    training.checkpointer.close()
    assert training.step == 0
    return training.weights()


def test_a_seed_is_no_export(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, save_seed, CheckpointManager, str(tmp_path / "a"), {})
    ranks(1, save_seed, CheckpointManager, str(tmp_path / "b"), {"last_save_in_hf": True})
    seeds = [ranks(1, start_from_seed, CheckpointManager, str(tmp_path / side)) for side in "ab"]
    assert_equal(seeds[1], seeds[0])


def test_a_seed_of_another_dtype_is_cast(ranks: Ranks, tmp_path: Path) -> None:
    options = {"export_dtype": "bfloat16"}
    loaded = []
    for manager in (CheckpointManager, TitanManager):
        ranks(2, save_seed, manager, str(tmp_path / manager.__module__), options)
        loaded.append(ranks(2, start_from_seed, manager, str(tmp_path / manager.__module__)))
    assert_equal(*loaded)


@pytest.mark.parametrize("manager", [CheckpointManager, TitanManager])
def test_initial_weights_of_another_dtype_are_cast(ranks: Ranks, tmp_path: Path, manager: Any) -> None:
    ranks(2, export_with, manager, str(tmp_path / "a"), {"export_dtype": "bfloat16"})
    path = str(tmp_path / "a/checkpoint/step-3")
    (actual,) = ranks(1, start_from, CheckpointManager, str(tmp_path / "b"), path, {})
    expected = {name: tensor.bfloat16().float() for name, tensor in ranks(2, weights_after, 3, "none")[0].items()}
    assert_equal({name: actual[name] for name in expected}, expected)
    if manager is TitanManager:
        assert_equal(ranks(1, start_from, TitanManager, str(tmp_path / "c"), path, {}), [actual])


def save_with_head(folder: str, removed: str) -> None:
    """Save weights with DCP: those of the model, one more, and without ``removed``."""
    weights = Training(CheckpointManager, folder).model.state_dict()
    weights.pop(removed, None)
    dcp.save({**weights, "value_head.weight": torch.ones(3)}, checkpoint_id=folder)


def export_with_head(folder: str, removed: str) -> None:
    """Export weights for Hugging Face with torchtitan: those of the model, one more, and without ``removed``."""
    Training(TitanManager, folder, last_save_in_hf=True).train(1)
    step = Path(folder, "checkpoint/step-1")
    (file,) = step.glob("*.safetensors")
    weights = load_file(file)
    weights.pop(removed, None)
    save_file({**weights, "value_head.weight": torch.ones(3)}, file)
    index = step / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*weights, "value_head.weight"], file.name)}))
    step.rename(Path(folder, "export"))


def start_with_head(manager: Any, folder: str, path: str, options: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = start_from(manager, folder, path, options)
    return [text for warning in caught if "value_head" in (text := str(warning.message))], state


@pytest.mark.parametrize(
    ("save", "part", "options", "removed"),
    [
        (save_with_head, "", {}, "norm.weight"),
        (export_with_head, "export", {"initial_load_in_hf": True}, "model.norm.weight"),
    ],
)
def test_initial_weights_may_have_more_tensors_but_not_fewer(
    ranks: Ranks, tmp_path: Path, save: Any, part: str, options: dict[str, Any], removed: str
) -> None:
    ranks(1, save, str(tmp_path / "more"), "")
    more = str(tmp_path / "more" / part)
    (_, expected), _ = ranks(2, start_with_head, TitanManager, str(tmp_path / "theirs"), more, options)
    (messages, actual), (no_messages, _) = ranks(
        2, start_with_head, CheckpointManager, str(tmp_path / "ours"), more, options
    )
    assert_equal(actual, expected)
    assert [message.endswith("were not loaded: value_head.weight") for message in messages] == [True]
    assert not no_messages  # only rank 0 warns
    ranks(1, save, str(tmp_path / "fewer"), removed)
    fewer = str(tmp_path / "fewer" / part)
    (outcome,) = ranks.outcomes(1, start_from, CheckpointManager, str(tmp_path / "none"), fewer, options)
    assert isinstance(outcome, MismatchError)
    assert f"missing in the checkpoint: {removed}" in str(outcome)


def save_over(folder: str, options: dict[str, Any]) -> bool:
    """Go on at step 2, and reach step 4 again. Return whether the run then resumes at step 4."""
    training = Training(CheckpointManager, folder, seed=1, **options)
    assert training.checkpointer.load(step=2)
    training.train(4)
    again = Training(CheckpointManager, folder, seed=1, **FULL)
    assert again.checkpointer.load()
    return again.step == 4


@pytest.mark.parametrize("options", [FULL, {**FULL, "async_save": False}])
def test_a_checkpoint_replaces_an_export_or_an_empty_folder(
    ranks: Ranks, tmp_path: Path, options: dict[str, Any]
) -> None:
    ranks(2, export_4, str(tmp_path))
    step = tmp_path / "checkpoint/step-4"
    assert [path.name for path in step.iterdir()] == ["model.safetensors"]
    assert ranks(2, save_over, str(tmp_path), options) == [True] * 2
    assert not (step / "model.safetensors").exists()
    for path in sorted(step.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    assert ranks(2, save_over, str(tmp_path), options) == [True] * 2


def export_4(folder: str) -> None:
    Training(CheckpointManager, folder, last_save_in_hf=True).train(4)


@pytest.mark.parametrize("name", ["README", "config.json", "model.safetensors"])
def test_other_folders_in_the_way_are_found_before_the_training(ranks: Ranks, tmp_path: Path, name: str) -> None:
    ranks(1, train_to_4, str(tmp_path))
    ranks(1, export_5, str(tmp_path))
    (tmp_path / "checkpoint/step-5" / name).write_bytes(b"my file")
    (outcome,) = ranks.outcomes(1, load_from, str(tmp_path), FULL, -1)
    assert isinstance(outcome, TagExistsError)
    assert "checkpoint has step-5" in str(outcome)


def export_5(folder: str) -> None:
    training = Training(CheckpointManager, folder, last_save_in_hf=True)
    training.checkpointer.load()
    training.train(5)


def export_over(folder: str) -> dict[str, torch.Tensor]:
    Training(CheckpointManager, folder, **FULL).train(4)
    training = Training(CheckpointManager, folder, seed=1, last_save_in_hf=True)
    training.checkpointer.load(step=2)
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.fill_(7.0)
    training.checkpointer.save(4, last_step=True)
    training.checkpointer.close()
    return training.weights()


def test_an_export_replaces_the_whole_checkpoint_of_its_step(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, export_over, str(tmp_path))
    step = tmp_path / "checkpoint/step-4"
    assert [path.name for path in step.iterdir()] == ["model.safetensors"]
    assert not list(tmp_path.glob("checkpoint/.step-*"))
    assert all((tensor == 7).all() for _, tensor in rankless.open(step).items())
    assert [info.tag for info in rankless.list_checkpoints(tmp_path / "checkpoint")] == ["step-2"]


def export_over_other_files(folder: str) -> None:
    training = Training(CheckpointManager, folder, last_save_in_hf=True)
    Path(folder, "checkpoint/step-3").mkdir(parents=True, exist_ok=True)
    Path(folder, "checkpoint/step-3/README").touch()
    with pytest.raises(TagExistsError, match="neither a checkpoint nor an export of rankless"):
        training.checkpointer.save(3, last_step=True)


def test_an_export_leaves_other_files_as_they_are(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, export_over_other_files, str(tmp_path))
    assert [path.name for path in (tmp_path / "checkpoint/step-3").iterdir()] == ["README"]


def load_blank(manager: Any, folder: str) -> bool:
    return bool(Training(manager, folder, initial_load_path="").checkpointer.load())


@pytest.mark.parametrize("manager", [TitanManager, CheckpointManager])
def test_an_empty_initial_path_is_none(ranks: Ranks, tmp_path: Path, manager: Any) -> None:
    assert ranks(1, load_blank, manager, str(tmp_path)) == [False]


def in_store(endpoint: str, function: Any, *arguments: Any) -> Any:
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "r"}
    with mock.patch.dict(os.environ, {"AWS_ENDPOINT_URL": endpoint, **keys}):
        return function(*arguments)


def test_a_run_in_an_object_store_resumes(ranks: Ranks, tmp_path: Path) -> None:
    """As one on a disk; ``dump_folder`` stays a local folder."""
    expected = ranks(2, train_uninterrupted, str(tmp_path / "one"))
    fake = FakeS3()
    with fake.served() as endpoint:
        given = {"folder": f"s3://{BUCKET}/run", "keep_latest_k": 2}
        ranks(2, in_store, endpoint, train_to_4_with, str(tmp_path / "two"), given)
        assert_equal(ranks(2, in_store, endpoint, resume, str(tmp_path / "two"), given, True), expected)
        run = fake.store_at(endpoint).path(f"{BUCKET}/run")
        assert [info.tag for info in rankless.list_checkpoints(run)] == ["step-4", "step-6"]
    assert not (tmp_path / "two").exists()


def train_to_4_with(folder: str, options: dict[str, Any]) -> None:
    Training(CheckpointManager, folder, **FULL, **options).train(4)
