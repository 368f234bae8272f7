"""Tests that changed checkpoints are read or refused: the short form of ``python -m campaigns.fuzz``."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from campaigns.fuzz.campaign import Fuzzer
from campaigns.fuzz.read_check import ReadChecker
from rankless.errors import CorruptCheckpointError
from tests.helpers.pairwise import first_of


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Fuzzer:
    """Checkpoints of all formats: it takes seconds to write them."""
    return Fuzzer(tmp_path_factory.mktemp("fuzz"), seed=1)


@pytest.fixture
def fuzzer(checkpoints: Fuzzer) -> Fuzzer:
    checkpoints.checker = ReadChecker()
    return checkpoints


@first_of(1, ("first", "number"), [(0, 60), (60, 300)])
def test_changed_checkpoints_are_read_or_refused(fuzzer: Fuzzer, first: int, number: int) -> None:
    cases = [violation for _, violation in islice(fuzzer.run_cases(first=first), number)]
    assert [violation for violation in cases if violation] == []
    assert min(fuzzer.checker.read, fuzzer.checker.refused) > number // 15


def test_what_is_changed_is_sound_before(fuzzer: Fuzzer) -> None:
    """But for what would run code."""
    assert [fuzzer.checker.find_problem(path) for path in fuzzer.seeds.values()] == [None] * len(fuzzer.seeds)
    assert (fuzzer.checker.read, fuzzer.checker.refused) == (len(fuzzer.seeds) - 1, 1)


def fail(error: BaseException) -> Callable[[Path], None]:
    return mock.Mock(side_effect=error)


@pytest.mark.parametrize(
    ("use", "problem"),
    [
        (fail(KeyError("x")), "KeyError"),
        (fail(MemoryError()), "MemoryError"),
        (fail(CorruptCheckpointError("something is damaged")), "does not name the file"),
        (fail(CorruptCheckpointError("c.pt in case is damaged")), None),
        (lambda _: os.system("true"), "code was run: os.system"),  # noqa: S605
        (lambda _: bytearray(2**31), "MemoryError"),
        (lambda _: None, None),
    ],
)
def test_what_the_campaign_calls_wrong(use: Any, problem: str | None) -> None:
    with mock.patch("campaigns.fuzz.read_check._read_everything", use):
        actual = ReadChecker().find_problem(Path("/case/c.pt"))
    assert (actual is None) == (problem is None)
    assert (problem or "") in (actual or "")
