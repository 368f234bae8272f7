"""A small training run in any layout, with the same state in all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

LAYOUTS = ("plain", "ddp", "fsdp")


class Net(nn.Module):
    """Uneven shapes, buffers of several dtypes, a tied weight, a frozen parameter, a scalar and an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 13), nn.ReLU(), nn.Linear(13, 6, bias=False))
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("running", torch.zeros(6))
        self.register_buffer("mask", torch.ones(2, 2, dtype=torch.bool), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = self.norm(hidden + self.body(hidden)) * self.scale
        return self.head(hidden)


@dataclass
class Run:
    """One run: what is saved and loaded, and the step that changes it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any

    def step(self, number: int) -> float:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 11, (8, 5), generator=generator)
        logits = self.model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())
        # A draw from the global generator, so that a resume without it shows.
        (loss * (1 + 0.1 * torch.rand(()))).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return float(loss.detach())


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": parameters[:2], "lr": 0.05},
        {"params": parameters[2:], "lr": 0.02, "weight_decay": 0.1},
    ]
    if kind == "adamw":
        return torch.optim.AdamW(groups)
    return torch.optim.SGD(groups, momentum=0.9 if kind == "momentum" else 0.0)


def make_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    decay = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[2])


def wrap_model(model: nn.Module, layout: str) -> nn.Module:
    if layout == "ddp":
        return DistributedDataParallel(model)
    if layout == "fsdp":
        fully_shard(model.body)
        return fully_shard(model)
    return model


def start_run(layout: str, optimizer: str = "adamw", seed: int = 0) -> Run:
    """A run that has not stepped."""
    torch.manual_seed(seed)
    model = wrap_model(Net(), layout)
    chosen = make_optimizer(optimizer, model)
    return Run(model, chosen, make_scheduler(chosen))


def train_run(layout: str, optimizer: str = "adamw", steps: int = 3) -> Run:
    """The state of a single-process run after some steps, laid out: values are equal in every layout and world size."""
    oracle = start_run("plain", optimizer)
    for number in range(steps):
        oracle.step(number)
    oracle.model.seen += steps
    oracle.model.running += 0.5
    if layout == "plain":
        return oracle
    run = start_run(layout, optimizer)
    put_tensor(run, gather_run(oracle))
    run.scheduler.load_state_dict(oracle.scheduler.state_dict())
    for group, known in zip(run.optimizer.param_groups, oracle.optimizer.param_groups, strict=True):
        group.update({key: value for key, value in known.items() if key != "params"})
    return run


def clean_name(name: str) -> str:
    return name.removeprefix("module.")


def gather_run(run: Run) -> dict[str, Any]:
    """Every tensor of a run, whole: parameters, buffers, optimizer state."""
    names = {id(p): clean_name(name) for name, p in run.model.named_parameters()}
    tensors = {f"model/{clean_name(name)}": full_tensor(t) for name, t in run.model.state_dict().items()}
    for p, state in run.optimizer.state.items():
        tensors |= {f"optimizer/{names[id(p)]}/{k}": full_tensor(v) for k, v in state.items() if torch.is_tensor(v)}
    return tensors


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def put_tensor(run: Run, tensors: dict[str, torch.Tensor]) -> None:
    """Give a run the values of another's :func:`whole`, without rankless."""
    with torch.no_grad():
        for name, target in run.model.state_dict().items():
            _copy(target, tensors[f"model/{clean_name(name)}"])
        for name, p in run.model.named_parameters():
            states = {
                key.rpartition("/")[2]: value
                for key, value in tensors.items()
                if key.rpartition("/")[0] == f"optimizer/{clean_name(name)}"
            }
            if states:
                run.optimizer.state[p] = {key: _like(p, value) for key, value in states.items()}


def _copy(target: torch.Tensor, value: torch.Tensor) -> None:
    target.copy_(_like(target, value) if isinstance(target, DTensor) else value)


def _like(p: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if isinstance(p, DTensor) and value.shape == p.shape:
        return distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)
    return value.clone()


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Bit for bit, dtypes included."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert tensor.shape == right[name].shape, name
        assert torch.equal(tensor.cpu(), right[name].cpu()), name


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
