"""Tests the strict parser of JSON against Python's own, given the rules as hooks, on JSON of any writer."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankless.errors import CorruptCheckpointError
from rankless.ondisk.strict_json import parse_json
from tests.helpers.examples import examples

#: Pieces of text that a value may be put together from, and some that no strict JSON has.
_SCALARS = [
    *("0", "-0", "1", "-7", "18446744073709551615", "18446744073709551616", "-9223372036854775809", "1" * 40),
    *("1.0", "1.5", "-0.0", "1e16", "1E5", "1e400", "0.1", "1e-7", "123456789012345680.0", "01", "1.", "NaN"),
    *("-Infinity", "true", "false", "null", '"a"', '""', '"\\u0061"', '"\\ud83d\\ude00"', '"\\ud800"', '"é"', '"\\/"'),
    *('"\t"', '"\\t"', '"\\u001f"', '"\x7f"', '"\\u007f"', "'a'", ""),
]
_KEYS = ['"a"', '"b"', '"\\u0061"', '"__metadata__"', '""', "a"]
_SPACES = ["", "", "", "", " ", "\n", "\t"]


@st.composite
def texts(draw: st.DrawFn, depth: int = 3) -> str:
    """Text that is JSON or nearly so, with spaces, repeated keys and unusual forms of numbers and text in places."""
    kind = draw(st.sampled_from(["scalar", "list", "object"] if depth else ["scalar"]))
    if kind == "scalar":
        return draw(st.sampled_from(_SCALARS))
    space = draw(st.sampled_from(_SPACES))
    parts = draw(st.lists(texts(depth=depth - 1), max_size=3))
    if kind == "list":
        return "[" + f",{space}".join(parts) + "]"
    return "{" + f",{space}".join(f"{draw(st.sampled_from(_KEYS))}:{space}{part}" for part in parts) + "}"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def parse_by_the_rules(raw: bytes) -> Any:
    def refuse(text: str) -> float:
        raise ValueError(text)

    def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return dict(pairs) if len({key for key, _ in pairs}) == len(pairs) else refuse("a repeated key")

    def to_float(text: str) -> float:
        return float(text) if math.isfinite(float(text)) else refuse(text)

    tree = json.loads(raw.decode(), object_pairs_hook=to_dict, parse_constant=refuse, parse_float=to_float)
    json.dumps(tree, ensure_ascii=False).encode()
    return tree


def assert_parsed_by_the_rules(raw: bytes) -> None:
    try:
        expected = parse_by_the_rules(raw)
    except ValueError:
        with pytest.raises(CorruptCheckpointError, match="the file"):
            parse_json(raw, "the file")
        return
    actual = parse_json(raw, "the file")
    assert repr(actual) == repr(expected)  # unlike ==, it tells 1 from 1.0 and from True, 0.0 from -0.0, and the order


@given(texts(), st.sampled_from(["", "", " ", "   ", "\n", "\0", " x"]))
@settings(max_examples=examples(500))
def test_only_strict_json_is_parsed_whoever_wrote_it(text: str, end: str) -> None:
    assert_parsed_by_the_rules((text + end).encode())


@given(values, st.sampled_from(["python", "ascii", "compact", "msgspec"]))
@settings(max_examples=examples(300))
def test_what_usual_writers_write_is_parsed(value: Any, writer: str) -> None:
    try:
        raw = {
            "python": lambda: json.dumps(value, ensure_ascii=False, indent=1).encode(),
            "ascii": lambda: json.dumps(value).encode(),
            "compact": lambda: json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(),
            "msgspec": lambda: msgspec.json.encode(value),
        }[writer]()
    except OverflowError:  # msgspec writes no larger integers
        return
    assert_parsed_by_the_rules(raw)


@pytest.mark.usefixtures("without_garbage")
@pytest.mark.parametrize(
    "raw", [b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000, b"\xff", b'"\xc3"']
)
def test_deep_nesting_and_text_that_is_no_utf_8_are_refused_by_name(raw: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match="the file is not valid JSON"):
        parse_json(raw, "the file")
