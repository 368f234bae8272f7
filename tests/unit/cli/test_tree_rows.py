"""Tests the rows of the graph of a run: the current line stays in the first column, however many branches it has."""

from __future__ import annotations

from pathlib import Path

from rankless.cli.tree_rows import plan_rows
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.history_tree import Incarnation, Place, RunTree


def info(incarnation: int, sequence: int) -> CheckpointInfo:
    return CheckpointInfo(f"s{sequence}", Path("x"), sequence=sequence, incarnation=incarnation)


def incarnation(number: int, base: tuple[int, int] | None, *sequences: int) -> Incarnation:
    place = None if base is None else Place(*base)
    return Incarnation(number=number, base=place, checkpoints=tuple(info(number, each) for each in sequences))


def draw(*incarnations: Incarnation) -> list[str]:
    """The rows, each with a dot for each column before it."""
    rows = []
    for row in plan_rows(RunTree("r", incarnations, max(one.number for one in incarnations))):
        numbers = [one.number for one in row.incarnations]
        text = row.checkpoint.tag if row.checkpoint else f"{row.kind} {numbers}" if numbers else row.kind
        rows.append("." * row.depth + text)
    return rows


def test_a_line_is_one_column() -> None:
    assert draw(incarnation(1, None, 1, 2), incarnation(2, (1, 2), 3)) == [
        *("incarnation [1]", "s1", "s2"),
        *("incarnation [2]", "s3"),
    ]


def test_the_later_checkpoints_of_an_incarnation_are_a_branch_if_another_one_goes_on() -> None:
    assert draw(incarnation(1, None, 1, 2), incarnation(2, (1, 1), 3)) == [
        *("incarnation [1]", "s1", "fork", ".s2"),
        *("incarnation [2]", "s3"),
    ]


def test_branches_of_branches_are_further_to_the_right() -> None:
    rows = draw(
        incarnation(1, None, 1, 2, 3),
        incarnation(2, (1, 2), 4, 5),
        incarnation(3, (2, 4), 6),
        incarnation(4, (1, 1), 7),
    )
    assert rows == [
        *("incarnation [1]", "s1"),
        *("fork", ".s2", ".fork", "..incarnation [2]", "..s4", "..fork", "...incarnation [3]", "...s6", "..s5", ".s3"),
        *("incarnation [4]", "s7"),
    ]


def test_a_column_ends_with_the_newest_incarnation_that_has_checkpoints() -> None:
    rows = draw(
        incarnation(1, None, 1, 2),
        incarnation(2, (1, 2), 3),
        incarnation(3, (1, 2), 4),
        incarnation(4, (1, 2)),
        incarnation(5, (1, 1), 5),
    )
    assert rows == [
        *("incarnation [1]", "s1"),
        *("fork", ".s2", ".fork", "..incarnation [2]", "..s3", ".quiet [4]", ".incarnation [3]", ".s4"),
        *("incarnation [5]", "s5"),
    ]


def test_incarnations_without_checkpoints_share_a_row_unless_something_depends_on_them() -> None:
    loop = [incarnation(number, (1, 1)) for number in range(2, 1000)]
    assert draw(incarnation(1, None, 1), *loop, incarnation(1000, (1, 1))) == [
        *("incarnation [1]", "s1", f"quiet {list(range(2, 1000))}", "incarnation [1000]")
    ]
    removed = incarnation(2, (1, 1))  # retention has removed what the third one continued
    assert draw(incarnation(1, None, 1), removed, incarnation(3, (2, 2), 3)) == [
        *("incarnation [1]", "s1", "incarnation [2]", "incarnation [3]", "s3")
    ]


def test_what_continued_a_removed_checkpoint_is_at_its_place() -> None:
    assert draw(incarnation(1, None, 1, 3), incarnation(2, (1, 2), 4)) == [
        *("incarnation [1]", "s1", "fork", ".s3"),
        *("incarnation [2]", "s4"),
    ]


def test_incarnations_whose_bases_are_not_known_follow_each_other() -> None:
    rows = draw(incarnation(1, None, 1), incarnation(3, None, 3), incarnation(2, None, 2))
    assert rows == ["incarnation [1]", "s1", "incarnation [2]", "s2", "incarnation [3]", "s3"]


def test_thousands_of_incarnations_need_no_deep_stack() -> None:
    line = [incarnation(number, (number - 1, number - 1) if number else None, number) for number in range(1500)]
    assert len(draw(*line)) == 3000
    # Each continues the first checkpoint of the one before, which has a later one, and the last one goes back to all.
    nested = [
        incarnation(number, (number - 1, number - 1) if number else None, number, 10**6 + number)
        for number in range(1500)
    ]
    rows = draw(*nested, incarnation(1500, (0, 0), 1500))
    assert rows[-1] == "s1500"
    assert max(len(row) - len(row.lstrip(".")) for row in rows) == 1499
