"""Training runs under Lightning itself, on the ranks of the pool.

``python -m tests.helpers.lightning_runs FILE`` writes the checkpoints that tests without Lightning read.
"""

from __future__ import annotations

import logging
import shutil
import sys
import tarfile
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from tests.helpers.lightning_net import WORDS, Module, Net, make_optimizers, parallelize
from tests.helpers.pool import Ranks

#: What Lightning saves with, by a name of ours, and on how many ranks.
KINDS = {"single": 1, "ddp": 2, "fsdp": 2, "fsdp2": 2, "fsdp2-full": 2, "tp": 2, "fabric": 2}


class Lit(lightning.LightningModule):
    def __init__(self, optimizer: str, layout: str, extra: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        if layout == "plain":
            self.build()

    def build(self) -> None:
        torch.manual_seed(0)
        self.model = Net()

    def configure_model(self) -> None:
        if self.hparams.layout == "plain" or hasattr(self, "model"):
            return
        self.build()
        if self.hparams.layout == "fsdp2":
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])
        else:
            parallelize(self.model, self.device_mesh["tensor_parallel"])

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = compute_loss(self.model, batch)
        self.log("loss", loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = make_optimizers(self, self.hparams.optimizer)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(make_batches(), batch_size=None)


def make_batches() -> list[torch.Tensor]:
    return [torch.randint(0, WORDS, (4, 5), generator=torch.Generator().manual_seed(n)) for n in range(8)]


def compute_loss(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(net(batch).flatten(0, 1), batch.roll(1, 1).flatten())


class Pool(ClusterEnvironment):
    """The ranks of the pool, which are there already."""

    creates_processes_externally = True
    main_address, main_port = "127.0.0.1", 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        del size

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        del rank

    def local_rank(self) -> int:
        return dist.get_rank()

    def node_rank(self) -> int:
        return 0


class CpuFSDP(FSDPStrategy):
    """FSDP1 on CPUs, which Lightning does not pass on to torch."""

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        yield

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def make_strategy(kind: str) -> Any:
    if kind == "single":
        return SingleDeviceStrategy(torch.device("cpu"))
    if kind == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    if kind == "fsdp":
        return CpuFSDP(state_dict_type="sharded", process_group_backend="gloo")
    n = dist.get_world_size()
    return ModelParallelStrategy(
        data_parallel_size=1 if kind == "tp" else n,
        tensor_parallel_size=n if kind == "tp" else 1,
        save_distributed_checkpoint=kind != "fsdp2-full",
        process_group_backend="gloo",
    )


def fit(folder: str, kind: str, optimizer: str) -> None:
    """Train three steps under a strategy, and save ``folder/saved.ckpt``."""
    for logger in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if kind == "fabric":
        fabric(folder, optimizer)
        return
    layout = {"fsdp2": "fsdp2", "fsdp2-full": "fsdp2", "tp": "tp"}.get(kind, "plain")
    module = Lit(optimizer, layout, Namespace(lr=0.1, path=Path("x"), parts=(1, {"a"})))
    run = lightning.Trainer(
        strategy=make_strategy(kind),
        accelerator="cpu",
        devices=dist.get_world_size(),
        plugins=None if kind == "single" else [Pool()],
        max_steps=3,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, "{epoch}-{step}", monitor="loss")],
    )
    run.fit(module)
    run.save_checkpoint(f"{folder}/saved.ckpt")


def fabric(folder: str, kind: str) -> None:
    """The names are the user's own."""

    def sharded(model: nn.Module, mesh: Any) -> nn.Module:
        fully_shard(model.model, mesh=mesh["data_parallel"])
        return model

    n = dist.get_world_size()
    chosen = FabricModelParallel(sharded, data_parallel_size=n, tensor_parallel_size=1, process_group_backend="gloo")
    run = lightning.Fabric(accelerator="cpu", devices=n, strategy=chosen, plugins=[Pool()])
    run.launch()
    torch.manual_seed(0)
    module = run.setup_module(Module())
    optimizer, scheduler = make_optimizers(module, kind)
    optimizer = run.setup_optimizers(optimizer)
    for batch in make_batches()[:3]:
        run.backward(compute_loss(module, batch))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    state = {"model": module, "opt": optimizer, "scheduler": scheduler, "epoch": 0, "global_step": 3}
    run.save(f"{folder}/saved.ckpt", state)


def main(file: str) -> None:
    """Write the checkpoints of all kinds into an archive."""
    ranks = Ranks()
    with tempfile.TemporaryDirectory() as folder, tarfile.open(file, "w:xz") as archive:
        for kind, n in KINDS.items():
            for optimizer in ("adamw", "sgd") if kind in {"fsdp", "fsdp2"} else ("adamw",):
                name = f"{kind}-{optimizer}.ckpt"
                ranks(n, fit, f"{folder}/{kind}-{optimizer}", kind, optimizer)
                shutil.move(f"{folder}/{kind}-{optimizer}/saved.ckpt", f"{folder}/{name}")
                archive.add(f"{folder}/{name}", name)
    ranks.close()


if __name__ == "__main__":
    main(sys.argv[1])
