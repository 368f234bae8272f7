"""Tests of the names that stand for several tensors: each row names exactly the tensors that it counts."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankless.cli.show.module_sizes import ModuleSummary, fold_modules
from rankless.inspection.folding import fold_tensors
from rankless.ondisk.data_files import TensorInfo

SMALL, LARGE = TensorInfo("F32", (2,)), TensorInfo("BF16", (4, 4))


def expand(name: str) -> list[str]:
    """Return the names that a folded name stands for, as a shell does."""
    parts = re.split(r"(\{[^}]*\})", name)
    choices = [_numbers(part) if part.startswith("{") else [part] for part in parts]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _numbers(braces: str) -> list[str]:
    runs = [run.split("..") for run in braces[1:-1].split(",")]
    return [str(number) for run in runs for number in range(int(run[0]), int(run[-1]) + 1)]


components = st.sampled_from(["a", "b", "layers", "0", "1", "2", "3", "7", "x1", "10"])
names = st.lists(components, min_size=1, max_size=4).map(".".join)


@given(st.dictionaries(names, st.sampled_from([SMALL, LARGE]), max_size=40))
def test_rows_stand_for_exactly_the_tensors(tensors: dict[str, TensorInfo]) -> None:
    rows = list(fold_tensors(tensors))
    shown = [(name, row.info) for row in rows for name in expand(row.name)]
    assert Counter(shown) == Counter(tensors.items())
    assert all(row.count == len(expand(row.name)) for row in rows)
    assert sum(row.nbytes for row in rows) == sum(info.nbytes for info in tensors.values())


@pytest.mark.parametrize(
    ("layers", "folded"),
    [
        (range(4), ["layers.{0..3}.w"]),
        ([0, 1, 5, 7, 8], ["layers.{0..1,5,7..8}.w"]),
        ([3], ["layers.3.w"]),
    ],
)
def test_ranges(layers: list[int], folded: list[str]) -> None:
    assert [row.name for row in fold_tensors({f"layers.{n}.w": SMALL for n in layers})] == folded


def test_experts_of_layers_are_folded_twice_unless_one_is_missing() -> None:
    experts = {f"layers.{layer}.experts.{n}.w/exp_avg": LARGE for layer in range(3) for n in range(8)}
    assert [row.name for row in fold_tensors(experts)] == ["layers.{0..2}.experts.{0..7}.w/exp_avg"]
    del experts["layers.1.experts.3.w/exp_avg"]
    assert [row.name for row in fold_tensors(experts)] == list(experts)


def test_modules_of_equal_sizes_are_folded() -> None:
    modules = [ModuleSummary("model", "", 9, 90), *(ModuleSummary("model", f"layers.{n}", 2, 20) for n in range(3))]
    modules += [ModuleSummary("model", "layers.3", 3, 30), ModuleSummary("optimizer", "layers.0", 2, 20)]
    assert fold_modules(modules) == [
        ModuleSummary("model", "", 9, 90),
        ModuleSummary("model", "layers.{0..2}", 6, 60),
        ModuleSummary("model", "layers.3", 3, 30),
        ModuleSummary("optimizer", "layers.0", 2, 20),
    ]
