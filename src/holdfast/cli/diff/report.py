"""What ``holdfast diff`` says: tables for people, and a record for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from holdfast.cli.diff import pairs
from holdfast.cli.diff.compare import CheckpointComparison
from holdfast.cli.diff.pairs import TensorPair
from holdfast.cli.diff.values import ABSENT, ValueDifference
from holdfast.cli.format_values import as_plain_value, format_brief
from holdfast.cli.output import format_count
from holdfast.cli.table import Column, Table
from holdfast.observe.terminal import escape_control_characters
from holdfast.ondisk.files import TensorInfo

if TYPE_CHECKING:
    from holdfast.cli.diff.tensors import TensorDifference


def comparison_tables(found: CheckpointComparison) -> Iterator[Table]:
    """One each for tensors that cannot be compared, for those that differ, and for values."""
    if found.apart:
        columns = [Column("tensor", elastic="middle"), Column("a"), Column("b")]
        yield Table(columns, [_row(found, pair) for pair in found.apart])
    if found.differing:
        columns = [Column("tensor", elastic="middle"), Column("differ", right=True), Column("of", right=True)]
        columns += [
            Column("max abs", right=True),
            Column("max rel", right=True),
            Column("dtypes" if _casts(found) else ""),
        ]
        yield Table(columns, [_numbers(found, *one) for one in found.differing])
    if found.values:
        columns = [Column("value", elastic="middle"), Column("a", elastic="end"), Column("b", elastic="end")]
        yield Table(
            columns,
            [
                (
                    escape_control_characters(leaf.path),
                    *(escape_control_characters(format_brief(side)) for side in (leaf.left, leaf.right)),
                )
                for leaf in found.values
            ],
        )


def _row(found: CheckpointComparison, pair: TensorPair) -> tuple[str, str, str]:
    one, other = _infos(found, pair)
    return escape_control_characters(pair.name), _what(one), _what(other)


def _what(info: TensorInfo | None) -> str:
    return "absent" if info is None else f"{info.dtype} {list(info.shape)}"


def _numbers(found: CheckpointComparison, pair: TensorPair, seen: TensorDifference) -> tuple[str, ...]:
    largest = (f"{number:.3g}" for number in (seen.absolute, seen.relative))
    return (
        escape_control_characters(pair.name),
        f"{seen.differing:,}",
        f"{seen.elements:,}",
        *largest,
        _dtypes(found, pair),
    )


def _infos(found: CheckpointComparison, pair: TensorPair) -> tuple[TensorInfo | None, TensorInfo | None]:
    return pairs.info_of(found.left, pair.left), pairs.info_of(found.right, pair.right)


def _dtypes(found: CheckpointComparison, pair: TensorPair) -> str:
    """Both dtypes, where they are not the same."""
    names = dict.fromkeys(info.dtype for info in _infos(found, pair) if info is not None)
    return " ".join(names) if len(names) > 1 else ""


def _casts(found: CheckpointComparison) -> bool:
    return any(_dtypes(found, pair) for pair, _ in found.differing)


def comparison_summary(found: CheckpointComparison) -> str:
    """How much was compared, and how much of it not even read."""
    differ = len(found.apart) + len(found.differing)
    compared = format_count(found.compared, "tensor")
    parts = [f"{differ:,} of {compared} {_differ(differ)}" if differ else compared]
    parts += [f"{found.unread:,} equal by {'its' if found.unread == 1 else 'their'} checksums"] if found.unread else []
    parts += [f"{format_count(len(found.values), 'value')} {_differ(len(found.values))}"] if found.values else []
    return ", ".join(parts)


def _differ(number: int) -> str:
    return "differs" if number == 1 else "differ"


def comparison_record(found: CheckpointComparison) -> dict[str, Any]:
    """All of it. A side that lacks a tensor or a value has no ``a`` or ``b``."""
    return {
        "a": str(found.left.path),
        "b": str(found.right.path),
        "equal": found.is_equal,
        "compared": found.compared,
        "equal_by_checksum": found.unread,
        "tensors": [
            *(_tensor(found, pair, None) for pair in found.apart),
            *(_tensor(found, pair, seen) for pair, seen in found.differing),
        ],
        "values": [_value(leaf) for leaf in found.values],
        "notes": list(found.notes),
    }


def _tensor(found: CheckpointComparison, pair: TensorPair, seen: TensorDifference | None) -> dict[str, Any]:
    sides = zip("ab", _infos(found, pair), strict=True)
    described = {side: {"dtype": info.dtype, "shape": list(info.shape)} for side, info in sides if info is not None}
    if seen is None:
        return {"name": pair.name, **described}
    numbers = {"max_abs": _finite(seen.absolute), "max_rel": _finite(seen.relative)}
    return {"name": pair.name, **described, "elements": seen.elements, "differing": seen.differing, **numbers}


def _finite(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)


def _value(leaf: ValueDifference) -> dict[str, Any]:
    sides = {"a": leaf.left, "b": leaf.right}
    return {"path": leaf.path, **{side: as_plain_value(value) for side, value in sides.items() if value is not ABSENT}}
