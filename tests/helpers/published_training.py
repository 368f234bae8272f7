"""A training whose weights are published, and the files that `save_model` writes of it: the oracle."""

from __future__ import annotations

from pathlib import Path

import torch

import rankless


class Net(torch.nn.Module):
    """Parameters that step, one that is frozen, a tied one, and buffers of other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(301, 64)
        self.up = torch.nn.Linear(64, 333)
        self.head = torch.nn.Linear(64, 301, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = torch.nn.Parameter(torch.randn(50), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(7, dtype=torch.bool))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("wide", torch.zeros(9, dtype=torch.float64))


class Training:
    """A model that changes a little in each step, and the folder that ``save_model`` writes of it."""

    def __init__(self, folder: Path, dtype: str | None = "bfloat16") -> None:
        torch.manual_seed(0)
        self.model, self.folder, self.dtype, self.steps = Net(), folder, dtype, 0
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-4)

    def step(self) -> None:
        self.steps += 1
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.model.seen += 1
        self.model.mask[self.steps % 7] ^= True
        self.model.wide += 0.1

    def expected(self, **options: object) -> dict[str, bytes]:
        """Return the files that ``save_model`` writes of the model now."""
        folder = self.folder / f"expected_{self.steps}"
        rankless.save_model(self.model, folder, shard=True, dtype=self.dtype, **options)
        return {file.name: file.read_bytes() for file in folder.iterdir()}


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.resolve().iterdir()}
