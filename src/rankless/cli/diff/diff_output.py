"""The output of ``rankless diff``: tables for people, and a record for programs.

:mod:`rankless.cli.diff.diff_command` calls it. Programs read the JSON: keys keep their names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rankless.cli.format_values import as_plain_value
from rankless.cli.table import Column, Table
from rankless.inspection.brief_text import format_brief
from rankless.inspection.compare import CheckpointComparison
from rankless.inspection.tensor_pairs import TensorPair, info_of
from rankless.inspection.value_differences import ABSENT, ValueDifference
from rankless.observe.terminal import escape_control_characters
from rankless.observe.units import format_count
from rankless.ondisk.data_files import TensorInfo

if TYPE_CHECKING:
    from rankless.inspection.tensor_differences import TensorDifference

#: The beginnings of the names of groups that count something, and are no measure of weights.
_COUNTS = ("steps of the ", "integers in ")


def comparison_tables(comparison: CheckpointComparison) -> Iterator[Table]:
    """Return a table of tensors that cannot be compared, one of tensors that differ, and one of values."""
    if comparison.apart:
        columns = [Column("tensor", elastic="middle"), Column("a"), Column("b")]
        yield Table(columns, [_apart_row(comparison, pair) for pair in comparison.apart])
    if comparison.differing:
        columns = [Column("tensor", elastic="middle"), Column("differ", right=True), Column("of", right=True)]
        columns += [
            Column("max abs", right=True),
            Column("max rel", right=True),
            Column("dtypes" if _has_casts(comparison) else ""),
        ]
        largest_first = sorted(comparison.differing, key=lambda entry: (-entry[1].relative, -entry[1].absolute))
        yield Table(columns, [_difference_row(comparison, pair, difference) for pair, difference in largest_first])
    if comparison.values:
        columns = [Column("value", elastic="middle"), Column("a", elastic="end"), Column("b", elastic="end")]
        yield Table(
            columns,
            [
                (
                    escape_control_characters(leaf.path),
                    *(escape_control_characters(format_brief(side)) for side in (leaf.left, leaf.right)),
                )
                for leaf in comparison.values
            ],
        )


def comparison_headline(comparison: CheckpointComparison) -> str:
    """Return a sentence on the differences, their largest size, and the two steps."""
    differ = len(comparison.apart) + len(comparison.differing)
    clauses = [f"{differ:,} of {format_count(comparison.compared, 'tensor')} {_differ_verb(differ)}"] if differ else []
    largest: dict[str, float] = {}
    for pair, difference in comparison.differing:
        group = _group_of(comparison, pair)
        largest[group] = max(largest.get(group, 0.0), difference.absolute)
    if largest:
        weights_first = sorted(largest.items(), key=lambda item: item[0].startswith(_COUNTS))
        clauses[0] += ": " + ", ".join(f"{group} by at most {number:.3g}" for group, number in weights_first)
    if comparison.apart:
        clauses.append(f"{format_count(len(comparison.apart), 'tensor')} of other shapes, or on one side only")
    if comparison.values:
        count = len(comparison.values)
        clauses.append(f"{format_count(count, 'value')} {_differ_verb(count)}")
    left, right = (target.manifest.step if target.manifest else None for target in (comparison.left, comparison.right))
    if left is not None and right is not None and left != right:
        clauses.append(f"step {left} to {right}")
    return escape_control_characters("; ".join(clauses))


def _group_of(comparison: CheckpointComparison, pair: TensorPair) -> str:
    """Return the component of a tensor. Steps and integers count something, so they are groups of their own."""
    component, slash, name = pair.name.partition("/")
    if not slash:
        component = "saved values"
    if component == "optimizer" and name.endswith("/step"):
        return f"{_COUNTS[0]}{component}"
    return f"{_COUNTS[1]}{component}" if _are_integers(comparison, pair) else component


def _are_integers(comparison: CheckpointComparison, pair: TensorPair) -> bool:
    """Return whether a tensor has integers, such as the number of averaged steps."""
    return all(info is not None and info.dtype[:1] in {"I", "U"} for info in _pair_infos(comparison, pair))


def _apart_row(comparison: CheckpointComparison, pair: TensorPair) -> tuple[str, str, str]:
    left, right = _pair_infos(comparison, pair)
    return escape_control_characters(pair.name), _format_info(left), _format_info(right)


def _format_info(info: TensorInfo | None) -> str:
    return "absent" if info is None else f"{info.dtype} {list(info.value_shape)}"


def _difference_row(
    comparison: CheckpointComparison, pair: TensorPair, difference: TensorDifference
) -> tuple[str, ...]:
    largest = (f"{number:.3g}" for number in (difference.absolute, difference.relative))
    return (
        escape_control_characters(pair.name),
        f"{difference.differing:,}",
        f"{difference.elements:,}",
        *largest,
        _format_dtypes(comparison, pair),
    )


def _pair_infos(comparison: CheckpointComparison, pair: TensorPair) -> tuple[TensorInfo | None, TensorInfo | None]:
    return info_of(comparison.left, pair.left), info_of(comparison.right, pair.right)


def _format_dtypes(comparison: CheckpointComparison, pair: TensorPair) -> str:
    """Return both dtypes if they differ, otherwise an empty text."""
    names = dict.fromkeys(info.dtype for info in _pair_infos(comparison, pair) if info is not None)
    return " ".join(names) if len(names) > 1 else ""


def _has_casts(comparison: CheckpointComparison) -> bool:
    return any(_format_dtypes(comparison, pair) for pair, _ in comparison.differing)


def comparison_summary(comparison: CheckpointComparison) -> str:
    """Return a line with the number of tensors that were compared, and of those that were not read."""
    parts = [f"{format_count(comparison.compared, 'tensor')} compared"]
    if comparison.unread:
        parts.append(f"{comparison.unread:,} equal by {'its' if comparison.unread == 1 else 'their'} checksums")
    return ", ".join(parts)


def _differ_verb(number: int) -> str:
    return "differs" if number == 1 else "differ"


def comparison_record(comparison: CheckpointComparison) -> dict[str, Any]:
    """Return the comparison as JSON. A tensor or value that one side lacks has no ``a`` or ``b``."""
    return {
        "a": str(comparison.left.path),
        "b": str(comparison.right.path),
        "equal": comparison.is_equal,
        "compared": comparison.compared,
        "equal_by_checksum": comparison.unread,
        "tensors": [
            *(_tensor_record(comparison, pair, None) for pair in comparison.apart),
            *(_tensor_record(comparison, pair, difference) for pair, difference in comparison.differing),
        ],
        "values": [_value_record(leaf) for leaf in comparison.values],
        "notes": list(comparison.notes),
    }


def _tensor_record(
    comparison: CheckpointComparison, pair: TensorPair, difference: TensorDifference | None
) -> dict[str, Any]:
    sides = zip("ab", _pair_infos(comparison, pair), strict=True)
    described = {
        side: {"dtype": info.dtype, "shape": list(info.value_shape)} for side, info in sides if info is not None
    }
    if difference is None:
        return {"name": pair.name, **described}
    numbers = {"max_abs": _json_number(difference.absolute), "max_rel": _json_number(difference.relative)}
    return {
        "name": pair.name,
        **described,
        "elements": difference.elements,
        "differing": difference.differing,
        **numbers,
    }


def _json_number(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)


def _value_record(leaf: ValueDifference) -> dict[str, Any]:
    sides = {"a": leaf.left, "b": leaf.right}
    return {"path": leaf.path, **{side: as_plain_value(value) for side, value in sides.items() if value is not ABSENT}}
