"""Tests of ``rankless.accelerate.Accelerator``: runs resume as Accelerate's own, and on another number of ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedType,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rankless
from rankless.accelerate import Accelerator
from rankless.errors import InvalidArgumentError, MismatchError, NoCheckpointError, StorageError
from tests.helpers.failing_saves import one_failing_save
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import FakeS3
from tests.helpers.pool import Ranks
from tests.helpers.run_directories import list_names
from tests.helpers.stateful import Counter
from tests.helpers.trainer_runs import launch

_SAMPLES, _BATCH = 48, 12

#: Credentials for a store of the tests.
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "r"}


def prepare(accelerator: Accelerator, ranks: int = 1) -> dict[str, Any]:
    """Return prepared objects, all of which have a state: the batch of all ranks together has always one size."""
    torch.manual_seed(0)
    data = TensorDataset(torch.arange(float(_SAMPLES)).outer(torch.ones(4)) / _SAMPLES)
    loader = DataLoader(data, batch_size=_BATCH // ranks, shuffle=True)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # Accelerate steps a scheduler once for each rank, so a rate that changes would depend on their number.
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1.0)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    return {"model": model, "optimizer": optimizer, "loader": loader, "scheduler": scheduler, "counter": counter}


def train(path: str, epochs: int, resume: bool = False, options: dict[str, Any] | None = None) -> list[float]:
    """Train whole epochs, and save each one under an automatic name. Return the weights."""
    with launch():
        project = ProjectConfiguration(path, automatic_checkpoint_naming=True, total_limit=2)
        accelerator = Accelerator(
            cpu=True,
            project_config=project,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
            **(options or {}),
        )
        parts = prepare(accelerator, dist.get_world_size())
        if resume:
            accelerator.load_state()
        while parts["counter"].count < epochs:
            for (batch,) in parts["loader"]:
                accelerator.backward(parts["model"](batch).square().mean())
                parts["optimizer"].step()
                parts["scheduler"].step()
                parts["optimizer"].zero_grad()
            parts["counter"].count += 1
            saved = accelerator.save_state()
        rankless.finalize()  # end_training would also destroy the group of these ranks
        assert saved == f"{path}/checkpoints/checkpoint_{epochs - 1}"
        weights = rankless.open(saved)
        return [number for name, tensor in weights.items() if "model/" in name for number in tensor.flatten().tolist()]


@pytest.mark.parametrize("options", [{}, {"async_save": True}], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 1), (1, 3)])
def test_a_run_resumes_on_any_number_of_ranks(
    ranks: Ranks, tmp_path: Path, before: int, after: int, options: dict[str, Any]
) -> None:
    whole = ranks(1, train, str(tmp_path / "whole"), 4)[0]
    ranks(before, train, str(tmp_path / "run"), 2, False, options)
    resumed = ranks(after, train, str(tmp_path / "run"), 4, True, options)[0]
    torch.testing.assert_close(torch.tensor(resumed), torch.tensor(whole))
    kept = [info.tag for info in rankless.list_checkpoints(tmp_path / "run/checkpoints")]
    assert kept == ["checkpoint_2", "checkpoint_3"]


def train_fsdp2(path: str, load: bool) -> tuple[list[float], int]:
    with launch():
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP", cpu_offload=False)
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # Accelerate shards only there
        accelerator = Accelerator(fsdp_plugin=plugin)
        torch.manual_seed(dist.get_rank() if load else 0)
        model = nn.Linear(5, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
        if load:
            accelerator.load_state(f"{path}/one")
        else:
            accelerator.backward(model(torch.ones(2, 5)).square().mean())
            optimizer.step()
            accelerator.save_state(f"{path}/one")
        steps = [int(state["step"]) for state in optimizer.state.values()]
        return [tensor.full_tensor().flatten().tolist() for tensor in model.state_dict().values()], max(steps)


def test_sharded_models_are_loaded_on_other_ranks(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks(2, train_fsdp2, str(tmp_path), False)
    assert ranks(3, train_fsdp2, str(tmp_path), True) == [saved[0]] * 3


def on_one_rank(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def _forget_state() -> Any:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_several_models_optimizers_and_schedulers(tmp_path: Path) -> None:
    models = [nn.Linear(2, 2), nn.Linear(3, 3)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in optimizers]
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(*models, *optimizers, *schedulers)
    for model, optimizer in zip(prepared[:2], prepared[2:4], strict=True):
        accelerator.backward(model(torch.ones(1, model.in_features)).sum())
        optimizer.step()
    accelerator.save_state(str(tmp_path / "one"))
    assert {name.split("/")[0] + "/" + name.split("/")[1] for name in rankless.open(tmp_path / "one")} == {
        *("model/0", "model/1", "optimizer/0", "optimizer/1"),
    }
    before = [model.weight.detach().clone() for model in models]
    for model in models:
        nn.init.zeros_(model.weight)
    accelerator.load_state(str(tmp_path / "one"))
    assert all(torch.equal(model.weight, weight) for model, weight in zip(models, before, strict=True))


def test_a_directory_that_exists_is_replaced(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    for value in (1.0, 2.0):
        nn.init.constant_(model.weight, value)
        accelerator.save_state(str(tmp_path / "one"))
    assert rankless.open(tmp_path / "one")["model/weight"].unique().item() == 2.0
    assert list_names(tmp_path) == ["one"]


def test_the_position_in_a_stateful_data_loader(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")

    def read(resume: bool) -> list[float]:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2))
        if resume:
            accelerator.load_state(str(tmp_path / "one"))
            return [value for (batch,) in loader for value in batch.tolist()]
        batches = iter(loader)
        next(batches)
        accelerator.save_state(str(tmp_path / "one"))
        return []

    on_one_rank(read, False)
    assert read(True) == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def test_the_end_of_a_training_waits_for_its_saves(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, async_save=True)
    accelerator.prepare(nn.Linear(200, 200))
    accelerator.save_state(str(tmp_path / "one"))
    accelerator.end_training()
    assert (tmp_path / "one/manifest.json").is_file()


def test_a_training_ends_also_if_a_save_has_failed(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, async_save=True)
    accelerator.prepare(nn.Linear(2, 2))
    with one_failing_save(1), mock.patch("accelerate.Accelerator.end_training") as end:
        accelerator.save_state(str(tmp_path / "one"))
        with pytest.raises(StorageError, match="an error for a moment"):
            accelerator.end_training()
    assert end.called


def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    with pytest.raises(InvalidArgumentError, match="pass output_dir"):
        accelerator.save_state()
    with pytest.raises(InvalidArgumentError, match="pass input_dir"):
        accelerator.load_state()
    with pytest.raises(NoCheckpointError):
        accelerator.load_state(str(tmp_path / "none"))
    with pytest.raises(InvalidArgumentError, match="max_shard_size"):
        accelerator.save_state(str(tmp_path / "one"), max_shard_size="1GB")
    hook = accelerator.register_save_state_pre_hook(lambda *_: None)
    with pytest.raises(InvalidArgumentError, match="register_save_state_pre_hook"):
        accelerator.save_state(str(tmp_path / "one"))
    hook.remove()
    accelerator.save_state(str(tmp_path / "one"))
    accelerator.register_for_checkpointing(Counter())
    with pytest.raises(MismatchError, match="custom_0"):
        accelerator.load_state(str(tmp_path / "one"))
    accelerator.load_state(str(tmp_path / "one"), allow_missing=["stateful/custom_0"])
    accelerator.register_load_state_pre_hook(lambda *_: None)
    with pytest.raises(InvalidArgumentError, match="register_load_state_pre_hook"):
        accelerator.load_state(str(tmp_path / "one"))
    with pytest.raises(InvalidArgumentError, match="frozen"):
        Accelerator(cpu=True, frozen="aside")


def test_automatic_names_need_a_project_and_a_checkpoint(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(automatic_checkpoint_naming=True))
    with pytest.raises(InvalidArgumentError, match="project_dir"):
        accelerator.save_state()
    named = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=named)
    with pytest.raises(NoCheckpointError, match="checkpoints"):
        accelerator.load_state()


def train_in_store(endpoint: str, epochs: int, resume: bool) -> list[float]:
    with mock.patch.dict(os.environ, {"AWS_ENDPOINT_URL": endpoint, **KEYS}):
        return train(f"s3://{BUCKET}/run", epochs, resume)


def test_a_run_resumes_from_an_object_store(ranks: Ranks, tmp_path: Path) -> None:
    whole = ranks(1, train, str(tmp_path / "whole"), 3)[0]
    fake = FakeS3()
    with fake.served() as endpoint:
        ranks(2, train_in_store, endpoint, 2, False)
        resumed = ranks(1, train_in_store, endpoint, 3, True)[0]
        run = fake.store_at(endpoint).path(f"{BUCKET}/run/checkpoints")
        assert [info.tag for info in rankless.list_checkpoints(run)] == ["checkpoint_1", "checkpoint_2"]
    torch.testing.assert_close(torch.tensor(resumed), torch.tensor(whole))


def save_to_url(endpoint: str, folder: str) -> int:
    with launch(), mock.patch.dict(os.environ, {"AWS_ENDPOINT_URL": endpoint, **KEYS}):
        accelerator, url = Accelerator(cpu=True, project_dir=folder), f"s3://{BUCKET}/run/one"
        parts = prepare(accelerator)
        parts["counter"].count = 7
        assert accelerator.save_state(url) == url
        parts["counter"].count = 0
        accelerator.load_state(url)
        count: int = parts["counter"].count
        return count


def test_a_state_is_saved_to_a_url_and_loaded(ranks: Ranks, tmp_path: Path) -> None:
    fake = FakeS3()
    with fake.served() as endpoint:
        assert ranks(1, save_to_url, endpoint, str(tmp_path)) == [7]
    assert not [*tmp_path.iterdir()]
