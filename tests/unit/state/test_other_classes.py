"""Tests of states that an optimizer or a scheduler of another class has saved: no load calls them exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as lr

import rankless
from rankless.errors import MismatchError, OptimizerMismatchError
from tests.helpers.pairwise import first_of

SCHEDULERS: dict[str, Any] = {
    "step": lambda optimizer: lr.StepLR(optimizer, 2),
    "exponential": lambda optimizer: lr.ExponentialLR(optimizer, 0.5),
    "cosine": lambda optimizer: lr.CosineAnnealingLR(optimizer, 10),
    "linear": lr.LinearLR,
    "constant": lr.ConstantLR,
    "one cycle": lambda optimizer: lr.OneCycleLR(optimizer, 1.0, total_steps=9),
    "plateau": lr.ReduceLROnPlateau,
}

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda params: optim.SGD(params, 0.1, momentum=0.9),
    "Adam": optim.Adam,
    "RMSprop": optim.RMSprop,
    "NAdam": optim.NAdam,
    "Adamax": optim.Adamax,
    "Adagrad": optim.Adagrad,
}


def build(optimizer: str = "Adam", scheduler: str = "step") -> tuple[nn.Module, optim.Optimizer, Any]:
    model = nn.Linear(3, 2)
    made = OPTIMIZERS[optimizer](model.parameters())
    return model, made, SCHEDULERS[scheduler](made)


def take_step(model: nn.Module, optimizer: optim.Optimizer) -> None:
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def save_by_torch(path: Path, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    torch.save({name: part.state_dict() for name, part in parts.items() if part is not None}, path)


@first_of(9, "here", list(SCHEDULERS))
@first_of(9, "saved", list(SCHEDULERS))
def test_a_scheduler_of_another_class_in_a_file_of_torch(tmp_path: Path, saved: str, here: str) -> None:
    save_by_torch(tmp_path / "x.pt", *build(scheduler=saved))
    model, optimizer, scheduler = build(scheduler=here)
    state = scheduler.state_dict()
    if saved == here:
        restored = rankless.restore(tmp_path / "x.pt", None, model, optimizer, scheduler, rng=False)
        assert restored.exact == ("model", "optimizer", "scheduler")
    elif (saved, here) == ("exponential", "step"):  # as a version of a class may keep a further value
        restored = rankless.restore(tmp_path / "x.pt", None, model, optimizer, scheduler, rng=False)
        assert restored.reconstructed == ("scheduler",)
    else:
        with pytest.raises(MismatchError, match=rf"{type(scheduler).__qualname__} does not keep"):
            rankless.restore(tmp_path / "x.pt", None, model, optimizer, scheduler, rng=False)
        assert scheduler.state_dict() == state


def chain(optimizer: optim.Optimizer, *links: str, is_sequence: bool) -> Any:
    schedulers = [SCHEDULERS[link](optimizer) for link in links]
    return lr.SequentialLR(optimizer, schedulers, [3]) if is_sequence else lr.ChainedScheduler(schedulers)


@pytest.mark.parametrize("is_sequence", [True, False])
@pytest.mark.parametrize("links", [("exponential", "step"), ("step", "cosine")])
def test_links_of_other_classes_in_a_chain(tmp_path: Path, links: tuple[str, str], *, is_sequence: bool) -> None:
    model, optimizer, _ = build()
    scheduler = chain(optimizer, "step", "exponential", is_sequence=is_sequence)
    rankless.save_checkpoint(tmp_path, "s", model, optimizer, scheduler, rng=False)
    other = chain(optimizer, *links, is_sequence=is_sequence)
    with pytest.raises(MismatchError, match="does not keep"):
        rankless.load_checkpoint(tmp_path, None, model, optimizer, other)
    same = chain(optimizer, "step", "exponential", is_sequence=is_sequence)
    assert "scheduler" in rankless.restore(tmp_path, None, model, optimizer, same, rng=False).exact


class _Factor:
    def __init__(self) -> None:
        self.factor = 0.5

    def __call__(self, epoch: int) -> float:
        return self.factor**epoch


@pytest.mark.parametrize("saves_object", [True, False])
def test_a_rule_that_is_an_object_on_one_side_is_not_exact(tmp_path: Path, *, saves_object: bool) -> None:
    model, optimizer, _ = build()
    rules: list[Any] = [lambda _: 1.0, _Factor()]
    saved, here = (lr.LambdaLR(optimizer, rules[is_object]) for is_object in (saves_object, not saves_object))
    rankless.save_checkpoint(tmp_path, "s", model, optimizer, saved, rng=False)
    assert rankless.restore(tmp_path, None, model, optimizer, here, rng=False).reconstructed == ("scheduler",)


@first_of(8, "here", list(OPTIMIZERS))
@first_of(8, "saved", list(OPTIMIZERS))
def test_an_optimizer_of_another_class_in_a_file_of_torch(tmp_path: Path, saved: str, here: str) -> None:
    model, optimizer, _ = build(saved)
    take_step(model, optimizer)
    save_by_torch(tmp_path / "x.pt", model, optimizer, None)
    other, loaded, _ = build(here)
    if saved == here:
        assert rankless.restore(tmp_path / "x.pt", None, other, loaded, rng=False).exact == ("model", "optimizer")
        take_step(other, loaded)
    elif {saved, here} == {"Adam", "NAdam"}:  # one has all states of the other, and one more
        assert rankless.restore(tmp_path / "x.pt", None, other, loaded, rng=False).reconstructed == ("optimizer",)
    else:
        with pytest.raises(OptimizerMismatchError):
            rankless.restore(tmp_path / "x.pt", None, other, loaded, rng=False)


class _Other(optim.Optimizer):
    """An optimizer of another package with a name that torch has."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        del closure
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            state = self.state[parameter]
            state["m"] = state.get("m", torch.zeros_like(parameter)) + 1


_Other.__qualname__ = "AdamW"


@pytest.mark.parametrize("kinds", [(_Other, optim.AdamW), (optim.AdamW, _Other)])
def test_a_class_of_the_same_name_from_another_package(tmp_path: Path, kinds: tuple[Any, Any]) -> None:
    model = nn.Linear(3, 2)
    saved, here = (kind(model.parameters()) for kind in kinds)
    take_step(model, saved)
    rankless.save_checkpoint(tmp_path, "s", model, saved, rng=False)
    with pytest.raises(OptimizerMismatchError, match="its class differs from the saved one"):
        rankless.load_checkpoint(tmp_path, None, model, here)
