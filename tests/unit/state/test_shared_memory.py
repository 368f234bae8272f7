"""Tests of objects over the same memory, parameters or states: a load cannot give each its own value."""

from pathlib import Path

import pytest
import torch
from torch import nn, optim

import rankless
from rankless.errors import MismatchError


class Two(nn.Module):
    """Two parameters."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)


def test_different_values_for_the_same_memory_are_refused(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "a", model=Two(torch.ones(4, 3), torch.zeros(4, 3)))
    memory = torch.full((4, 3), 9.0)
    with pytest.raises(MismatchError, match="b: the same tensor as a here"):
        rankless.restore(tmp_path, model=Two(memory, memory))
    assert memory.eq(9).all()


def test_equal_values_for_the_same_memory_are_exact(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "a", model=Two(torch.ones(4, 3), torch.ones(4, 3)))
    memory = torch.zeros(4, 3)
    assert "model" in rankless.restore(tmp_path, model=Two(memory, memory)).exact
    assert memory.eq(1).all()


@pytest.mark.parametrize("part", [slice(2), slice(1, 3)])
def test_memory_that_is_shared_in_part_is_not_called_exact(part: slice, tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "a", model=Two(torch.ones(4, 3), torch.zeros(2, 3)))
    memory = torch.zeros(4, 3)
    assert "model" in rankless.restore(tmp_path, model=Two(memory, memory[part])).reconstructed


def test_separate_parts_of_one_storage_are_exact(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "a", model=Two(torch.ones(2, 3), torch.zeros(2, 3)))
    memory = torch.full((4, 3), 9.0)
    assert "model" in rankless.restore(tmp_path, model=Two(memory[:2], memory[2:])).exact
    columns = torch.full((2, 6), 9.0)
    assert "model" in rankless.restore(tmp_path, model=Two(columns[:, :3], columns[:, 3:])).exact
    assert columns.sum(0).tolist() == [2.0] * 3 + [0.0] * 3


class Keeps(optim.Optimizer):
    """Keeps states ``a`` and ``b`` of each parameter."""

    def __init__(self, model: nn.Module, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        for parameter in model.parameters():
            self.state[parameter] = {"a": a, "b": b}


@pytest.mark.parametrize("part", [slice(4), slice(2)])
def test_states_that_share_memory_get_no_values_that_differ(part: slice, tmp_path: Path) -> None:
    model = nn.Linear(1, 4, bias=False)
    size = part.stop
    rankless.save_checkpoint(tmp_path, "a", model, Keeps(model, torch.ones(4, 1), torch.zeros(size, 1)))
    memory = torch.full((4, 1), 9.0)
    target = Keeps(model, memory, memory[part])
    if size < len(memory):
        assert "optimizer" in rankless.restore(tmp_path, None, model, target).reconstructed
        return
    with pytest.raises(MismatchError, match="weight/b: the same tensor as weight/a here"):
        rankless.restore(tmp_path, None, model, target)
    assert memory.eq(9).all()


def test_states_that_share_memory_get_equal_values(tmp_path: Path) -> None:
    model = nn.Linear(1, 4, bias=False)
    rankless.save_checkpoint(tmp_path, "a", model, Keeps(model, torch.ones(4, 1), torch.ones(4, 1)))
    memory = torch.zeros(4, 1)
    target = Keeps(model, memory, memory)
    assert "optimizer" in rankless.restore(tmp_path, None, model, target).exact
    assert memory.eq(1).all()


def test_a_state_in_the_memory_of_a_parameter_gets_its_own(tmp_path: Path) -> None:
    model = nn.Linear(1, 4, bias=False)
    saved = model.weight.detach().clone()
    rankless.save_checkpoint(tmp_path, "a", model, Keeps(model, torch.ones(4, 1), torch.zeros(4, 1)))
    target = Keeps(model, model.weight.detach(), torch.empty(4, 1))
    assert "optimizer" in rankless.restore(tmp_path, None, model, target).exact
    assert torch.equal(model.weight, saved)
    assert target.state[model.weight]["a"].eq(1).all()
