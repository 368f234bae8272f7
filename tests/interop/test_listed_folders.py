"""Tests that a folder that a framework lists has what it has without rankless: checkpoints, and nothing else.

The oracle is the framework itself, which trains into a folder of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from accelerate.utils import ProjectConfiguration
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

import rankless
import rankless.accelerate
import rankless.lightning as ours
from rankless.run.journal import read_journal
from rankless.run.stored_history import read_history
from tests.helpers.lightning_trainer import Module, make_data
from tests.helpers.pool import Ranks
from tests.helpers.trainer_runs import Numbers, launch, make_arguments, make_model


def all_names(folder: Path) -> list[str]:
    """Return the names in a folder as a framework sees them, with hidden ones."""
    return sorted(path.name for path in folder.iterdir())


def assert_has_records(run: Path, saves: int) -> None:
    """The reports have each save, and the history has its job."""
    assert [entry.kind for entry in read_journal(run)].count("saved") == saves
    assert read_history(run).number == 1


class TestLightning:
    @staticmethod
    def fit(folder: Path, strategy: Any, steps: int = 3, **options: Any) -> Trainer:
        callback = ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=1, save_last=True)
        trainer = Trainer(
            accelerator="cpu",
            strategy=strategy,
            max_steps=steps,
            callbacks=[callback],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(), make_data(), **options)
        return trainer

    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_a_folder_has_the_names_that_lightnings_strategy_leaves(self, tmp_path: Path, asynchronous: bool) -> None:
        self.fit(tmp_path / "theirs", SingleDeviceStrategy("cpu"))
        self.fit(tmp_path / "ours/ckpts", ours.SingleDeviceStrategy("cpu", async_save=asynchronous))
        assert all_names(tmp_path / "ours/ckpts") == all_names(tmp_path / "theirs")
        assert all_names(tmp_path / "ours") == [".ckpts.rankless", "ckpts"]
        assert_has_records(tmp_path / "ours/ckpts", 6)

    def test_after_a_rollback_too(self, tmp_path: Path) -> None:
        self.fit(tmp_path / "ckpts", ours.SingleDeviceStrategy("cpu"))
        older = tmp_path / "ckpts/epoch=0-step=1.ckpt"
        with pytest.warns(UserWarning, match="goes back to"):
            self.fit(tmp_path / "ckpts", ours.SingleDeviceStrategy("cpu"), 4, ckpt_path=str(older))
        assert not [name for name in all_names(tmp_path / "ckpts") if name.startswith(".")]
        latest = rankless.open(tmp_path / "ckpts")
        assert latest.values["user_content"]["global_step"] == 4
        assert read_history(tmp_path / "ckpts").number == 2


class TestModules:
    """``load_from_checkpoint`` of a class whose base is rankless's module opens what rankless's strategy writes."""

    class Net(ours.LightningModule):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = nn.Linear(4, width)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Data(ours.LightningDataModule):
        def __init__(self, size: int = 8) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return make_data()

    @pytest.mark.parametrize("kind", ["native", "lightning", "theirs"])
    def test_a_checkpoint_of_each_kind_opens(self, tmp_path: Path, kind: str) -> None:
        strategy = (
            SingleDeviceStrategy("cpu")
            if kind == "theirs"
            else ours.SingleDeviceStrategy("cpu", checkpoint_format=kind)
        )
        module = self.Net(5)
        trainer = Trainer(
            accelerator="cpu",
            strategy=strategy,
            max_steps=2,
            callbacks=[ModelCheckpoint(tmp_path, filename="a")],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, datamodule=self.Data(7))
        path = trainer.checkpoint_callback.best_model_path
        loaded = self.Net.load_from_checkpoint(path)
        assert type(loaded) is self.Net
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), module.parameters(), strict=True))
        assert self.Net.load_from_checkpoint(path, "cpu", strict=True).hparams == {"width": 5}
        assert self.Data.load_from_checkpoint(path).hparams == {"size": 7}
        with pytest.raises(RuntimeError, match="size mismatch"):
            self.Net.load_from_checkpoint(path, width=6)

    def test_an_address_that_only_lightning_knows_is_left_to_it(self) -> None:
        with pytest.raises(OSError, match=r"refused|urlopen"):
            self.Net.load_from_checkpoint("http://127.0.0.1:1/a.ckpt")

    def test_it_is_lightnings_module(self) -> None:
        assert issubclass(self.Net, LightningModule)


def save_with_trainer(folder: str) -> list[list[str]]:
    """Return the names in the outputs of transformers' own Trainer and of rankless's."""
    names = []
    for kind, trainer in {"theirs": transformers.Trainer, "ours": rankless.transformers.Trainer}.items():
        output = Path(folder) / kind / "output"
        with launch():
            arguments = make_arguments(output, 1, 4, save_steps=2)
            trainer(make_model(), arguments, train_dataset=Numbers()).train()
        names.append(all_names(output))
    return names


def test_the_output_of_the_trainer_has_the_names_that_transformers_leaves(ranks: Ranks, tmp_path: Path) -> None:
    theirs, mine = ranks(1, save_with_trainer, str(tmp_path))[0]
    assert mine == theirs
    assert_has_records(tmp_path / "ours/output", 2)


def save_with_accelerate(folder: str) -> list[str]:
    """Save twice with rankless, then three times with Accelerate itself, into the same project."""
    with launch():
        for kind, first in ((rankless.accelerate.Accelerator, 0), (accelerate.Accelerator, 2)):
            project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2, iteration=first)
            accelerator = kind(cpu=True, project_config=project)
            accelerator.prepare(nn.Linear(2, 2))
            for _ in range(2 + (first > 0)):
                accelerator.save_state()
    return all_names(Path(folder) / "checkpoints")


def test_accelerate_itself_goes_on_in_a_project(ranks: Ranks, tmp_path: Path) -> None:
    """It takes each name in the folder for a checkpoint with a number."""
    assert ranks(1, save_with_accelerate, str(tmp_path))[0] == ["checkpoint_3", "checkpoint_4"]
