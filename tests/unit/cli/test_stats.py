"""Tests ``rankless stats``: it shows the statistics of ``rankless.compute_statistics``."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import rankless
from tests.helpers.commands import invoke, invoke_json
from tests.helpers.corruption import flip_tensor_bit


def test_shows_each_tensor_in_a_line(tmp_path: Path) -> None:
    model = {"layers.10.w": torch.tensor([-1.0, 0.0, 3.0, 0.0]), "layers.2.w": torch.tensor([1.0, math.nan, -math.inf])}
    rankless.save_checkpoint(tmp_path, "a", model, rng=False)
    lines = invoke("stats", tmp_path).stdout.splitlines()
    assert lines[0].split() == ["tensor", "dtype", "min", "max", "mean", "std", "norm", "zeros", "NaN", "inf"]
    assert lines[1].split() == ["model/layers.2.w", "F32", "1", "1", "1", "0", "1", "1", "1"]
    assert lines[2].split() == ["model/layers.10.w", "F32", "-1", "3", "0.5", "1.5", "3.162", "50.0", "%"]
    assert lines[3:] == ["2 tensors, 7 elements; 1 tensor with NaN or inf"]


def test_a_tensor_without_elements_has_no_numbers(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "a", {"w": torch.zeros(0)}, rng=False)
    assert invoke("stats", tmp_path).stdout.splitlines()[1].split() == ["model/w", "F32", "0"]


def test_for_programs(made: Path) -> None:
    report = invoke_json("stats", made, "--tag", "step_2")
    expected = rankless.compute_statistics(made / "step_2").tensors
    assert report["path"] == str(made / "step_2")
    assert [entry["name"] for entry in report["tensors"]] == list(expected)
    shapes = {entry["name"]: entry["shape"] for entry in invoke_json("show", made)["tensors"]}
    for entry in report["tensors"]:
        statistics = expected[entry["name"]]
        assert entry["shape"] == shapes[entry["name"]]
        for name in ("elements", "nans", "zeros", "minimum", "maximum", "mean", "norm", "std"):
            assert entry[name] == getattr(statistics, name)
        assert sum(count for _, _, count in entry["histogram"]) == statistics.finite


def test_the_histogram_has_the_bounds_of_its_buckets(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "a", {"w": torch.tensor([-3.0, 0.0, 0.75, 1e9])}, rng=False)
    (entry,) = invoke_json("stats", tmp_path)["tensors"]
    assert entry["histogram"] == [[-4.0, -2.0, 1], [0.0, 0.0, 1], [0.5, 1.0, 1], [32768.0, None, 1]]


def test_a_pattern_selects_tensors(made: Path) -> None:
    names = [entry["name"] for entry in invoke_json("stats", made, "*.bias")["tensors"]]
    assert names
    assert all(name.endswith(".bias") for name in names)
    assert "no tensor of" in invoke("stats", made, "nothing", code=1).stderr


def test_corruption_is_an_error(run: Path) -> None:
    flip_tensor_bit(run / "step_3/model/model.safetensors", "scale")
    assert "'scale'" in invoke("stats", run, code=1).stderr


@pytest.mark.parametrize("name", ["\x1b[31mred", "<b>"])
def test_hostile_names_are_text(tmp_path: Path, name: str) -> None:
    rankless.save_checkpoint(tmp_path, "a", {name: torch.ones(2)}, rng=False)
    assert "\x1b" not in invoke("stats", tmp_path).stdout
