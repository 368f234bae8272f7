"""Tests of states that a checkpoint could not restore as they are: a save refuses them."""

from collections import OrderedDict, deque
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn, optim

import rankless
from rankless.errors import InvalidArgumentError, UnsupportedTensorError, UnsupportedValueError


class Keeps(optim.Optimizer):
    """Keeps given states of each parameter."""

    def __init__(self, params: Any, states: dict[Any, Any]) -> None:
        super().__init__(params, {"lr": 0.1})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = states


class Gives(optim.SGD):
    """Gives a table by its own state dict."""

    table: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "table": self.table}


class Marked(torch.Tensor):
    """A tensor of a class without data of its own."""


class Name(StrEnum):
    A = "a"


class Table(dict[str, int]):
    pass


class Ordered(OrderedDict[str, int]):
    pass


class Row(list[int]):
    pass


class Queue(deque[int]):
    pass


class Two(NamedTuple):
    first: int
    second: int


class Pair(Two):
    """Has attributes, too."""


class Number(float):
    pass


class Array(np.ndarray):  # type: ignore[type-arg]
    pass


class Slots:
    __slots__ = ("hidden",)


class HalfSlots(Slots):
    def __init__(self) -> None:
        self.hidden, self.seen = 1, 2


class Circle:
    def __init__(self) -> None:
        self.again = [self]


class Counter:
    def __init__(self) -> None:
        self.number = 3


def endless() -> list[Any]:
    values: list[Any] = []
    values.append(values)
    return values


def is_refused(tmp_path: Path, optimizer: optim.Optimizer, model: nn.Module) -> str:
    with pytest.raises(UnsupportedValueError) as error:
        rankless.save_checkpoint(tmp_path, "a", model, optimizer)
    assert not rankless.has_checkpoint(tmp_path)
    return str(error.value)


@pytest.mark.parametrize("key", [0, None, (1, 2), Name.A])
def test_states_without_a_name_that_is_text_are_refused(key: Any, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    message = is_refused(tmp_path, Keeps(model.parameters(), {key: 1, str(key): 2}), model)
    assert f"optimizer state {key!r} of 'weight'" in message


@pytest.mark.parametrize(
    "value",
    [
        {"rankless.part": "queue.0"},
        [{"deeper": ({"rankless.object": "a:b", "attributes": {}},)}],
        {"dimension_order": [1, 0]},
        {"tensor_subclass": "A", "shape": [2], "inner": ["x"], "context": None},
    ],
)
def test_values_that_look_like_descriptions_are_refused(value: Any, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    states = {"value": value, "queue": [torch.ones(2, 2)]}
    assert "optimizer state 'value' of 'weight'" in is_refused(tmp_path, Keeps(model.parameters(), states), model)


def test_a_tensor_of_a_class_that_a_load_could_not_give_back_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = Keeps(model.parameters(), {"value": torch.zeros(2, 2).as_subclass(Marked)})
    with pytest.raises(UnsupportedTensorError, match="'value' of 'weight' is a tensor of the class Marked"):
        rankless.save_checkpoint(tmp_path, "a", model, optimizer)


def test_an_object_of_the_optimizers_package_is_loaded_however_deep_it_is(tmp_path: Path) -> None:
    value: Any = Counter()
    for _ in range(60):
        value = [value]
    model = nn.Linear(2, 2, bias=False)
    rankless.save_checkpoint(tmp_path, "a", model, Keeps(model.parameters(), {"value": value}))
    loaded = Keeps(model.parameters(), {})
    rankless.restore(tmp_path, None, model, loaded)
    value = loaded.state[model.weight]["value"]
    for _ in range(60):
        (value,) = value
    assert (type(value), value.number) == (Counter, 3)


def test_states_of_the_class_of_their_parameter_are_loaded_as_such(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False)
    model.weight = nn.Parameter(torch.ones(2, 2).as_subclass(Marked))
    optimizer = Keeps(model.parameters(), {"value": torch.zeros_like(model.weight)})
    rankless.save_checkpoint(tmp_path, "a", model, optimizer)
    loaded = Keeps(model.parameters(), {})
    rankless.restore(tmp_path, None, model, loaded)
    assert type(loaded.state[model.weight]["value"]) is Marked


def test_a_reserved_key_in_an_own_state_dict_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = Gives(model.parameters())
    optimizer.table = {"rankless.state": [0, "x"]}
    assert "'rankless.state'" in is_refused(tmp_path, optimizer, model)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Table(x=1),
        lambda: Ordered(x=1),
        lambda: Row([1]),
        lambda: Queue([1]),
        lambda: Pair(1, 2),
        lambda: Number(1.5),
        lambda: np.arange(3.0).view(Array),
        HalfSlots,
        Circle,
        endless,
    ],
)
def test_objects_that_are_more_than_their_attributes_are_refused(make: Callable[[], Any], tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for value in (make(), {"deeper": [make()]}):
        is_refused(tmp_path, Keeps(model.parameters(), {"value": value}), model)


@pytest.mark.parametrize("key", [5, 0.5, None, True, ("a", 1), b"x", torch.float32, Name.A])
@pytest.mark.parametrize("form", [lambda optimizer: optimizer, optim.Optimizer.state_dict])
def test_settings_without_a_name_that_is_text_are_refused(key: Any, form: Callable[[Any], Any], tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = optim.SGD([{"params": [model.weight]}, {"params": [model.bias], key: 1}])
    message = is_refused(tmp_path, form(optimizer), model)
    assert "group 1 of the optimizer" in message
    assert repr(key) in message


@pytest.mark.parametrize("names", [[0, 1], ["a"], [None, "b"], ["\ud800", "b"], 5])
def test_names_in_a_group_that_are_none_are_refused(names: Any, tmp_path: Path) -> None:
    optimizer = optim.SGD(nn.Linear(2, 2).parameters())
    optimizer.param_groups[0]["param_names"] = names
    with pytest.raises(InvalidArgumentError, match=r"the name of parameter . of the optimizer's group 0"):
        rankless.save_checkpoint(tmp_path, "a", optimizer=optimizer)
    assert not rankless.has_checkpoint(tmp_path)


@pytest.mark.parametrize("key", [1, True, -0.0])
def test_an_entry_that_torch_takes_for_a_parameter_is_refused(key: Any, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = Gives(model.parameters())
    optimizer.state[key] = {"value": 3}
    assert repr(key) in is_refused(tmp_path, optimizer, model)


@pytest.mark.parametrize("state", [{"stateful": {"\ud800": optim.SGD([torch.ones(1)])}}, {"model": {"\ud800": 5}}])
def test_names_that_files_cannot_have_are_refused(state: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"must be text without lone surrogates; got '.ud800'"):
        rankless.save_checkpoint(tmp_path, "a", **state)
