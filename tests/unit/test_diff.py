"""Tests of ``rankless.diff`` in Python: what it returns is what the command shows, and what the tensors say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import rankless
from rankless.errors import CorruptCheckpointError, NoCheckpointError
from tests.helpers.commands import invoke_json
from tests.helpers.corruption import flip_tensor_bit


def save(path: Path, tag: str, model: dict[str, torch.Tensor], **content: Any) -> Path:
    rankless.save_checkpoint(path, tag, model, user_content=content, rng=False)
    return path / tag


def test_equal_checkpoints_have_no_differences(tmp_path: Path) -> None:
    paths = [save(tmp_path, tag, {"w": torch.ones(3), "v": torch.zeros(2)}, lr=1) for tag in "ab"]
    same = rankless.diff(*paths)
    assert not same
    assert (same.tensors, same.values, same.compared) == ([], [], 2)
    assert (same.left, same.right) == tuple(paths)


def test_each_difference_is_described(tmp_path: Path) -> None:
    left = {"same": torch.ones(3), "small": torch.ones(4), "large": torch.ones(2), "gone": torch.ones(1)}
    left |= {"shape": torch.ones(2, 3), "nan": torch.ones(2), "cast": torch.ones(2)}
    right = {"same": torch.ones(3), "small": torch.tensor([1, 1, 1.5, 1]), "large": torch.tensor([1.0, 9.0])}
    right |= {"shape": torch.ones(6), "nan": torch.tensor([1, math.nan]), "cast": torch.ones(2).bfloat16()}
    right |= {"new": torch.ones(1)}
    paths = save(tmp_path, "a", left, lr=0.1, old=[1]), save(tmp_path, "b", right, lr=0.2, new="x")
    found = rankless.diff(*paths)
    assert found
    tensors = {tensor.name.removeprefix("model/"): tensor for tensor in found.tensors}
    assert tensors.keys() == {"small", "large", "gone", "shape", "nan", "cast", "new"}
    assert [tensor.name for tensor in found.tensors][:3] == ["model/nan", "model/large", "model/small"]
    small = tensors["small"]
    assert (small.elements, small.differing, small.max_abs, small.max_rel) == (4, 1, 0.5, pytest.approx(1 / 3))
    assert (tensors["nan"].max_abs, tensors["cast"].differing) == (math.inf, 0)
    assert (tensors["gone"].right, tensors["new"].left) == (None, None)
    assert [info and tuple(info.shape) for info in (tensors["shape"].left, tensors["shape"].right)] == [(2, 3), (6,)]
    values = {value.path: (value.left, value.right, value.only_in) for value in found.values}
    assert values == {
        "user_content.lr": (0.1, 0.2, ""),
        "user_content.old": ([1], None, "left"),
        "user_content.new": (None, "x", "right"),
    }
    told = invoke_json("diff", *paths, code=1)
    assert {tensor["name"] for tensor in told["tensors"]} == {tensor.name for tensor in found.tensors}


def test_a_pattern_selects_tensors_only(tmp_path: Path) -> None:
    paths = [save(tmp_path, f"s{n}", {"a.w": torch.full((2,), n), "b.w": torch.full((2,), n)}, n=n) for n in (1, 2)]
    found = rankless.diff(*paths, pattern="a.*")
    assert [tensor.name for tensor in found.tensors] == ["model/a.w"]
    assert not found.values


def test_a_run_stands_for_its_latest_checkpoint_and_formats_may_differ(tmp_path: Path) -> None:
    save(tmp_path / "run", "old", {"w": torch.zeros(3)})
    save(tmp_path / "run", "new", {"w": torch.ones(3)})
    torch.save({"w": torch.ones(3)}, tmp_path / "file.pt")
    assert not rankless.diff(tmp_path / "run", tmp_path / "file.pt", "w").tensors


def test_errors(tmp_path: Path) -> None:
    left, right = (save(tmp_path, tag, {"w": torch.full((5000,), float(n))}) for n, tag in enumerate("ab"))
    with pytest.raises(NoCheckpointError):
        rankless.diff(left, tmp_path / "none")
    flip_tensor_bit(next(right.glob("model/*.safetensors")), "w")
    with pytest.raises(CorruptCheckpointError, match="model tensor 'w'"):
        rankless.diff(left, right)
