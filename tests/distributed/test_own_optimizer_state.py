"""Tests of what optimizers keep beside states and settings, on several ranks."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn, optim

import rankless
from rankless.errors import MismatchError
from tests.helpers.pool import Ranks


class Averaging(optim.SGD):
    """Keeps a number by its own state dict."""

    average = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = state_dict.pop("average")
        super().load_state_dict(state_dict)


class Lazy(optim.SGD):
    """Keeps a number once it has one."""

    average: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **({} if self.average is None else {"average": self.average})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = state_dict.pop("average", None)
        super().load_state_dict(state_dict)


def save_and_resume(path: str, kind: str) -> tuple[Any, ...]:
    """Save with a number of each rank, and load it again. Return the report, the number, and the warnings."""
    rank = dist.get_rank()
    model = nn.ModuleDict({f"stage{rank if kind == 'stages' else 0}": nn.Linear(2, 2)})
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    optimizer = Averaging(model.parameters(), lr=0.1)
    if kind == "some":
        optimizer = Lazy(model.parameters(), lr=0.1)
    if kind != "some" or rank == 0:
        optimizer.average = 5.0 if kind == "equal" else 5.0 + rank
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rankless.save_checkpoint(path, "a", model, optimizer)
    optimizer.average = 0.0
    restored = rankless.restore(path, None, model, optimizer)
    return restored.exact, restored.reconstructed, optimizer.average, [str(warning.message) for warning in caught]


def test_each_stage_of_a_pipeline_gets_its_own_values(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = ranks(2, save_and_resume, str(tmp_path), "stages")
    assert [average for _, _, average, _ in outcomes] == [5.0, 6.0]
    assert all("optimizer" in exact and not texts for exact, _, _, texts in outcomes)


def test_equal_values_are_exact(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = ranks(2, save_and_resume, str(tmp_path), "equal")
    assert all("optimizer" in exact and not texts for exact, _, _, texts in outcomes)


def test_replicas_with_different_values_are_reconstructed_with_a_warning(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = ranks(2, save_and_resume, str(tmp_path), "replicas")
    for exact, reconstructed, average, _ in outcomes:
        assert "optimizer" not in exact
        assert "optimizer" in reconstructed
        assert average == 5.0
    assert ["keep different values" in " ".join(texts) for *_, texts in outcomes] == [True, False]


def test_values_that_only_some_replicas_have_are_reconstructed(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = ranks(2, save_and_resume, str(tmp_path), "some")
    assert [(exact, average) for exact, _, average, _ in outcomes] == [(("model", "rng"), 5.0)] * 2


def save_lazy_stages(path: str) -> None:
    model = nn.ModuleDict({f"stage{dist.get_rank()}": nn.Linear(2, 2)})
    optimizer = Lazy(model.parameters(), lr=0.1)
    optimizer.average = 5.0 + dist.get_rank()
    rankless.save_checkpoint(path, "a", model, optimizer)


def test_different_values_of_stages_are_refused_by_an_optimizer_of_all(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_lazy_stages, str(tmp_path))
    model = nn.ModuleDict({f"stage{number}": nn.Linear(2, 2) for number in range(2)})
    with pytest.raises(MismatchError, match="keeps values"):
        rankless.restore(str(tmp_path), None, model, Lazy(model.parameters(), lr=0.1))
