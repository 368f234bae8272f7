"""Every call to the file system goes wrong, a few of them here: the short form of ``campaigns.faults``."""

from pathlib import Path

import pytest

from campaigns.faults import bench
from campaigns.faults.bench import Tally
from campaigns.faults.cases import SETTINGS, Setting
from tests.pool import Ranks


def tried(path: str, setting: Setting, every: int) -> Tally:
    return bench.tried(None, Path(path) / "scratch", setting, every)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_fault_is_raised_by_all_or_does_no_harm(ranks: Ranks, tmp_path: Path, setting: Setting) -> None:
    tally, *_ = ranks(setting.ranks, tried, str(tmp_path), setting, 59 if setting.ranks == 1 else 149)
    assert tally.violations == []
    assert tally.outcomes["StorageError"] >= 1
    assert tally.outcomes["done"] >= 5  # signals at least
