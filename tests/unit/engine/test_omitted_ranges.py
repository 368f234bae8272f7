"""Tests that a plan without some ranges writes exactly the rest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rankless.engine.plan.cell_transfers import CellTransfer, tabulate_transfers
from rankless.engine.plan.element_ranges import ElementRange
from rankless.engine.plan.file_ranges import FileRange
from rankless.engine.plan.omitted_ranges import omit_ranges
from rankless.engine.plan.save_plan import EMPTY_PLAN
from rankless.engine.plan.stripe_owners import OwnedStripe, RemoteStripe, ShardContribution

SIZE = 60


def make_ranges(edges: list[int]) -> list[ElementRange]:
    """Ranges between every second pair of edges: disjoint, and not adjacent."""
    ordered = sorted(set(edges))
    return [ElementRange(*pair) for pair in zip(ordered[::2], ordered[1::2], strict=False)]


ranges = st.lists(st.integers(0, SIZE), max_size=10).map(make_ranges)
omissions = st.dictionaries(st.integers(0, 2), ranges.filter(bool))


def bytes_of(spans: list[tuple[int, int, int]]) -> set[tuple[int, int]]:
    return {(file, at) for file, start, stop in spans for at in range(start, stop)}


def omitted_bytes(omitted: dict[int, list[ElementRange]]) -> set[tuple[int, int]]:
    return bytes_of([(file, *span) for file, spans in omitted.items() for span in spans])


@given(written=st.dictionaries(st.integers(0, 2), ranges), omitted=omissions)
def test_what_is_not_omitted_is_written(
    written: dict[int, list[ElementRange]], omitted: dict[int, list[ElementRange]]
) -> None:
    spans = [(file, start, stop) for file, spans in sorted(written.items()) for start, stop in spans]
    file_ranges = [FileRange(7, start + 5, stop + 5, start + 9, file, start) for file, start, stop in spans]
    transfers = [CellTransfer(file, start, stop, 3) for file, start, stop in spans]
    plan = replace(EMPTY_PLAN, file_ranges=file_ranges, sent=transfers, received=tabulate_transfers(transfers))
    rest = omit_ranges(plan, omitted)
    expected = bytes_of(spans) - omitted_bytes(omitted)
    kept = [(part.file, part.offset, part.offset + part.stop - part.start) for part in rest.file_ranges]
    assert bytes_of(kept) == expected
    assert all((part.start - part.offset, part.local - part.offset) == (5, 9) for part in rest.file_ranges)
    for moved in (rest.sent, rest.received.to_transfers()):
        assert bytes_of([(part.file, part.start, part.stop) for part in moved]) == expected


@given(span=st.tuples(st.integers(0, SIZE), st.integers(1, SIZE)), omitted=omissions)
def test_a_stripe_is_written_unless_all_of_it_is_omitted(
    span: tuple[int, int], omitted: dict[int, list[ElementRange]]
) -> None:
    start, size = span
    of_stripe = [FileRange(0, start, start + size, 0, 1, start)]
    owned = OwnedStripe(of_stripe, ())
    remote = RemoteStripe(of_stripe, 2, ShardContribution((0,), 0, 0, size))
    rest = omit_ranges(replace(EMPTY_PLAN, stripe_tasks=[owned, remote]), omitted)
    is_written = not bytes_of([(1, start, start + size)]) <= omitted_bytes(omitted)
    assert rest.stripe_tasks == ([owned, remote] if is_written else [])
