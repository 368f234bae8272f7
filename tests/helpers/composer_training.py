"""A training with Composer and the callback of ``docs/guides/composer.md``, as a script: ``RUN BATCHES DROPOUT``."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.models import ComposerModel
from composer.optim import LinearScheduler
from composer.utils import dist, reproducibility
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

GUIDE = Path(__file__).parents[2] / "docs/guides/composer.md"
SAMPLES, BATCH = 48, 12


class Net(ComposerModel):  # type: ignore[misc]
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 1))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0])  # type: ignore[no-any-return]

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        del batch
        return outputs.square().mean()


def make_callback(path: str) -> Any:
    """Return the callback of the guide, which saves every two batches."""
    block = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(block[1] if block else "", names)  # noqa: S102 - our own documentation
    return names["RanklessSaver"](path, "2ba")


def main(path: str, batches: str, dropout: str) -> None:
    dist.initialize_dist("cpu")
    reproducibility.seed_all(0)
    model = Net(float(dropout))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1)))
    sampler = dist.get_sampler(data, shuffle=True)
    trainer = Trainer(
        model=model,
        optimizers=optimizer,
        schedulers=LinearScheduler(t_max="20ba"),
        train_dataloader=DataLoader(data, batch_size=BATCH // dist.get_world_size(), sampler=sampler),
        max_duration=f"{batches}ba",
        seed=3,
        device="cpu",
        progress_bar=False,
        callbacks=[make_callback(path)],
    )
    trainer.fit()
    if dist.get_global_rank() == 0:
        timestamp = trainer.state.timestamp
        numbers = [number for value in model.parameters() for number in value.detach().flatten().tolist()]
        rate = optimizer.param_groups[0]["lr"]
        result = {"batch": int(timestamp.batch), "epoch": int(timestamp.epoch), "rate": rate, "weights": numbers}
        print("result", json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
