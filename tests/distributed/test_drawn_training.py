"""Drawn training states: what a load calls exact is what the ranks held, whatever one of them had changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.drawn_cases import draw_case
from tests.helpers.drawn_training import check_case
from tests.helpers.pool import Ranks


def _check_range(ranks: Ranks, folder: Path, first: int, count: int) -> set[str]:
    return {check_case(ranks, folder / str(seed), draw_case(seed)) for seed in range(first, first + count)}


def test_what_a_load_calls_exact_is_what_the_ranks_held(ranks: Ranks, tmp_path: Path) -> None:
    assert _check_range(ranks, tmp_path, 0, 6) == {"exact", "inexact", "refused"}


@pytest.mark.full
@pytest.mark.parametrize("first", range(6, 106, 20))
def test_what_further_loads_call_exact_is_what_the_ranks_held(ranks: Ranks, tmp_path: Path, first: int) -> None:
    _check_range(ranks, tmp_path, first, 20)
