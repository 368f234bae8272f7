"""Tests failing file system calls: the short form of ``campaigns.faults``."""

from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

from campaigns.common import interruption
from campaigns.faults import fault_trial
from campaigns.faults.cases import FAULTY_CALLS, FaultyCall
from campaigns.faults.fault_trial import Tally
from rankless.errors import StorageError
from tests.helpers.pairwise import first_of
from tests.helpers.pool import Ranks

ALONE = [setting for setting in FAULTY_CALLS if setting.ranks == 1]

#: A save in the background, one that exchanges no names, one with retention, and one of three ranks.
IN_THE_DAY = (FAULTY_CALLS[1], *FAULTY_CALLS[3:6])

#: Kinds of saves and loads, and of how many calls one fails.
CASES = [
    *((setting, 127 if setting in ALONE else 211) for setting in IN_THE_DAY),
    *((setting, 59 if setting in ALONE else 83) for setting in FAULTY_CALLS),
]


def tried(path: str, setting: FaultyCall, every: int) -> Tally:
    return fault_trial.try_all_faults(None, Path(path) / "scratch", setting, every)


@first_of(len(IN_THE_DAY), ("setting", "every"), CASES, ids=str)
def test_a_fault_is_raised_by_all_or_does_no_harm(
    ranks: Ranks, tmp_path: Path, setting: FaultyCall, every: int
) -> None:
    tally, *_ = ranks(setting.ranks, tried, str(tmp_path), setting, every)
    assert tally.violations == []
    assert tally.outcomes["StorageError"] >= 1
    assert tally.outcomes["done"] >= 5  # signals at least


# ---------------------------------------------------------------------------------------------------------------
# What looks at them would see it if something were wrong


def tried_with(path: str, end: Any) -> Tally:
    """The first fault of a load alone, and signals, where loads end otherwise than they do."""
    alone = next(setting for setting in ALONE if not setting.save_kind)
    load = interruption.load_latest

    def otherwise(*arguments: Any) -> int:
        with suppress(StorageError):
            load(*arguments)
        if isinstance(end, Exception):
            raise end
        return end

    with mock.patch.object(interruption, "load_latest", otherwise):
        return tried(path, alone, 10**6)


def test_a_load_that_gives_the_older_checkpoint_for_no_reason_is_told(ranks: Ranks, tmp_path: Path) -> None:
    (tally,) = ranks(1, tried_with, str(tmp_path), 1)
    assert len(tally.violations) == 6
    assert all(item.endswith("step 1 was loaded, not the newest") for item in tally.violations)


def test_an_error_that_does_not_say_where_is_told(ranks: Ranks, tmp_path: Path) -> None:
    (tally,) = ranks(1, tried_with, str(tmp_path), StorageError(5, "Input/output error"))
    assert "the error names no path in the run: " in tally.violations[0]
