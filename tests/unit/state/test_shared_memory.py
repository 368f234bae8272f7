"""Tests of models whose parameters are several objects over the same memory: a load cannot give each its own value."""

from pathlib import Path

import pytest
import torch
from torch import nn

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
