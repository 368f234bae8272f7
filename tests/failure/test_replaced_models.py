"""Tests models without checksums that another process replaces while they are read: never a mixture, without a word."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import rankless
from rankless.errors import CheckpointReplacedError
from rankless.observe.events import Progress
from tests.helpers.fake_s3 import BUCKET, FakeS3

NAMES = [f"layer{n}" for n in range(4)]


def make_model(value: float) -> nn.Module:
    model = nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in NAMES})
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def value_of(model: nn.Module) -> set[float]:
    return {value for parameter in model.parameters() for value in parameter.detach().unique().tolist()}


def write_safetensors(path: Path, value: float) -> None:
    path.mkdir(exist_ok=True)
    save_file(make_model(value).state_dict(), path / "new")
    (path / "new").replace(path / "model.safetensors")


def write_torch_file(path: Path, value: float) -> None:
    torch.save(make_model(value).state_dict(), f"{path}.new")
    Path(f"{path}.new").replace(path)


def write_in_place(path: Path, value: float) -> None:
    path.mkdir(exist_ok=True)
    save_file(make_model(value).state_dict(), path / "model.safetensors")
    os.utime(path / "model.safetensors", (value, value))  # as if a second had passed


def write_dcp(path: Path, value: float) -> None:
    shutil.rmtree(path, ignore_errors=True)
    dcp.save({"model": make_model(value).state_dict()}, checkpoint_id=path, no_dist=True)


FORMATS = {
    "safetensors": write_safetensors,
    "safetensors in place": write_in_place,
    "torch": write_torch_file,
    "DCP": write_dcp,
}


@pytest.fixture(params=FORMATS)
def write(request: pytest.FixtureRequest) -> Callable[[Path, float], None]:
    return FORMATS[request.param]


class ReplaceOnce:
    """Replaces the model at the first event about its bytes."""

    def __init__(self, write: Callable[[Path, float], None], path: Path) -> None:
        self._write, self._path = write, path
        self.has_replaced = False

    def __call__(self, event: object) -> None:
        if isinstance(event, Progress) and not self.has_replaced:
            self.has_replaced = True
            self._write(self._path, 2.0)


@pytest.mark.filterwarnings("ignore")
def test_a_load_fails(write: Callable[[Path, float], None], tmp_path: Path) -> None:
    write(tmp_path / "model", 1.0)
    model, replace = make_model(0.0), ReplaceOnce(write, tmp_path / "model")
    with pytest.raises(CheckpointReplacedError, match="was replaced or removed while it was read"):
        rankless.restore(tmp_path / "model", model=model, on_event=replace)
    rankless.restore(tmp_path / "model", model=model)
    assert value_of(model) == {2.0}


@pytest.mark.filterwarnings("ignore")
def test_a_conversion_fails(write: Callable[[Path, float], None], tmp_path: Path) -> None:
    write(tmp_path / "model", 1.0)
    replace = ReplaceOnce(write, tmp_path / "model")
    with pytest.raises(CheckpointReplacedError, match="was replaced or removed while it was read"):
        rankless.convert(tmp_path / "model", tmp_path / "out", to="native", on_event=replace)
    assert replace.has_replaced
    assert not (tmp_path / "out").exists()


def load_into(model: nn.Module, weights: Any, replace: Callable[[], None]) -> None:
    parameters = dict(model.named_parameters())
    for number, (name, tensor) in enumerate(weights):
        parameters[name].data.copy_(tensor)
        if number == 1:
            replace()


@pytest.mark.filterwarnings("ignore")
def test_weights_for_an_engine_are_refused(write: Callable[[Path, float], None], tmp_path: Path) -> None:
    write(tmp_path / "model", 1.0)
    with (
        pytest.raises(CheckpointReplacedError, match="was replaced or removed while it was read"),
        rankless.open_weights(tmp_path / "model") as weights,
    ):
        load_into(make_model(0.0), weights, lambda: write(tmp_path / "model", 2.0))


def test_in_a_bucket_too(tmp_path: Path) -> None:
    fake = FakeS3()
    with fake.connected():
        path = fake.store_at("http://fake").path(f"{BUCKET}/model/model.safetensors")

        def upload(value: float) -> None:
            write_safetensors(tmp_path, value)
            path.store.replace_small(path, (tmp_path / "model.safetensors").read_bytes())

        upload(1.0)
        with pytest.raises(CheckpointReplacedError), rankless.open_weights(path.parent) as weights:
            load_into(make_model(0.0), weights, lambda: upload(2.0))
