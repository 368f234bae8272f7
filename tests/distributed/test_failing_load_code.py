"""Tests that a failure of the caller's code, after values were changed, is a typed error of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn, optim

import rankless
from rankless.errors import OptimizerMismatchError, StateError
from tests.helpers.pool import Ranks


def fail(*_: Any) -> None:
    raise KeyError("not on Fridays")


class Failing:
    """An object that saves, and cannot load."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        fail(state_dict)


class FailingOptimizer(optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "value": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        fail(state_dict)


class FailingScheduler(optim.lr_scheduler.ConstantLR):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        fail(state_dict)


class FailingModel(nn.Linear):
    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: Any) -> None:
        fail(state)


def make_state(place: str) -> dict[str, Any]:
    model: nn.Module = (FailingModel if place == "model" else nn.Linear)(2, 2)
    optimizer = (FailingOptimizer if place == "optimizer" else optim.SGD)(model.parameters(), lr=0.1)
    if place == "hook":
        optimizer.register_load_state_dict_post_hook(fail)
    scheduler = (FailingScheduler if place == "scheduler" else optim.lr_scheduler.ConstantLR)(optimizer)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    more = {"stateful": {"stateful": {"counter": Failing()}}, "dataloader": {"dataloader": Failing()}}
    return state | more.get(place, {})


CASES = [
    ("optimizer", "FailingOptimizer .*the optimizer may be partly loaded"),
    ("hook", "SGD .*the optimizer may be partly loaded"),
    ("scheduler", "FailingScheduler .*the scheduler may be partly loaded"),
    ("stateful", "Failing .*the object 'counter' may be partly loaded"),
    ("dataloader", "Failing .*the data loader may be partly loaded"),
    ("model", "FailingModel .*the model may be partly loaded"),
]


@pytest.mark.parametrize(("place", "message"), CASES)
def test_the_object_is_named_and_said_to_be_changed(tmp_path: Path, place: str, message: str) -> None:
    rankless.save_checkpoint(tmp_path, "a", **make_state(place))
    with pytest.raises(StateError, match=rf"{message}.*KeyError: 'not on Fridays'") as caught:
        rankless.load_checkpoint(tmp_path, **make_state(place))
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_error_of_this_library_keeps_its_type(tmp_path: Path) -> None:
    class Refusing(FailingOptimizer):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise OptimizerMismatchError("another version")

    model = nn.Linear(2, 2)
    optimizer = Refusing(model.parameters(), lr=0.1)
    rankless.save_checkpoint(tmp_path, "a", model, optimizer)
    with pytest.raises(OptimizerMismatchError, match="another version"):
        rankless.load_checkpoint(tmp_path, model=model, optimizer=optimizer)


def fail_on_one_rank(path: str) -> str:
    state = make_state("none")
    rankless.save_checkpoint(path, "a", **state)
    if dist.get_rank() == 1:
        state["optimizer"].register_load_state_dict_post_hook(fail)
    try:
        rankless.load_checkpoint(path, **state)
    except rankless.RanklessError as error:
        return str(error)
    return "loaded"


def test_all_ranks_raise_if_one_fails(ranks: Ranks, tmp_path: Path) -> None:
    messages = ranks(2, fail_on_one_rank, str(tmp_path))
    assert all("SGD" in message and "partly loaded" in message for message in messages)
