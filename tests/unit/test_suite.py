"""Tests that ``make test`` and ``make test-all`` have all cases between them."""

from pathlib import Path
from unittest import mock

import pytest

from tests.helpers.suite import select

TESTS = Path(__file__).parents[1]


def make_item(file: str, *marks: str) -> pytest.Item:
    item = mock.Mock(spec=pytest.Function, path=TESTS / file, obj=None)
    item.get_closest_marker = lambda name: name if name in marks else None
    return item


def make_config(*, full: bool = False, left_out: bool = False) -> pytest.Config:
    return mock.Mock(option=mock.Mock(full=full, left_out=left_out))


def test_the_cases_that_make_test_leaves_out_are_the_marked_ones_and_all_with_other_systems() -> None:
    case, marked = make_item("unit/test_a.py"), make_item("unit/test_a.py", "full")
    interop = [make_item("interop/dcp/test_b.py"), make_item("interop/dcp/test_b.py", "full")]

    assert select([case, marked], make_config()) == [case]
    assert select([case, marked, *interop], make_config(left_out=True)) == [marked, *interop]
    assert select([case, marked, *interop], make_config(full=True)) == [case, marked, *interop]
