"""Tables of numbers as named tuples of columns: their encoding as rows, and their concatenation.

Fragments and sums are encoded with it for votes, the tables of parts for the local tier, and
:mod:`rankless.engine.integrity.base_comparison` concatenates. Columns and the fields of a row must have one order. The
tables of parts are on disks (:mod:`rankless.tier.part`): the bytes of a row must not change.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

#: The level of the compression: higher ones take longer and gain nothing.
_LEVEL = 1

#: A named tuple of columns of equal length.
Table = TypeVar("Table", bound=tuple[Any, ...])


def encode_rows(columns: Sequence[NDArray[Any]], row: np.dtype[Any]) -> bytes:
    """Encode columns as rows of the structured dtype ``row``. Its fields are in the order of the columns."""
    rows = np.empty(len(columns[0]), row)
    for name, column in zip(row.names or (), columns, strict=True):
        rows[name] = column
    return rows.tobytes()


def decode_rows(reports: Iterable[bytes], row: np.dtype[Any]) -> list[Any]:
    """Decode and concatenate several results of :func:`encode_rows`. Return the columns."""
    rows = np.frombuffer(b"".join(reports), row)
    return [np.ascontiguousarray(rows[name]) for name in row.names or ()]


def compress_rows(rows: bytes, row_bytes: int) -> bytes:
    """Compress the result of :func:`encode_rows`: neighbouring rows have most bytes in common, but not their CRCs.

    The first bytes of all rows come first, then the second ones, and so on. For example, the rows ``ab`` and ``cd`` are
    compressed as ``acbd``.
    """
    return zlib.compress(np.frombuffer(rows, np.uint8).reshape(-1, row_bytes).T.tobytes(), _LEVEL)


def decompress_rows(packed: bytes, row_bytes: int) -> bytes:
    """Return the rows that :func:`compress_rows` has compressed."""
    return np.frombuffer(zlib.decompress(packed), np.uint8).reshape(row_bytes, -1).T.tobytes()


def concatenate_tables(tables: Sequence[Table]) -> Table:
    """Return the rows of one table or more, all of one kind."""
    return type(tables[0])(*map(np.concatenate, zip(*tables, strict=True)))
