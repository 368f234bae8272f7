"""Tests of the comparison of named values by digests that ranks post."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rankless.engine.integrity.compare_values_by_digest import (
    DIGEST_BYTES,
    encode_digests,
    find_differing,
    select_differing,
)
from tests.helpers.examples import examples

_VALUES = st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)


@given(st.lists(st.dictionaries(st.text(max_size=3), _VALUES | st.just(bytes(DIGEST_BYTES)), max_size=5), min_size=1))
@settings(max_examples=examples(100))
def test_the_names_that_differ_are_those_with_two_values(tables: list[dict[str, bytes]]) -> None:
    differing = find_differing(encode_digests(table) for table in tables)
    for table in tables:
        expected = {name for name in table if len({other[name] for other in tables if name in other}) > 1}
        assert select_differing(table, differing) == expected
