"""Tests of one object, or one memory, under several names: a load cannot give it the values of all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR

import rankless
from rankless.errors import MismatchError


class Kept(nn.Module):
    """A parameter and an extra state."""

    def __init__(self, value: float, extra: Any = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 2), value))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Holder:
    """A stateful object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


def step(model: nn.Module, lr: float, momentum: float) -> optim.Optimizer:
    """Return an optimizer whose momentum is that of one gradient."""
    optimizer = optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, momentum)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def assert_refused(path: Path, message: str, **objects: Any) -> None:
    with pytest.raises(MismatchError, match=message):
        rankless.restore(path, **objects, rng=False)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_that_two_models_share_here_must_be_equal_in_the_checkpoint(device: str, tmp_path: Path) -> None:
    for tag, value in (("equal", 1.0), ("other", 2.0)):
        rankless.save_checkpoint(tmp_path, tag, {"a": Kept(1.0), "b": Kept(value)}, rng=False)
    with torch.device(device):
        first, second = Kept(9.0), Kept(9.0)
    second.weight = first.weight
    models = {"a": first, "b": second}
    message = r"model/b/weight: the same tensor as model/a/weight here"
    assert_refused(tmp_path, message, tag="other", model=models)
    assert first.weight.is_meta or first.weight.eq(9).all()
    assert rankless.restore(tmp_path, "equal", models, rng=False).exact == ("model/a", "model/b")
    assert first.weight.eq(1).all()
    assert second.weight is first.weight


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_without_strict_the_first_of_two_models_has_its_weights(device: str, tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", {"a": Kept(1.0), "b": Kept(2.0)}, rng=False)
    with torch.device(device):
        model = Kept(9.0)
    restored = rankless.restore(tmp_path, model={"a": model, "b": model}, rng=False, strict=False)
    assert (restored.exact, restored.unexpected) == (("model/a",), ("model/b/weight",))
    assert model.weight.eq(1).all()


def test_a_state_that_is_a_buffer_of_the_model_must_equal_it(tmp_path: Path) -> None:
    def make(mean: torch.Tensor, kept: torch.Tensor) -> tuple[nn.Module, optim.Optimizer]:
        model = nn.BatchNorm1d(3)
        model.running_mean = mean
        optimizer = optim.SGD(model.parameters())
        optimizer.state[model.weight]["mean"] = kept
        return model, optimizer

    for tag, value in (("equal", 1.0), ("other", 2.0)):
        rankless.save_checkpoint(tmp_path, tag, *make(torch.ones(3), torch.full((3,), value)), rng=False)
    memory = torch.full((3,), 9.0)
    model, optimizer = make(memory, memory)
    message = "optimizer/weight/mean: the same tensor as model/running_mean here"
    assert_refused(tmp_path, message, tag="other", model=model, optimizer=optimizer)
    assert memory.eq(9).all()
    assert rankless.restore(tmp_path, "equal", model, optimizer, rng=False).exact == ("model", "optimizer")
    restored = rankless.restore(tmp_path, "other", model, optimizer, rng=False, strict=False)
    assert (restored.exact, memory.eq(1).all()) == (("model",), True)


def test_components_that_share_memory_in_part_are_not_exact(tmp_path: Path) -> None:
    memory = torch.zeros(4, 3)
    rankless.save_checkpoint(tmp_path, "s", {"a": {"w": torch.ones(4, 3)}, "b": {"w": torch.ones(2, 3)}}, rng=False)
    restored = rankless.restore(tmp_path, model={"a": {"w": memory}, "b": {"w": memory[1:3]}}, rng=False)
    assert restored.reconstructed == ("model/a", "model/b")


@pytest.mark.parametrize("difference", ["settings", "state"])
def test_an_optimizer_under_two_names_cannot_have_two_states(difference: str, tmp_path: Path) -> None:
    model = Kept(1.0)
    first, same = step(model, 0.1, 1.0), step(model, 0.1, 1.0)
    other = step(model, 0.2, 1.0) if difference == "settings" else step(model, 0.1, 2.0)
    rankless.save_checkpoint(tmp_path, "equal", model, {"x": first, "y": same}, rng=False)
    rankless.save_checkpoint(tmp_path, "other", model, {"x": first, "y": other}, rng=False)
    fresh = optim.SGD(model.parameters(), lr=0.5)
    message = {"settings": "optimizer/y: settings of group 0: the same object as optimizer/x: settings of group 0 here"}
    assert_refused(
        tmp_path,
        message.get(difference, "optimizer/y/weight/momentum_buffer: the same tensor as optimizer/x/weight/momentum"),
        tag="other",
        model=model,
        optimizer={"x": fresh, "y": fresh},
    )
    assert not fresh.state
    restored = rankless.restore(tmp_path, "equal", model, {"x": fresh, "y": fresh}, rng=False)
    assert restored.exact == ("model", "optimizer/x", "optimizer/y")
    lenient = rankless.restore(tmp_path, "other", model, {"x": fresh, "y": fresh}, rng=False, strict=False)
    assert not {"optimizer/x", "optimizer/y"} & {*lenient.exact}


class Outer(optim.Optimizer):
    """Shares the groups of another optimizer, as wrappers do, and keeps states of its own."""

    def __init__(self, inner: optim.Optimizer, slow: float) -> None:
        super().__init__([parameter for group in inner.param_groups for parameter in group["params"]], {})
        self.param_groups = inner.param_groups
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"slow": torch.full_like(parameter, slow)}


