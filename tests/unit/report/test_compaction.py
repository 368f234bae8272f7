"""Tests that compact columns mean what they were made of, by decoders written for the tests."""

import math

from hypothesis import given
from hypothesis import strategies as st

from rankless.report.compaction import DIGITS, LogScale, encode_levels, front_code, sample_evenly
from tests.helpers.front_coded import decode_names

NAMES = st.lists(st.text(st.sampled_from("ab.0<\u202e"), max_size=8), unique=True, max_size=30).map(sorted)


@given(NAMES)
def test_names_come_back(names: list[str]) -> None:
    assert decode_names(front_code(names)) == names


def test_names_of_equal_layers_share_their_endings() -> None:
    coded = front_code([f"layers.{layer}.mlp.{part}" for layer in range(100) for part in ("down", "gate", "up")])
    assert len(coded["endings"]) == 3 + 99 - 1 + 1


@given(st.lists(st.floats(1e-12, 1e12), min_size=1))
def test_a_norm_comes_back_as_exactly_as_two_digits_allow(norms: list[float]) -> None:
    scale = LogScale(norms)
    step = (scale.high - scale.low) / 4095
    for norm in norms:
        first, second = (DIGITS.index(digit) for digit in scale.encode(norm))
        decoded = scale.low + (scale.high - scale.low) * (first * 64 + second) / 4095
        assert abs(decoded - math.log(norm)) <= step / 2 + 1e-9


def test_levels_are_between_the_lowest_and_the_highest_number() -> None:
    assert (
        encode_levels([1.0, 2.0, 3.0, None, math.nan, math.inf], 1.0, 3.0) == f"{DIGITS[0]}{DIGITS[32]}{DIGITS[63]}..."
    )
    assert encode_levels([5.0, 5.0], 5.0, 5.0) == "00"


@given(st.integers(2, 50), st.integers(0, 200))
def test_a_sample_has_the_first_and_the_last_in_order(count: int, length: int) -> None:
    sample = sample_evenly(range(length), count)
    assert len(sample) == min(count, length)
    assert sample == sorted(set(sample))
    assert not length or (sample[0], sample[-1]) == (0, length - 1)
