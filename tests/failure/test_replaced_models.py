"""Tests models without checksums that another process replaces while they are read: never a mixture, without a word."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import rankless
from rankless.errors import CheckpointReplacedError
from rankless.formats.huggingface import HuggingFaceReader
from rankless.observe.events import Progress
from tests.helpers.fake_s3 import BUCKET, FakeS3
from tests.helpers.pairwise import each_value, first_of

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


def state(value: float) -> dict[str, torch.Tensor]:
    """Another version has the tensors in another order in the file: a wrong one is seen by its values."""
    tensors = {name: torch.full((64, 33), value * 10 + number) for number, name in enumerate(NAMES)}
    return tensors if value == 1.0 else dict(reversed(tensors.items()))


def write_old_torch_file(folder: Path, value: float) -> None:
    torch.save(state(value), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def write_new_torch_file(folder: Path, value: float) -> None:
    torch.save(state(value), folder / "pytorch_model.bin")


def write_shards(folder: Path, value: float) -> None:
    tensors = state(value)
    shard_of = {name: f"pytorch_model-0000{1 + number % 2}-of-00002.bin" for number, name in enumerate(NAMES)}
    for shard in set(shard_of.values()):
        torch.save({name: tensor for name, tensor in tensors.items() if shard_of[name] == shard}, folder / shard)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))


def write_ordered_safetensors(folder: Path, value: float) -> None:
    save_file(state(value), folder / "model.safetensors")


def write_distributed(folder: Path, value: float) -> None:
    dcp.save({"model": state(value)}, checkpoint_id=folder, no_dist=True)


LAYOUTS = {
    "torch": write_new_torch_file,
    "torch, the old format": write_old_torch_file,
    "torch, two shards": write_shards,
    "safetensors": write_ordered_safetensors,
    "DCP": write_distributed,
}


def replace_files(model: Path, other: Path) -> None:
    for file in other.iterdir():
        shutil.copy(file, model / "new")
        (model / "new").replace(model / file.name)


def rewrite_files(model: Path, other: Path) -> None:
    """As ``rsync --inplace --times`` from a mirror does it."""
    for file in other.iterdir():
        times = (model / file.name).stat()
        (model / file.name).write_bytes(file.read_bytes())
        os.utime(model / file.name, ns=(times.st_atime_ns, times.st_mtime_ns))


def switch_link(model: Path, other: Path) -> None:
    (model.parent / "link").symlink_to(other)
    (model.parent / "link").replace(model)


class ChangeAtCall:
    """Does something at one of the calls to the system by which files are opened and read."""

    def __init__(self, change: Callable[[], None], call: int) -> None:
        self._change, self._call = change, call
        self.calls = 0

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        for name in ("open", "preadv", "scandir", "fstat"):
            self._stack.enter_context(mock.patch(f"os.{name}", self._wrap(getattr(os, name))))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self._call:
                self._stack.close()
                self._change()
            return function(*args, **options)

        return wrapped


def load(model: Path) -> str:
    tensors = state(0.0)
    try:
        rankless.load_model(tensors, model)
    except CheckpointReplacedError:
        return "replaced"
    values = {(value - number) / 10 for number, name in enumerate(NAMES) for value in tensors[name].unique().tolist()}
    return f"{sorted(values)}"


@pytest.mark.filterwarnings("ignore")
@each_value({"layout": LAYOUTS, "change": [replace_files, rewrite_files, switch_link]})
def test_at_no_moment_of_a_load_is_it_a_mixture(
    change: Callable[[Path, Path], None], layout: str, tmp_path: Path
) -> None:
    """Also if the other version has the same sizes and times, or the tensors at other places."""
    outcomes: list[str] = []
    for call in itertools.count(1):
        base = tmp_path / str(call)
        for version in (1.0, 2.0):
            (base / f"v{version}").mkdir(parents=True)
            LAYOUTS[layout](base / f"v{version}", version)
        model = base / "model"
        if change is switch_link:
            model.symlink_to(base / "v1.0")
        else:
            (base / "v1.0").rename(model)
        with ChangeAtCall(partial(change, model, base / "v2.0"), call) as changing:
            outcomes.append(load(model))
        shutil.rmtree(base)
        if changing.calls < call:
            break
    assert set(outcomes) <= {"[1.0]", "[2.0]", "replaced"}
    assert (outcomes[0], outcomes[-1]) == ("[2.0]", "[1.0]")
    assert ("replaced" in outcomes) == (change is not switch_link)


def upload(fake: FakeS3, folder: Path) -> None:
    store = fake.store_at("http://fake")
    for file in folder.iterdir():
        store.replace_small(store.path(f"{BUCKET}/model/{file.name}"), file.read_bytes())


@pytest.mark.filterwarnings("ignore")
@first_of(1, "layout", ["torch", "DCP", "safetensors"])
def test_at_no_request_of_a_load_is_it_a_mixture(layout: str, tmp_path: Path) -> None:
    for version in (1.0, 2.0):
        (tmp_path / f"v{version}").mkdir()
        LAYOUTS[layout](tmp_path / f"v{version}", version)
    outcomes: list[str] = []
    for number in itertools.count(1):
        fake = FakeS3()
        with fake.connected():
            upload(fake, tmp_path / "v1.0")
            requests = itertools.count(1)

            def change(_: object, stage: str) -> None:
                if stage == "before" and next(requests) == number:  # noqa: B023 - it ends with this pass
                    upload(fake, tmp_path / "v2.0")  # noqa: B023

            fake.on_request = change  # type: ignore[assignment]
            outcomes.append(load(fake.store_at("http://fake").path(f"{BUCKET}/model")))
        if next(requests) <= number:
            break
    assert set(outcomes) <= {"[1.0]", "[2.0]", "replaced"}
    assert (outcomes[0], outcomes[-1]) == ("[2.0]", "[1.0]")


def test_an_index_that_is_replaced_before_it_is_verified_is_not_called_corrupt(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    rankless.save_model(make_model(1.0), model, shard=True, max_shard_size=20_000)
    rankless.save_model(make_model(2.0), other, shard=True, max_shard_size=40_000)
    original = HuggingFaceReader.check_files

    def replace_first(reader: HuggingFaceReader) -> None:
        if other.exists():
            model.rename(tmp_path / "old")
            other.rename(model)
        original(reader)

    loaded = make_model(9.0)
    with mock.patch.object(HuggingFaceReader, "check_files", replace_first), pytest.raises(CheckpointReplacedError):
        rankless.load_model(loaded, model)
    assert value_of(loaded) == {9.0}
