"""A model and its training with torch alone, for this environment and that of the real package."""

from pathlib import Path
from typing import Any

import torch
from torch import nn


class Net(nn.Module):
    """A frozen layer, a buffer, and with ``tied`` a head that is the embedding."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 24)
        self.frozen = nn.Linear(24, 24).requires_grad_(requires_grad=False)
        self.body = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 24))
        self.head = nn.Linear(24, 13, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.frozen(self.embed(tokens))))


def start(*, tied: bool, seed: int = 0) -> tuple[Net, torch.optim.Optimizer, Any]:
    """Two groups, a schedule."""
    torch.manual_seed(seed)
    model = Net(tied=tied)
    large = [p for p in model.parameters() if p.ndim > 1]
    small = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": large}, {"params": small, "weight_decay": 0.0}], lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def train(model: nn.Module, optimizer: Any, scheduler: Any, first: int, steps: int) -> None:
    """The same batch on every rank, so that a mean over ranks is that of one."""
    for step in range(first, first + steps):
        tokens = torch.arange(step, step + 10).reshape(2, 5) % 13
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            next(buffer for name, buffer in model.named_buffers() if name.endswith("seen")).add_(1)


#: How parts are saved: a name, and the arguments of ``save_model`` and ``save_optimizer``.
MODELS: dict[str, dict[str, Any]] = {
    "model.bin": {},
    "model.safetensors": {"use_safetensors": True},
    "model_bins": {"shard": True, "size_per_shard": 0.004},
    "model_safe": {"shard": True, "size_per_shard": 0.004, "use_safetensors": True},
    "model_bins_foo": {"shard": True, "size_per_shard": 0.004, "prefix": "foo"},
    "model_safe_foo": {"shard": True, "size_per_shard": 0.004, "prefix": "foo", "use_safetensors": True},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "optimizer.bin": {},
    "optimizer_bins": {"shard": True, "size_per_shard": 0.008},
    "optimizer_bins_foo": {"shard": True, "size_per_shard": 0.008, "prefix": "foo"},
}


def cases() -> list[tuple[str, str]]:
    """Every form of a model, and every form of an optimizer, at least once."""
    return [(model, list(OPTIMIZERS)[i % len(OPTIMIZERS)]) for i, model in enumerate(MODELS)]


def save_all(booster: Any, folder: Path, parts: tuple[Any, Any, Any], *, tied: bool, real: bool) -> None:
    """Every form. The real package cannot save tied tensors of the CPU into safetensors files."""
    model, optimizer, scheduler = parts
    for name, options in MODELS.items():
        if not (real and tied and options.get("use_safetensors")):
            booster.save_model(model, str(folder / name), **options)
    for name, options in OPTIMIZERS.items():
        booster.save_optimizer(optimizer, str(folder / name), **options)
    booster.save_lr_scheduler(scheduler, str(folder / "scheduler"))


def state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """All of it, to be compared."""
    return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
