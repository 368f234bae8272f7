"""What ``holdfast diff`` says: tables for people, and a record for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from holdfast.cli import pairs
from holdfast.cli.comparison import Comparison
from holdfast.cli.leaves import ABSENT, Leaf
from holdfast.cli.output import count
from holdfast.cli.pairs import Pair
from holdfast.cli.table import Column, Table
from holdfast.cli.values import brief, plain
from holdfast.layout.files import TensorInfo
from holdfast.terminal import clean

if TYPE_CHECKING:
    from holdfast.cli.abreast import Difference


def tables(found: Comparison) -> Iterator[Table]:
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
            [(clean(leaf.path), *(clean(brief(side)) for side in (leaf.left, leaf.right))) for leaf in found.values],
        )


def _row(found: Comparison, pair: Pair) -> tuple[str, str, str]:
    one, other = _infos(found, pair)
    return clean(pair.name), _what(one), _what(other)


def _what(info: TensorInfo | None) -> str:
    return "absent" if info is None else f"{info.dtype} {list(info.shape)}"


def _numbers(found: Comparison, pair: Pair, seen: Difference) -> tuple[str, ...]:
    largest = (f"{number:.3g}" for number in (seen.absolute, seen.relative))
    return clean(pair.name), f"{seen.differing:,}", f"{seen.elements:,}", *largest, _dtypes(found, pair)


def _infos(found: Comparison, pair: Pair) -> tuple[TensorInfo | None, TensorInfo | None]:
    return pairs.info(found.left, pair.left), pairs.info(found.right, pair.right)


def _dtypes(found: Comparison, pair: Pair) -> str:
    """Both dtypes, where they are not the same."""
    names = dict.fromkeys(info.dtype for info in _infos(found, pair) if info is not None)
    return " ".join(names) if len(names) > 1 else ""


def _casts(found: Comparison) -> bool:
    return any(_dtypes(found, pair) for pair, _ in found.differing)


def summary(found: Comparison) -> str:
    """How much was compared, and how much of it not even read."""
    differ = len(found.apart) + len(found.differing)
    compared = count(found.compared, "tensor")
    parts = [f"{differ:,} of {compared} {_differ(differ)}" if differ else compared]
    parts += [f"{found.unread:,} equal by {'its' if found.unread == 1 else 'their'} checksums"] if found.unread else []
    parts += [f"{count(len(found.values), 'value')} {_differ(len(found.values))}"] if found.values else []
    return ", ".join(parts)


def _differ(number: int) -> str:
    return "differs" if number == 1 else "differ"


def record(found: Comparison) -> dict[str, Any]:
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


def _tensor(found: Comparison, pair: Pair, seen: Difference | None) -> dict[str, Any]:
    sides = zip("ab", _infos(found, pair), strict=True)
    described = {side: {"dtype": info.dtype, "shape": list(info.shape)} for side, info in sides if info is not None}
    if seen is None:
        return {"name": pair.name, **described}
    numbers = {"max_abs": _finite(seen.absolute), "max_rel": _finite(seen.relative)}
    return {"name": pair.name, **described, "elements": seen.elements, "differing": seen.differing, **numbers}


def _finite(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)


def _value(leaf: Leaf) -> dict[str, Any]:
    sides = {"a": leaf.left, "b": leaf.right}
    return {"path": leaf.path, **{side: plain(value) for side, value in sides.items() if value is not ABSENT}}
