"""Tests of settings of optimizers that are tensors in the training that loads, such as the rate of a captured step."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rankless
from rankless.errors import UnsupportedValueError


class Custom(torch.optim.SGD):
    """Has code of its own for its state dict."""

    own: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "own": self.own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.own = state_dict.pop("own")
        super().load_state_dict(state_dict)


def make(setting: Any, kind: type[torch.optim.SGD] = torch.optim.SGD) -> tuple[nn.Module, torch.optim.SGD]:
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["x"] = setting
    return model, optimizer


def load(tmp_path: Path, saved: Any, current: Any) -> tuple[Any, bool]:
    """Save with one setting, and load where there is another. Return the setting, and whether the load is exact."""
    rankless.save_checkpoint(tmp_path, "a", *make(saved))
    model, optimizer = make(current)
    restored = rankless.restore(tmp_path, None, model, optimizer)
    assert ("optimizer" in restored.exact) is ("optimizer" not in restored.reconstructed)
    return optimizer.param_groups[0]["x"], "optimizer" in restored.exact


FITTING = [
    (torch.tensor(0.7), torch.tensor(0.1)),
    (0.5, torch.tensor(0.1)),
    (np.float64(0.5), torch.tensor([0.1])),
    (3, torch.tensor(1)),
    (torch.tensor([1.0, float("nan")]), torch.zeros(2)),
    (torch.tensor(0.5, dtype=torch.bfloat16), torch.tensor(0.1)),
]


@pytest.mark.parametrize(("saved", "current"), FITTING)
def test_a_tensor_with_room_for_the_value_is_filled_in_place(tmp_path: Path, saved: Any, current: torch.Tensor) -> None:
    setting, is_exact = load(tmp_path, saved, current)
    assert setting is current
    assert is_exact
    np.testing.assert_array_equal(setting.double().reshape(np.shape(saved)), torch.as_tensor(saved).double())


@pytest.mark.parametrize("saved", [torch.tensor(0.1, dtype=torch.float64), 0.1])
def test_a_value_that_is_rounded_is_not_called_exact(tmp_path: Path, saved: Any) -> None:
    current = torch.tensor(0.5)
    setting, is_exact = load(tmp_path, saved, current)
    assert setting is current
    assert setting == torch.tensor(0.1)
    assert not is_exact


OTHERS = [
    (torch.tensor(0.7), torch.tensor(3)),
    (0.7, torch.tensor(3)),
    (2**70, torch.tensor(3)),
    (np.uint64(2**63), torch.tensor(3)),
    (torch.tensor(7), torch.tensor(data=False)),
    (torch.tensor(1 + 2j), torch.tensor(1.0)),
    (torch.tensor([2**24 + 1, 5]), torch.zeros(2)),
    (np.array([1.1, 2.1]), torch.zeros(2)),
    (torch.tensor([0.1]), torch.tensor(0.5)),
    (torch.tensor([1.0, 2.0]), torch.zeros(1).expand(2)),
    (torch.zeros(3), torch.zeros(2)),
    ("linear", torch.zeros(2)),
    (None, torch.zeros(2)),
]


@pytest.mark.parametrize(("saved", "current"), OTHERS)
def test_any_other_value_replaces_the_tensor(tmp_path: Path, saved: Any, current: torch.Tensor) -> None:
    before = current.clone()
    setting, is_exact = load(tmp_path, saved, current)
    assert type(setting) is type(saved)
    assert getattr(setting, "dtype", None) == getattr(saved, "dtype", None)
    assert np.array_equal(np.asarray(setting), np.asarray(saved))
    assert is_exact
    assert torch.equal(current, before)


def test_a_parameter_is_filled_in_place(tmp_path: Path) -> None:
    current = nn.Parameter(torch.tensor(0.5))
    setting, is_exact = load(tmp_path, torch.tensor(0.25), current)
    assert setting is current
    assert is_exact
    assert setting.item() == 0.25


def share(values: list[float]) -> tuple[nn.Module, torch.optim.Optimizer, list[torch.Tensor]]:
    """Make an optimizer of two groups, with a tensor for each different value."""
    model, tensors = nn.Linear(2, 2), {value: torch.tensor(value) for value in values}
    groups = [{"params": [parameter], "lr": tensors[values[n]]} for n, parameter in enumerate(model.parameters())]
    return model, torch.optim.AdamW(groups, lr=0.1), [tensors[value] for value in values]


@pytest.mark.parametrize("saved", [[0.5, 0.5], [0.5, 0.25], [3, 3], [3, 4], [float("nan")] * 2])
def test_groups_share_a_tensor_as_long_as_they_get_one_value(tmp_path: Path, saved: list[float]) -> None:
    rankless.save_checkpoint(tmp_path, "a", *share(saved)[:2])
    model, optimizer, (shared, _) = share([type(saved[0])(1)] * 2)
    restored = rankless.restore(tmp_path, None, model, optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    np.testing.assert_equal([rate.item() for rate in rates], saved)
    assert all(rate is shared for rate in rates) is (repr(saved[0]) == repr(saved[1]))
    assert "optimizer" in restored.exact


COLLECTED = [
    np.array([1.0, 2.0]),
    [np.array([1.0, 2.0])],
    deque([np.array([1.0])], maxlen=3),
    OrderedDict(a=torch.tensor([1.0, 2.0]), b=1),
    {"a": np.array([1.0, 2.0])},
]


@pytest.mark.parametrize("setting", COLLECTED, ids=lambda setting: type(setting).__name__)
def test_an_optimizer_with_own_code_gets_collections_back(tmp_path: Path, setting: Any) -> None:
    rankless.save_checkpoint(tmp_path, "a", *make(setting, Custom))
    model, optimizer = make(copy.deepcopy(setting), Custom)
    restored = rankless.restore(tmp_path, None, model, optimizer)
    assert "optimizer" in restored.exact
    assert repr(optimizer.param_groups[0]["x"]) == repr(setting)


@pytest.mark.parametrize("place", ["setting", "own", "scheduler"])
def test_an_empty_array_is_stored(tmp_path: Path, place: str) -> None:
    def make_empty() -> tuple[Any, ...]:
        model, optimizer = make(np.zeros(0) if place == "setting" else 1, Custom)
        optimizer.own = np.zeros(0) if place == "own" else 1
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        schedule.seen = np.zeros(0) if place == "scheduler" else 1  # type: ignore[attr-defined]
        return model, optimizer, schedule

    rankless.save_checkpoint(tmp_path, "a", *make_empty())
    assert {"optimizer", "scheduler"} <= {*rankless.restore(tmp_path, None, *make_empty()).exact}


def test_an_array_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    model, optimizer = make(1, Custom)
    optimizer.own = {"history": np.zeros(2, np.complex128)}
    with pytest.raises(UnsupportedValueError, match=r"own.*history: a NumPy array of dtype complex128"):
        rankless.save_checkpoint(tmp_path, "a", model, optimizer)
