"""A short form of ``campaigns.families``: round trips of a few of transformers' model families.

The oracle is transformers itself: its ``save_pretrained`` and ``from_pretrained`` of the same tiny model.
"""

import re
from itertools import islice
from pathlib import Path

import pytest
import transformers

from campaigns.families.catalogue import ALWAYS, draw_families, find_family
from campaigns.families.round_trips import FSDP2, PLAIN
from campaigns.families.table import read_table
from campaigns.families.verdicts import Outcome, judge
from tests.helpers.pool import Ranks

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

#: One family of each kind that was not right once, and three drawn by a seed.
FEW = [
    "inkling2",
    "llava",
    "marian",
    "nemotron_h",
    "nomic_bert",
    "sam",
    *(family.name for family in islice(draw_families(seed=1), 3)),
]


@pytest.mark.parametrize("name", FEW)
def test_a_family_comes_back_bit_for_bit_and_has_the_files_of_save_pretrained(
    ranks: Ranks, tmp_path: Path, name: str
) -> None:
    verdict = judge(find_family(name), [PLAIN, FSDP2], ranks, tmp_path)
    assert verdict.outcome is Outcome.RIGHT, verdict


def test_the_documented_table_has_all_families_and_none_that_is_wrong() -> None:
    rows = re.findall(r"^\| ([^|]+) \| (.+) \|$", read_table(), re.MULTILINE)
    names = {
        name for verdict, text in rows if verdict != Outcome.NOT_BUILT.value for name in re.findall(r"`([^`]+)`", text)
    }
    assert set(ALWAYS) <= names
    assert len(names) >= len(ALWAYS) + 40
    assert Outcome.WRONG.value not in dict(rows), "run python -m campaigns.families --write"
