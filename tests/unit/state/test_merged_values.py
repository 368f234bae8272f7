"""Tests of values of several ranks: those of other types, or with another sign, are other values."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankless
from rankless.errors import OptimizerMismatchError, StateError
from rankless.state.optimizer.own_state import merge_own
from rankless.state.optimizer.param_groups import merge_groups
from rankless.state.schedulers_by_params import find_entries, merge_entries

PAIRS = [(1, 1.0), (True, 1), (0.0, -0.0), ([1], [True])]


def group(*, state: Any = 1, setting: Any = 1) -> dict[str, Any]:
    settings = {"lr": setting, "betas": 2}
    return {"class": "A", "number": 0, "params": ["w"], "ordered": True, "settings": settings, "state": {"w": state}}


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_states_and_settings_of_other_types_are_refused(one: Any, other: Any) -> None:
    with pytest.raises(StateError, match="different optimizer state of 'w'"):
        merge_groups([[group(state={"s": one})], [group(state={"s": other})]])
    with pytest.raises(StateError, match="with different settings"):
        merge_groups([[group(setting=one)], [group(setting=other)]])


@pytest.mark.filterwarnings("ignore:ranks ")
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_own_values_and_schedulers_of_other_types_are_marked(one: Any, other: Any) -> None:
    (entry,) = merge_own([{"params": ["w"], "values": {"x": value}} for value in (one, other)])
    assert entry["differed"]
    entries = merge_entries([[{"class": "A", "params": [["w"]], "state": {"x": v}}] for v in (one, other)])
    _, is_uncertain = find_entries(entries, [[["w"]]])
    assert is_uncertain


def test_the_order_of_keys_does_not_matter() -> None:
    turned = group()
    turned["settings"] = dict(reversed(turned["settings"].items()))
    assert merge_groups([[group()], [turned]]) == [group()]


def adam(model: nn.ModuleDict, *names: str) -> torch.optim.Optimizer:
    """Return an optimizer with a group for each of the ``names``, of the layers in it."""
    return torch.optim.Adam([{"params": [p for key in group for p in model[key].parameters()]} for group in names])


@pytest.mark.parametrize("groups", [["ab", "cd"], ["ac", "bd"], ["a", "b", "cd"], ["abcd"]])
def test_equal_groups_of_several_optimizers_may_be_several_of_one(groups: list[str], tmp_path: Path) -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in "abcd"})
    saved, loaded = [adam(model, "ab"), adam(model, "cd")], adam(model, *groups)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    for optimizer in saved:
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()
    rankless.save_checkpoint(tmp_path, "s", model, saved, rng=False)
    assert rankless.restore(tmp_path, None, model, loaded, rng=False).exact == ("model", "optimizer")
    assert [group["lr"] for group in loaded.param_groups] == [0.5] * len(groups)
    expected = {**saved[0].state, **saved[1].state}
    for parameter in model.parameters():
        assert torch.equal(loaded.state[parameter]["exp_avg"], expected[parameter]["exp_avg"])


def test_a_group_of_one_optimizer_that_is_divided_is_refused(tmp_path: Path) -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in "ab"})
    rankless.save_checkpoint(tmp_path, "s", model, adam(model, "ab"), rng=False)
    with pytest.raises(OptimizerMismatchError, match="groups 0 and 1 of the optimizer hold parameters that are in one"):
        rankless.restore(tmp_path, None, model, adam(model, "a", "b"), rng=False)
