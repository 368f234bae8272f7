"""Tests that the changes which the random histories must notice still fit the sources."""

from pathlib import Path

import pytest

import rankless
from campaigns.run_histories.mutants import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place(mutant: Mutant) -> None:
    text = (Path(rankless.__file__).parent / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    assert mutant.new not in {mutant.old, ""}
