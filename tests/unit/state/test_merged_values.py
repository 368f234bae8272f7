"""Tests of values of several ranks: those of other types, or with another sign, are other values."""

from typing import Any

import pytest

from rankless.errors import StateError
from rankless.state.optimizer.own_state import merge_own
from rankless.state.optimizer.param_groups import merge_groups
from rankless.state.schedulers_by_params import find_entries, merge_entries

PAIRS = [(1, 1.0), (True, 1), (0.0, -0.0), ([1], [True])]


def group(*, state: Any = 1, setting: Any = 1) -> dict[str, Any]:
    settings = {"lr": setting, "betas": 2}
    return {"class": "A", "number": 0, "params": ["w"], "ordered": True, "settings": settings, "state": {"w": state}}


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_states_and_settings_of_other_types_are_refused(one: Any, other: Any) -> None:
    with pytest.raises(StateError, match="different optimizer state of 'w'"):
        merge_groups([[group(state={"s": one})], [group(state={"s": other})]])
    with pytest.raises(StateError, match="with different settings"):
        merge_groups([[group(setting=one)], [group(setting=other)]])


@pytest.mark.filterwarnings("ignore:ranks ")
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_own_values_and_schedulers_of_other_types_are_marked(one: Any, other: Any) -> None:
    (entry,) = merge_own([{"params": ["w"], "values": {"x": value}} for value in (one, other)])
    assert entry["differed"]
    entries = merge_entries([[{"class": "A", "params": [["w"]], "state": {"x": v}}] for v in (one, other)])
    _, is_uncertain = find_entries(entries, [[["w"]]])
    assert is_uncertain


def test_the_order_of_keys_does_not_matter() -> None:
    turned = group()
    turned["settings"] = dict(reversed(turned["settings"].items()))
    assert merge_groups([[group()], [turned]]) == [group()]
