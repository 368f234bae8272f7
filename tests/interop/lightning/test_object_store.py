"""Lightning saves into an object store, and resumes from it, as it does with a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import rankless
import rankless.lightning as ours
from rankless.errors import InvalidArgumentError
from rankless.lightning.fabric import SingleDeviceStrategy as FabricStrategy
from rankless.storage.s3.s3_store import S3
from tests.helpers.equality import equal_bits
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import FakeS3
from tests.helpers.lightning_trainer import Module, fit_module, make_data, make_trainer, read_state, set_environment
from tests.helpers.pool import Ranks

URL = f"s3://{BUCKET}/run"


def settings(endpoint: str) -> dict[str, str]:
    """The environment of AWS's tools."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_REGION": "r",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }


@pytest.fixture
def endpoint() -> Iterator[str]:
    with FakeS3().served() as url, mock.patch.dict(os.environ, settings(url)):
        yield url


def fit(
    endpoint: str, folder: str, layout: str, steps: int, ckpt_path: str | None = None, save_last: bool | None = None
) -> dict[str, Any]:
    """Train to a step on a rank of the pool; return what the callback knows and the whole state."""
    with mock.patch.dict(os.environ, settings(endpoint)):
        callback = ours.ModelCheckpoint(URL, every_n_train_steps=2, save_top_k=-1, save_last=save_last)
        with set_environment():
            run = make_trainer(folder, layout, steps, [callback])
            module = Module(layout="fsdp2" if layout == "fsdp2" else "plain")
            run.fit(module, make_data(), ckpt_path=ckpt_path)
            run.save_checkpoint(f"{URL}/end.ckpt")
        state = read_state(f"{URL}/end.ckpt")
    return {"best": callback.best_model_path, "last": callback.last_model_path, "state": state}


def tags() -> list[str]:
    return [info.tag for info in rankless.list_checkpoints(URL)]


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_a_run_resumes_from_the_last_checkpoint_on_another_number_of_ranks(
    ranks: Ranks, endpoint: str, tmp_path: Path, layout: str
) -> None:
    whole = ranks(1, fit_module, str(tmp_path / "whole"), "plain", 6)[0]
    ranks(2, fit, endpoint, str(tmp_path / "a"), layout, 4, None, True)
    assert {"last.ckpt", "end.ckpt"} < {*tags()}
    resumed = ranks(1, fit, endpoint, str(tmp_path / "b"), "plain", 6, "last", True)[0]
    assert resumed["last"] == f"rankless+{URL}/last.ckpt"
    for name, tensor in whole.items():
        torch.testing.assert_close(resumed["state"][name], tensor, rtol=1e-4, atol=1e-6)


def test_a_checkpoint_is_named_by_its_url(ranks: Ranks, endpoint: str, tmp_path: Path) -> None:
    whole = ranks(1, fit_module, str(tmp_path / "whole"), "plain", 6)[0]
    ranks(1, fit, endpoint, str(tmp_path / "a"), "plain", 4)
    resumed = ranks(1, fit, endpoint, str(tmp_path / "b"), "plain", 6, f"{URL}/end.ckpt")[0]
    assert all(equal_bits(resumed["state"][name], tensor) for name, tensor in whole.items())


def train(steps: int, folder: Path, strategy: Any, callback: Any, ckpt_path: str | None = None) -> Module:
    module = Module()
    make_single(steps, folder, strategy, [callback]).fit(module, make_data(), ckpt_path=ckpt_path)
    return module


def make_single(steps: int, folder: Path, strategy: Any, callbacks: list[Any]) -> Any:
    from lightning.pytorch import Trainer

    return Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_steps=steps,
        default_root_dir=folder,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def native(**options: Any) -> Any:
    return ours.SingleDeviceStrategy(device=torch.device("cpu"), **options)


def test_the_best_checkpoints_are_kept(endpoint: str, tmp_path: Path) -> None:
    callback = ours.ModelCheckpoint(URL, every_n_train_steps=1, monitor="loss", save_top_k=2)
    trained = train(6, tmp_path, native(async_save=True), callback)
    assert len(tags()) == 2
    best = ours.load_from_checkpoint(Module, callback.best_model_path)
    assert best.state_dict().keys() == trained.state_dict().keys()
    assert rankless.open(callback.best_model_path).metrics["loss"] == pytest.approx(float(callback.best_model_score))


def test_a_name_that_is_taken_gets_a_version(endpoint: str, tmp_path: Path) -> None:
    """As with folders: a second run does not replace the checkpoints of the first one."""
    for _ in range(2):
        train(2, tmp_path, native(), ours.ModelCheckpoint(URL, filename="a", every_n_train_steps=2))
    assert tags() == ["a.ckpt", "a-v1.ckpt"]


def test_with_no_last_checkpoint_training_begins(endpoint: str, tmp_path: Path) -> None:
    callback = ours.ModelCheckpoint(URL, save_last=True, every_n_train_steps=2)
    with pytest.warns(UserWarning, match="no last checkpoint"):
        train(2, tmp_path, native(), callback, "last")
    assert "last.ckpt" in tags()


def test_lightnings_own_callback_and_format_are_refused_before_training(endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="object stores are not supported"):
        train(2, tmp_path, native(checkpoint_format="lightning"), ours.ModelCheckpoint(URL))
    with pytest.raises(InvalidArgumentError, match=r"rankless\.lightning\.ModelCheckpoint"):
        native()._check_folder(URL)  # with s3fs, Lightning's own callback has this folder
    with pytest.raises(InvalidArgumentError, match="pass s3://"):
        ours.ModelCheckpoint(S3(endpoint).path(f"{BUCKET}/run"))
    with pytest.raises(InvalidArgumentError, match="no store that rankless knows"):
        ours.ModelCheckpoint("memory://run")


def test_a_folder_works_as_with_lightnings_callback(tmp_path: Path) -> None:
    train(4, tmp_path, native(), ours.ModelCheckpoint(tmp_path / "run", every_n_train_steps=2, save_last=True))
    callback = ours.ModelCheckpoint(tmp_path / "run", every_n_train_steps=2, save_last=True)
    train(6, tmp_path, native(), callback, "last")
    assert callback.last_model_path == str(tmp_path / "run/last.ckpt")
    assert rankless.open(tmp_path / "run/last.ckpt").step == 6


def test_fabric_saves_and_loads(endpoint: str) -> None:
    strategy, model = FabricStrategy(torch.device("cpu")), torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    strategy.save_checkpoint(f"{URL}/fabric", {"net": model, "opt": optimizer, "epoch": 3})
    other = torch.nn.Linear(3, 2)
    state: dict[str, Any] = {"net": other, "opt": torch.optim.AdamW(other.parameters()), "epoch": 0}
    strategy.load_checkpoint(f"{URL}/fabric", state)
    assert state["epoch"] == 3
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    assert state["opt"].state[other.weight]["step"] == 1
