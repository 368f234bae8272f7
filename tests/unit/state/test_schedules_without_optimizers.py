"""Tests that a schedule goes on if its scheduler is loaded without its optimizer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

import rankless
from tests.helpers.pairwise import first_of

SCHEDULERS: dict[str, Any] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.1),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (epoch + 1)),
    "linear": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=20),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(optimizer, 2, 0.1), lr_scheduler.LinearLR(optimizer)]
    ),
}


def make(kind: str, lr: Any = 1.0) -> tuple[nn.Module, optim.Optimizer, Any]:
    model = nn.Linear(2, 2)
    optimizer = optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}], lr=lr)
    return model, optimizer, SCHEDULERS[kind](optimizer)


def advance(optimizer: optim.Optimizer, scheduler: Any, steps: int) -> list[list[float]]:
    rates = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
    return rates


def load_as_scheduler(path: Path, scheduler: Any) -> None:
    rankless.load_checkpoint(path, None, scheduler=scheduler)


def load_with_a_missing_optimizer(path: Path, scheduler: Any) -> None:
    rankless.load_checkpoint(path, None, None, scheduler.optimizer, scheduler, allow_missing=["optimizer"], rng=False)


def load_as_component(path: Path, scheduler: Any) -> None:
    rankless.load_lr_scheduler(scheduler, path / "scheduler")


@pytest.mark.filterwarnings("ignore:loaded .* but not all")
@first_of(2, "load", [load_as_scheduler, load_as_component, load_with_a_missing_optimizer])
@first_of(4, "kind", list(SCHEDULERS))
def test_the_optimizer_gets_the_rates_of_the_schedule(tmp_path: Path, kind: str, load: Any) -> None:
    model, optimizer, scheduler = make(kind)
    advance(optimizer, scheduler, 5)
    rankless.save_checkpoint(tmp_path / "run", "a", model, scheduler=scheduler)
    rankless.save_lr_scheduler(scheduler, tmp_path / "run" / "scheduler")
    expected = advance(optimizer, scheduler, 4)
    _, other, resumed = make(kind)
    load(tmp_path / "run", resumed)
    assert advance(other, resumed, 4) == expected


def test_a_rate_that_is_a_tensor_is_filled_in_place(tmp_path: Path) -> None:
    _, optimizer, scheduler = make("step")
    advance(optimizer, scheduler, 5)
    rankless.save_checkpoint(tmp_path, "a", scheduler=scheduler)
    _, other, resumed = make("step", torch.tensor(1.0))
    rate = other.param_groups[0]["lr"]
    load_as_scheduler(tmp_path, resumed)
    assert other.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.01)


def test_rates_of_an_optimizer_that_is_loaded_are_its_own(tmp_path: Path) -> None:
    model, optimizer, scheduler = make("step")
    advance(optimizer, scheduler, 3)
    optimizer.param_groups[0]["lr"] = 0.7  # by hand
    rankless.save_checkpoint(tmp_path, "a", model, optimizer, scheduler)
    model, other, resumed = make("step")
    rankless.load_checkpoint(tmp_path, None, model, other, resumed)
    assert [group["lr"] for group in other.param_groups] == [0.7, 0.05]


class Opaque:
    """A scheduler that does not say which rates it has set."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, int]:
        return {"steps": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"steps": 3}


def test_a_scheduler_of_unknown_rates_is_warned_of(tmp_path: Path) -> None:
    _, optimizer, _ = make("step")
    rankless.save_checkpoint(tmp_path, "a", scheduler=Opaque(optimizer))
    with pytest.warns(UserWarning, match="Opaque was loaded without its optimizer"):
        rankless.load_checkpoint(tmp_path, None, scheduler=Opaque(optimizer))


MOMENTUM: dict[str, Any] = {
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=20),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 1.0, step_size_up=5),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=20)], [1]
    ),
}


@pytest.mark.parametrize("has_betas", [True, False])
@pytest.mark.parametrize("kind", list(MOMENTUM))
def test_the_optimizer_gets_the_momentum_of_the_schedule(tmp_path: Path, kind: str, *, has_betas: bool) -> None:
    """torch's schedulers set it where they compute rates, and keep no list of it."""

    def build() -> tuple[optim.Optimizer, Any]:
        parameters = nn.Linear(2, 2).parameters()
        optimizer = optim.Adam(parameters) if has_betas else optim.SGD(parameters, 1.0, momentum=0.9)
        return optimizer, MOMENTUM[kind](optimizer)

    optimizer, scheduler = build()
    advance(optimizer, scheduler, 4)
    rankless.save_checkpoint(tmp_path, "s", scheduler=scheduler)
    loaded, loaded_scheduler = build()
    load_as_scheduler(tmp_path, loaded_scheduler)
    setting = "betas" if has_betas else "momentum"
    assert loaded.param_groups[0][setting] == optimizer.param_groups[0][setting]
    assert advance(loaded, loaded_scheduler, 3) == advance(optimizer, scheduler, 3)
    assert loaded.param_groups[0][setting] == optimizer.param_groups[0][setting]


def test_a_momentum_that_cannot_be_computed_again_is_a_warning(tmp_path: Path) -> None:
    optimizer = optim.SGD(nn.Linear(2, 2).parameters(), 1.0, momentum=0.9)
    scheduler = lr_scheduler.CyclicLR(optimizer, 0.1, 1.0, step_size_up=5, scale_fn=lambda _: 1.0)
    rankless.save_checkpoint(tmp_path, "s", scheduler=scheduler)
    with pytest.warns(UserWarning, match="whose momentum it sets at its next step"):
        load_as_scheduler(tmp_path, scheduler)
