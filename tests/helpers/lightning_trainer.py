"""Training under Lightning's Trainer with rankless's strategies, on the ranks of the pool."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rankless
import rankless.lightning as ours


class Module(LightningModule):
    """A model whose state tells the step; its data is the same however many ranks there are."""

    def __init__(self, kind: str = "AdamW", layout: str = "plain", **hparams: Any) -> None:
        super().__init__()
        self.save_hyperparameters(hparams)
        self.kind, self.layout = kind, layout
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 7, bias=False), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))

    def configure_model(self) -> None:
        if self.layout == "fsdp2" and not hasattr(self.net[0].weight, "placements"):
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.net(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = getattr(torch.optim, self.kind)(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def make_data() -> DataLoader:
    torch.manual_seed(2)
    return DataLoader(TensorDataset(torch.randn(8, 4).repeat(8, 1)), batch_size=8)


@contextlib.contextmanager
def set_environment() -> Iterator[None]:
    rank, size = dist.get_rank(), dist.get_world_size()
    known = {"LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    with mock.patch.dict(os.environ, {key: str(value) for key, value in known.items()}):
        yield


def make_strategy(layout: str, **options: Any) -> Any:
    if layout == "plain":
        return ours.SingleDeviceStrategy(device=torch.device("cpu"), **options)
    if layout == "ddp":
        return ours.DDPStrategy(**options)
    if layout == "fsdp1":
        return ours.FSDPStrategy(state_dict_type="sharded", **options)
    return ours.ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1, **options)


def make_trainer(folder: str, layout: str, steps: int, callbacks: list[Callback], **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1 if layout == "plain" else dist.get_world_size(),
        strategy=make_strategy(layout, **options),
        plugins=[LightningEnvironment()],
        max_steps=steps,
        default_root_dir=folder,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def fit_module(
    folder: str, layout: str, steps: int, ckpt_path: str | None = None, kind: str = "AdamW", **options: Any
) -> dict[str, torch.Tensor]:
    """Train to a step; returns the whole state."""
    callback = ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=2, save_last=options.pop("save_last", None))
    module = Module(kind, "fsdp2" if layout == "fsdp2" else "plain")
    with set_environment():
        run = make_trainer(folder, layout, steps, [callback], **options)
        run.fit(module, make_data(), ckpt_path=ckpt_path)
        run.save_checkpoint(f"{folder}/end.ckpt")
        run.strategy._checkpoints.finish_pending()
    return read_state(Path(folder, "end.ckpt"))


def read_state(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = rankless.open(path)
    return {name: checkpoint[name] for name in checkpoint if not name.startswith("ranks/")}
