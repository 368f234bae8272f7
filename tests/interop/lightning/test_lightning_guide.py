"""Tests the examples of Lightning's guide to distributed checkpoints with rankless's strategy.

They are as written there, except for the device (a CPU), the data (generated, because the guide downloads it) and, for
a printed parameter, the layer (the demo model has two).
https://lightning.ai/docs/pytorch/stable/common/checkpointing_expert.html
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812 - as in the guide
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import strategies
from lightning.pytorch.demos import LightningTransformer
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader, TensorDataset

import rankless
from rankless.lightning import FSDPStrategy
from tests.helpers.lightning_runs import CpuFSDP
from tests.helpers.lightning_trainer import Module, fit_module, make_data, set_environment
from tests.helpers.pool import Ranks

pytestmark = pytest.mark.filterwarnings("ignore")

SAVED = "lightning_logs/version_0/checkpoints/epoch=0-step=3.ckpt"
LAYER = "model.transformer.decoder.layers.1.norm1.weight"


class Transformer(LightningTransformer):
    """The guide's model, with generated data."""

    def prepare_data(self) -> None:
        """Nothing is downloaded."""

    def train_dataloader(self) -> Any:
        tokens = torch.randint(0, 33278, (24, 2, 5), generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(tokens[:, 0], tokens[:, 1]))


def train(folder: str, max_steps: int, checkpoint_format: str, ckpt_path: str | None = None) -> int:
    with set_environment():
        model = Transformer()
        strategy = FSDPStrategy(state_dict_type="sharded", checkpoint_format=checkpoint_format)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=strategy,
            max_steps=max_steps,
            default_root_dir=folder,
            plugins=[LightningEnvironment()],
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, ckpt_path=ckpt_path)
    return trainer.global_step


@pytest.mark.parametrize("checkpoint_format", ["lightning", "native"])
def test_save_load_and_convert(ranks: Ranks, tmp_path: Path, checkpoint_format: str) -> None:
    assert ranks(2, train, str(tmp_path), 3, checkpoint_format) == [3, 3]
    saved = tmp_path / SAVED
    names = sorted(path.name for path in saved.iterdir())
    if checkpoint_format == "lightning":
        assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]
    else:
        assert "manifest.json" in names

    again = tmp_path / "again"
    assert ranks(1, train, str(again), 5, checkpoint_format, str(saved)) == [5]

    command = [sys.executable, "-m", "rankless.lightning.consolidate_checkpoint", "epoch=0-step=3.ckpt"]
    subprocess.run(command, cwd=saved.parent, check=True)
    checkpoint = torch.load(f"{saved}.consolidated")
    assert {"epoch", "global_step", "state_dict", "optimizer_states", "loops"} <= checkpoint.keys()
    assert torch.equal(checkpoint["state_dict"][LAYER], rankless.open(saved)[f"model/{LAYER}"])
    assert checkpoint["state_dict"].keys() == Transformer().state_dict().keys()


def fit_theirs(folder: str, kind: str, layout: str, ckpt_path: str) -> dict[str, torch.Tensor]:
    """Two more steps by a strategy of Lightning's own; returns the parameters."""
    with set_environment():
        module = Module(kind, "fsdp2" if layout == "fsdp2" else "plain")
        strategy: Any = strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        if layout == "fsdp1":
            strategy = CpuFSDP(state_dict_type="sharded")
        run = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            plugins=[LightningEnvironment()],
            max_steps=6,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        run.fit(module, make_data(), ckpt_path=ckpt_path)
        run.save_checkpoint(f"{folder}/end.ckpt")
    opened = rankless.open(f"{folder}/end.ckpt")
    return {name: opened[name] for name in opened if name.startswith("model/")}


@pytest.mark.parametrize(("layout", "kind"), [("fsdp1", "AdamW"), ("fsdp2", "AdamW"), ("fsdp2", "SGD")])
def test_what_we_convert_goes_on_in_plain_lightning(ranks: Ranks, tmp_path: Path, layout: str, kind: str) -> None:
    """From one folder both its strategies go on, though each looks for the model under a name of its own."""
    ranks(2, fit_module, str(tmp_path / "ours"), "ddp", 4, None, kind)
    expected = ranks(2, fit_module, str(tmp_path / "more"), "ddp", 6, str(tmp_path / "ours/end.ckpt"), kind)[0]
    path = rankless.convert(tmp_path / "ours/end.ckpt", tmp_path / "theirs.ckpt", to="lightning-folder")
    result = ranks(2, fit_theirs, str(tmp_path), kind, layout, str(path))[0]
    for name, tensor in result.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    assert result.keys() == {name for name in expected if name.startswith("model/")}
