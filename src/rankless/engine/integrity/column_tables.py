"""Tables of numbers as named tuples of columns: their encoding as rows, and their concatenation.

Fragments and sums are encoded with it for votes, the tables of parts for the local tier, and
:mod:`rankless.engine.integrity.base_comparison` concatenates. Columns and the fields of a row must have one order. The
tables of parts are on disks (:mod:`rankless.tier.part`): the bytes of a row must not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

#: A named tuple of columns of equal length.
Table = TypeVar("Table", bound=tuple[Any, ...])


def encode_rows(columns: Sequence[NDArray[Any]], row: np.dtype[Any]) -> bytes:
    """Encode columns as rows of the structured dtype ``row``, whose fields are in the order of the columns."""
    rows = np.empty(len(columns[0]), row)
    for name, column in zip(row.names or (), columns, strict=True):
        rows[name] = column
    return rows.tobytes()


def decode_rows(reports: Iterable[bytes], row: np.dtype[Any]) -> list[Any]:
    """Decode and concatenate several results of :func:`encode_rows`. Return the columns."""
    rows = np.frombuffer(b"".join(reports), row)
    return [np.ascontiguousarray(rows[name]) for name in row.names or ()]


def concatenate_tables(tables: Sequence[Table]) -> Table:
    """Return the rows of some tables of one kind, of which there is at least one."""
    return type(tables[0])(*map(np.concatenate, zip(*tables, strict=True)))
