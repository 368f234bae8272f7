"""The objects of drawn training states: created, trained, and changed on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import rankless
from tests.helpers.drawn_cases import PIPELINES, Case
from tests.helpers.drawn_modules import LARGE, Part, Whole, lay_out

#: One to four ranks divide the samples of an epoch into batches without a rest.
SAMPLES, BATCH = 48, 2


class Averaging(torch.optim.SGD):
    """An optimizer that keeps a value in its state dict besides its states."""

    average = torch.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "average": self.average, "count": 2}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = state_dict["average"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k not in {"average", "count"}})


class Holder:
    """A stateful object."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


@dataclass
class Training:
    """The objects of a case on this rank. ``modules`` have the names of the whole model, ``models`` are saved."""

    modules: list[nn.Module]
    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    schedulers: list[Any]
    loader: Any
    batches: Iterator[Any]
    holder: Holder
    content: dict[str, Any]

    def objects(self, layout: str) -> dict[str, Any]:
        """Return the arguments of a save or a load. Of a pipeline they are lists."""
        lists = {"model": self.models, "optimizer": self.optimizers, "scheduler": self.schedulers}
        given: dict[str, Any] = {k: v if layout in PIPELINES else v[0] for k, v in lists.items() if v}
        if self.loader is not None:
            given["dataloader"] = self.loader
        return given | {"stateful": {"holder": self.holder}}

    def read_rest(self) -> list[int]:
        """Return the samples that this rank gets in the rest of the epoch."""
        return [int(sample) for batch in self.batches for sample in batch]

    def iterate_again(self) -> None:
        """Begin with the position that was loaded."""
        self.batches = iter(() if self.loader is None else self.loader)


def build(case: Case, layout: str, seed: int, *, is_meta: bool = False) -> Training:
    """Make the objects. Values depend on ``seed``, and are the same on all ranks."""
    torch.manual_seed(seed)
    with torch.device("meta" if is_meta else "cpu"):
        whole = Whole(case)
    modules, models = lay_out(whole, layout)
    size = LARGE if case.is_large else 3
    average, values, content = torch.rand(size), torch.rand(size), {"a": [1, 2.5], "values": torch.rand(size)}
    optimizers = [] if is_meta else [_make_optimizer(case, module) for module in modules]
    for optimizer in optimizers:
        if isinstance(optimizer, Averaging):
            optimizer.average = average.clone()
    schedulers = [] if case.scheduler == "none" else [_make_scheduler(case, optimizer) for optimizer in optimizers]
    # The state of torchdata's sampler is a position in an order that is the same program's.
    loader = _make_loader(case, case.seed if case.loader == "torchdata" else seed)
    training = Training(modules, models, optimizers, schedulers, loader, iter(()), Holder(values), content)
    training.iterate_again()
    return training


def _make_optimizer(case: Case, module: nn.Module) -> torch.optim.Optimizer:
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    parts = [[p for name, p in trained if name.endswith("bias") == is_bias] for is_bias in (False, True)]
    groups: list[dict[str, Any]] = [{"params": [p for _, p in trained]}]
    if case.groups == 2:
        groups = [{"params": part} | extra for part, extra in zip(parts, [{}, {"lr": 0.05}], strict=True) if part]
    kinds: dict[str, Any] = {
        "sgd": lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9),
        "adam": lambda g: torch.optim.Adam(g, lr=0.1, amsgrad=True),
        "adamw": lambda g: torch.optim.AdamW(g, lr=0.1),
        "rmsprop": lambda g: torch.optim.RMSprop(g, lr=0.1, momentum=0.5),
        "adagrad": lambda g: torch.optim.Adagrad(g, lr=0.1),
        "nadam": lambda g: torch.optim.NAdam(g, lr=0.1),
        "own": lambda g: Averaging(g, lr=0.1, momentum=0.9),
    }
    optimizer: torch.optim.Optimizer = kinds[case.optimizer](groups)
    return optimizer


def _make_scheduler(case: Case, optimizer: Any) -> Any:
    schedulers = torch.optim.lr_scheduler
    kinds: dict[str, Any] = {
        "step": lambda: schedulers.StepLR(optimizer, 2, 0.5),
        "lambda": lambda: schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, 9),
        "plateau": lambda: schedulers.ReduceLROnPlateau(optimizer, patience=0),
    }
    return kinds[case.scheduler]()


def _make_loader(case: Case, seed: int) -> Any:
    samples: Any = list(range(SAMPLES))
    if case.loader == "resumable":
        return rankless.ResumableLoader(samples, BATCH, seed=seed)
    if case.loader == "torchdata":
        world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        sampler = StatefulDistributedSampler(samples, num_replicas=world, rank=rank, shuffle=True, seed=seed)
        return StatefulDataLoader(samples, BATCH, sampler=sampler)
    return None


def train(training: Training, case: Case, steps: int) -> None:
    """Take steps with gradients that depend on nothing but the step, and a batch each."""
    for step in range(steps):
        for parameter in (p for model in training.models for p in model.parameters() if p.requires_grad):
            parameter.grad = torch.full_like(parameter, 0.25 + step)
        for optimizer in training.optimizers:
            optimizer.step()
        for scheduler in training.schedulers:
            scheduler.step(*([1.0] if case.scheduler == "plateau" else []))
        list(islice(training.batches, 1))


def _last(tensor: Any) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().reshape(-1)[local.numel() * 2 // 3 :][:1]


def change(training: Training, case: Case) -> None:
    """Change one element of one value on this rank."""
    states = [state for optimizer in training.optimizers for state in optimizer.state.values()]
    targets: list[Any] = {
        "parameter": [next(training.modules[0].parameters())],
        "buffer": [
            buffer
            for module in training.modules
            for name, buffer in module.named_buffers()
            if not name.endswith("scratch")
        ],
        "extra": [part.scales for module in training.modules for part in module.children() if isinstance(part, Part)],
        "stateful": [training.holder.values],
        "user_content": [training.content["values"]],
        "moment": [value for state in states for value in state.values() if isinstance(value, torch.Tensor)],
        "own": [optimizer.average for optimizer in training.optimizers if isinstance(optimizer, Averaging)],
    }.get(case.change, [])
    for target in targets[case.seed % max(1, len(targets)) :][:1]:
        _last(target).add_(1)
    if case.change == "setting":
        training.optimizers[-1].param_groups[-1]["weight_decay"] = 0.5
    if case.change == "scheduler" and training.schedulers:
        training.schedulers[-1].last_epoch = 7
    if case.change == "loader":
        list(islice(training.batches, 1))