def test_optimizers_that_share_their_groups_get_one_value_and_their_own_states(tmp_path: Path) -> None:
    model = Kept(1.0)
    inner = step(model, 0.1, 1.0)
    rankless.save_checkpoint(tmp_path, "equal", model, {"x": inner, "y": Outer(inner, 3.0)}, rng=False)
    rankless.save_checkpoint(tmp_path, "other", model, {"x": inner, "y": Outer(step(model, 0.2, 1.0), 3.0)}, rng=False)
    fresh = optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    both = {"x": fresh, "y": Outer(fresh, 0.0)}
    assert_refused(tmp_path, "settings of group 0: the same object", tag="other", model=model, optimizer=both)
    restored = rankless.restore(tmp_path, "equal", model, both, rng=False)
    assert restored.exact == ("model", "optimizer/x", "optimizer/y")
    assert both["y"].state[model.weight]["slow"].eq(3).all()
    assert torch.equal(fresh.state[model.weight]["momentum_buffer"], inner.state[model.weight]["momentum_buffer"])


def test_a_setting_that_is_a_buffer_of_the_model_is_not_called_exact(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("rate", torch.tensor(0.1))
    optimizer = optim.SGD(model.parameters(), lr=torch.tensor(0.2))
    rankless.save_checkpoint(tmp_path, "s", model, optimizer, rng=False)
    assert rankless.restore(tmp_path, None, model, optimizer, rng=False).exact == ("model", "optimizer")
    shared = optim.SGD(model.parameters(), lr=model.rate)
    restored = rankless.restore(tmp_path, None, model, shared, rng=False)
    assert restored.reconstructed == ("model", "optimizer")


@pytest.mark.parametrize(
    ("one", "other"), [(1, 2), (torch.ones(50), torch.zeros(50)), (np.ones(50), np.zeros(50)), (torch.ones(1), None)]
)
def test_a_stateful_object_under_two_names_cannot_have_two_states(one: Any, other: Any, tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "equal", stateful={"x": Holder(one), "y": Holder(one)}, rng=False)
    rankless.save_checkpoint(tmp_path, "other", stateful={"x": Holder(one), "y": Holder(other)}, rng=False)
    holder = Holder(None)
    assert_refused(tmp_path, "stateful.y", tag="other", stateful={"x": holder, "y": holder})
    assert holder.value is None
    restored = rankless.restore(tmp_path, "equal", stateful={"x": holder, "y": holder}, rng=False)
    assert restored.exact == ("stateful",)
    lenient = rankless.restore(tmp_path, "other", stateful={"x": holder, "y": holder}, rng=False, strict=False)
    assert lenient.exact == ()


def test_a_scheduler_under_two_names_cannot_have_two_states(tmp_path: Path) -> None:
    model = Kept(1.0)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    rankless.save_checkpoint(tmp_path, "s", model, optimizer, [StepLR(optimizer, 2), StepLR(optimizer, 5)], rng=False)
    twice = StepLR(optimizer, 9)
    message = "scheduler, part 1: the same object as scheduler, part 0 here"
    assert_refused(tmp_path, message, model=model, optimizer=optimizer, scheduler=[twice, twice])
    rankless.save_checkpoint(tmp_path, "t", model, optimizer, [twice, twice], stateful={"s": twice}, rng=False)
    restored = rankless.restore(tmp_path, "t", model, optimizer, [twice, twice], stateful={"s": twice}, rng=False)
    assert restored.exact == ("model", "optimizer", "scheduler", "stateful")


def test_a_module_under_two_names_cannot_have_two_extra_states(tmp_path: Path) -> None:
    for tag, extra in (("equal", 4), ("other", 5)):
        rankless.save_checkpoint(tmp_path, tag, nn.ModuleList([Kept(1.0, 4), Kept(1.0, extra)]), rng=False)
    layer = Kept(0.0)
    twice = nn.ModuleList([layer, layer])
    message = r"model/1\._extra_state: the same object as model/0\._extra_state here"
    assert_refused(tmp_path, message, tag="other", model=twice)
    assert rankless.restore(tmp_path, "equal", twice, rng=False).exact == ("model",)
    assert layer.extra == 4


def test_an_object_in_two_forms_is_not_called_exact(tmp_path: Path) -> None:
    model = Kept(1.0)
    optimizer = step(model, 0.1, 1.0)
    rankless.save_checkpoint(tmp_path, "s", model, optimizer, stateful={"o": optimizer}, rng=False)
    restored = rankless.restore(tmp_path, None, model, optimizer, stateful={"o": optimizer}, rng=False)
    assert (restored.exact, restored.reconstructed) == (("model",), ("optimizer", "stateful"))
