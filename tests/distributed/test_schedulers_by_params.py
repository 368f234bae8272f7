"""Tests that each stage of a pipeline, and each chunk of a stage, gets the state of its own scheduler."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.optim import lr_scheduler

import rankless
from tests.helpers.pairwise import first_of
from tests.helpers.pool import Ranks

#: The groups of each of four chunks, two on each rank: what is in each, with its learning rate.
CHUNKS: list[list[tuple[str, float]]] = [
    [("weight", 1.0), ("bias", 0.5)],
    [("weight bias", 0.25)],
    [("weight bias", 0.125)],
    [("bias", 2.0), ("weight", 4.0)],
]

SCHEDULERS: dict[str, Any] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))],
        [2],
    ),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, [group["lr"] for group in optimizer.param_groups], 8.0, 3, cycle_momentum=False
    ),
}


def make(kind: str, numbers: list[int]) -> tuple[nn.Module, list[Any], list[Any]]:
    torch.manual_seed(0)
    model = nn.ModuleDict({str(number): nn.Linear(2, 2) for number in numbers})
    optimizers = [
        optim.SGD(
            [
                {"params": [getattr(model[str(number)], name) for name in names.split()], "lr": lr}
                for names, lr in CHUNKS[number]
            ]
        )
        for number in numbers
    ]
    return model, optimizers, [SCHEDULERS[kind](optimizer) for optimizer in optimizers]


def advance(optimizers: list[Any], schedulers: list[Any], steps: int) -> list[list[float]]:
    for _ in range(steps):
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    return [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]


def save(path: str, kind: str) -> list[list[float]]:
    model, optimizers, schedulers = make(kind, [dist.get_rank(), dist.get_rank() + 2])
    advance(optimizers, schedulers, 3)
    rankless.save_checkpoint(path, "a", model, optimizers, schedulers)
    return advance(optimizers, schedulers, 4)


def resume(path: str, kind: str) -> tuple[tuple[str, ...], list[list[float]]]:
    model, optimizers, schedulers = make(kind, [dist.get_rank(), dist.get_rank() + 2])
    restored = rankless.restore(path, None, model, optimizers, schedulers)
    return restored.exact, advance(optimizers, schedulers, 4)


@first_of(2, "kind", SCHEDULERS)
def test_the_same_program_goes_on_with_the_rates_of_its_stages(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    expected = ranks(2, save, str(tmp_path), kind)
    outcomes = ranks(2, resume, str(tmp_path), kind)
    assert [rates for _, rates in outcomes] == expected
    assert all("scheduler" in exact for exact, _ in outcomes)


def test_one_process_loads_all_stages_into_one_optimizer(ranks: Ranks, tmp_path: Path) -> None:
    """The groups of the stages become groups of one optimizer, and their parts of the schedulers one scheduler."""
    expected = ranks(2, save, str(tmp_path), "lambda")
    by_chunk = {rank + 2 * index: rates for rank, pair in enumerate(expected) for index, rates in enumerate(pair)}
    model, optimizers, _ = make("lambda", [0, 1, 2, 3])
    whole = optim.SGD([group for optimizer in optimizers for group in optimizer.param_groups])
    scheduler = SCHEDULERS["lambda"](whole)
    rankless.load_checkpoint(tmp_path, None, model, whole, scheduler)
    assert advance([whole], [scheduler], 4) == [[rate for number in range(4) for rate in by_chunk[number]]]


def save_with_counts_of_ranks(path: str) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    model, (optimizer,), _ = make("lambda", [0])
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=9)
    scheduler.num_bad_epochs = 3 + dist.get_rank()
    rankless.save_checkpoint(path, "a", model, optimizer, scheduler)
    restored = rankless.restore(path, None, model, optimizer, scheduler)
    return restored.exact, restored.reconstructed, scheduler.num_bad_epochs


def test_a_scheduler_that_differs_between_replicas_is_not_exact(ranks: Ranks, tmp_path: Path) -> None:
    for exact, reconstructed, count in ranks(2, save_with_counts_of_ranks, str(tmp_path)):
        assert "scheduler" not in exact
        assert "scheduler" in reconstructed
        assert count == 3
