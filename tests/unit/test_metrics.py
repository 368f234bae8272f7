"""Tests metrics of saves: numbers, and tensors of one element as they are at the call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rankless
from rankless.errors import InvalidArgumentError


@pytest.mark.parametrize(
    "value", [0.5, torch.tensor(0.5), torch.tensor([[0.5]], requires_grad=True), np.float32(0.5), np.array([0.5])]
)
def test_a_metric_is_a_number_or_has_one_element(tmp_path: Path, value: Any) -> None:
    rankless.save_checkpoint(tmp_path, "s", torch.nn.Linear(2, 2), metrics={"loss": value})
    assert rankless.open(tmp_path, "s").metrics == {"loss": 0.5}


def test_an_asynchronous_save_stores_the_metrics_of_its_call(tmp_path: Path) -> None:
    loss = torch.tensor(0.5)
    handle = rankless.save_checkpoint(tmp_path, "s", torch.nn.Linear(2, 2), metrics={"loss": loss}, async_save=True)
    loss += 1
    assert handle.wait().metrics == {"loss": 0.5}


@pytest.mark.parametrize("value", [torch.zeros(2), np.zeros(2), "0.5", None, [0.5], torch.tensor(1j)])
def test_anything_else_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="loss"):
        rankless.save_checkpoint(tmp_path, "s", torch.nn.Linear(2, 2), metrics={"loss": value})
    with pytest.raises(InvalidArgumentError, match="metrics"):
        rankless.save_checkpoint(tmp_path, "s", torch.nn.Linear(2, 2), metrics=[value])  # type: ignore[arg-type]
    assert rankless.list_checkpoints(tmp_path) == []


def test_metrics_that_are_not_finite_are_stored_as_null(tmp_path: Path) -> None:
    metrics = {"a": torch.tensor(torch.nan), "b": float("inf")}
    rankless.save_checkpoint(tmp_path, "s", torch.nn.Linear(2, 2), metrics=metrics)
    assert rankless.open(tmp_path, "s").metrics == {"a": None, "b": None}


def test_an_empty_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgumentError, match="path is empty"):
        rankless.save_checkpoint("", "s", torch.nn.Linear(2, 2))
    assert not list(tmp_path.iterdir())
