"""The training of one rank: small, and with every kind of state that a resume must restore."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset

import rankless

_WIDTH = 8


@dataclass(frozen=True)
class TrainingConfig:
    """A training on ``samples`` samples, in batches of ``batch`` on each rank, for ``epochs``.

    ``workers`` read the data. A checkpoint is saved, asynchronously, every ``save_every`` steps.
    """

    run: Path
    samples: int = 210
    batch: int = 3
    epochs: int = 2
    workers: int = 0
    save_every: int = 4

    @property
    def done(self) -> Path:
        """Return the path of a file that exists once the training is complete."""
        return self.run / "done"


class SampleDataset(Dataset[tuple[int, torch.Tensor]]):
    """A dataset of vectors computed from their index, with random noise from each of the three generators."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        vector = torch.sin(torch.arange(1, _WIDTH + 1) * (index + 1.0))
        drawn = random.random() + float(np.random.rand())  # noqa: NPY002 - the global one is what is to be resumed
        return index, vector + 0.1 * drawn * torch.rand(_WIDTH)


class StepLog:
    """A log of a rank's steps, in a file that survives a kill."""

    def __init__(self, run: Path, attempt: int, rank: int) -> None:
        self._file = (run / f"log.{attempt}.{rank}").open("w")

    def add_step(self, step: int, loss: float, samples: list[int]) -> None:
        """Add a step: its exact loss, and the samples that it saw."""
        self._file.write(json.dumps({"step": step, "loss": loss.hex(), "samples": samples}) + "\n")
        self._file.flush()


def train_model(plan: TrainingConfig, attempt: int, stop: rankless.Preemption) -> None:
    """Train from the latest checkpoint until all epochs are done, or until told to stop."""
    torch.manual_seed(0)
    model, optimizer, scheduler = _build_training()
    _seed_generators(dist.get_rank())
    loader = rankless.ResumableLoader(SampleDataset(plan.samples), plan.batch, num_workers=plan.workers, seed=1)
    training: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "dataloader": loader}
    step = 0
    if rankless.has_checkpoint(plan.run):
        step = rankless.load_checkpoint(plan.run, **training)["step"]
    log = StepLog(plan.run, attempt, dist.get_rank())
    while loader.epoch < plan.epochs:
        for numbers, vectors in loader:
            step += 1
            log.add_step(step, _train_step(model, optimizer, vectors), numbers.tolist())
            scheduler.step()
            stopping = stop.requested()
            if stopping or step % plan.save_every == 0:
                _save_checkpoint(plan, step, training)
            if stopping:
                return
    dist.barrier()  # a rank that is killed now must have logged its last step
    plan.done.touch()


def _save_checkpoint(plan: TrainingConfig, step: int, training: dict[str, Any]) -> None:
    content = {"step": step}
    options: dict[str, Any] = {"async_save": True, "keep": 2, "step": step}
    rankless.save_checkpoint(plan.run, f"step_{step}", **training, user_content=content, **options)


def _build_training() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    hidden = nn.Linear(_WIDTH, 16)
    model = nn.Sequential(hidden, nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, _WIDTH))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(hidden, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)


def _seed_generators(number: int) -> None:
    """Seed each rank differently."""
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002
    torch.manual_seed(number)


def _train_step(model: nn.Module, optimizer: torch.optim.Optimizer, vectors: torch.Tensor) -> float:
    loss: torch.Tensor = (model(vectors) - vectors).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
