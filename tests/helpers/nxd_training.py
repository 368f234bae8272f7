"""A small model, its training, and its checkpoint as NxD writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.helpers.nxd_files import rank_file_name, save_rank_file, shard_zero_states


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.register_buffer("buf", torch.rand(3))
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)
        self.frozen = nn.Parameter(torch.rand(2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())


def make_training(seed: int) -> tuple[Net, torch.optim.Optimizer, Any]:
    model = Net(seed)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    torch.manual_seed(100 + number)
    optimizer.zero_grad()
    model(torch.randn(6, 4)).square().mean().backward()
    optimizer.step()


def equal_models(model: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(tensor, other.state_dict()[key]) for key, tensor in model.state_dict().items())


def write_nxd(
    folder: Path, model: Net, optimizer: torch.optim.Optimizer, *, dp: int = 2, masters: bool = False
) -> None:
    own = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    save_rank_file(folder / "model" / rank_file_name(), own)
    (group,) = optimizer.param_groups
    parameters = dict(enumerate(parameter.detach() for parameter in group["params"]))
    states = {pid: dict(optimizer.state[parameter]) for pid, parameter in enumerate(group["params"])}
    settings = {key: value for key, value in group.items() if key != "params"}
    groups = [{**settings, "params": list(parameters)}]
    for d, tree in enumerate(shard_zero_states(parameters, states, dp, masters=masters, groups=groups)):
        save_rank_file(folder / "optim" / rank_file_name(d), tree)
    torch.save({"total_steps": 2}, folder / "user_content.pt")
    (folder / "checkpoint").write_text("1")
    (folder / "done").write_text("1")


class FailingScheduler:
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("no state")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError
