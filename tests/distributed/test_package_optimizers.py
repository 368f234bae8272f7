"""A short form of ``python -m campaigns.optimizers packages``, and its oracle: what differs between two runs."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from campaigns.optimizers.catalog import is_installed, list_recipes
from campaigns.optimizers.round_trip import try_optimizers
from campaigns.optimizers.snapshot import find_differences
from campaigns.optimizers.table import read_results
from tests.helpers.pairwise import first_of
from tests.helpers.pool import Ranks


@first_of(1, ("package", "layout"), product(["torch", "torchao"], ["plain", "fsdp2"]))
def test_the_optimizers_of_a_package_are_restored_as_the_table_says(
    ranks: Ranks, tmp_path: Path, package: str, layout: str
) -> None:
    if not is_installed(package):
        pytest.skip(f"{package} is not installed")
    expected = read_results()[package][layout]
    names = [name for name in list_recipes(package) if name in expected]
    verdicts = try_optimizers(ranks, tmp_path, package, names, layout)
    assert {name: verdict.kind for name, verdict in verdicts.items()} == {name: expected[name][0] for name in names}


def test_an_optimizer_is_restored_by_fewer_and_by_more_ranks(ranks: Ranks, tmp_path: Path) -> None:
    assert try_optimizers(ranks, tmp_path, "torch", ["Adam"], "fsdp2")["Adam"].kind == "exact"


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.tensor([1.0]), torch.tensor(1.0)),
        (torch.tensor(0.5), 0.5),
        (1, True),
        (1, 1.0),
        (None, 0),
    ],
)
def test_values_of_other_bits_or_types_differ(saved: Any, loaded: Any) -> None:
    assert find_differences({"state": saved}, {"state": loaded}) == ["state"]


def test_what_only_one_run_has_differs() -> None:
    assert find_differences({"saved": None}, {"loaded": None}) == ["saved", "loaded"]


@pytest.mark.parametrize("value", [torch.tensor([torch.nan, -0.0]), float("nan"), "text", None])
def test_equal_values_do_not_differ(value: Any) -> None:
    assert find_differences({"state": value}, {"state": value}) == []
