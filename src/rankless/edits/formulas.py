"""The bytes of an edited tensor, as formulas over stored tensors. Each range of bytes is computed for itself.

The verbs of this package build them; :class:`rankless.formats.edited_reader.EditedReader` evaluates them, in the
threads that read tensors, on each rank for the ranges that it needs. So equal formulas must give equal bytes on all
ranks, for any ranges that they compute: sums have a fixed order, and random rows depend on their number alone.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rankless.edits.cast_elements import PIECE, cast_elements
from rankless.formats.edited_reader import EditedTensor, ReadStored, StoredKey
from rankless.inspection.bits_to_floats import as_array
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import FLOATING, dtype_width
from rankless.storage.aligned_memory import Bytes

#: How many bytes of a stored tensor are read at a time for a sum over all of its rows.
_PASS_BYTES = 2**20


class StoredFormula(msgspec.Struct, frozen=True):
    """A stored tensor as it is."""

    key: StoredKey
    info: TensorInfo

    @property
    def whole(self) -> StoredKey | None:
        """See :class:`EditedTensor`."""
        return self.key

    def inputs(self) -> Iterator[StoredKey]:
        """See :class:`EditedTensor`."""
        yield self.key

    def fill(self, start: int, into: Bytes, read: ReadStored) -> None:
        """See :class:`EditedTensor`."""
        read(self.key, start, into)


class RowRange(msgspec.Struct, frozen=True):
    """Rows ``[first, first + count)`` of a tensor: indices of its first dimension."""

    of: EditedTensor
    first: int
    count: int


class Rows(msgspec.Struct, frozen=True, dict=True):
    """A tensor that consists of rows of others, one range after another. All have the same dtype and size of a row.

    The rows of ``info`` may be several of theirs.
    """

    info: TensorInfo
    parts: tuple[RowRange, ...]

    @property
    def whole(self) -> StoredKey | None:
        """See :class:`EditedTensor`."""
        part, *others = self.parts or (None,)
        is_all = part is not None and not others and part.first == 0 and part.of.info == self.info
        return part.of.whole if part is not None and is_all else None

    @cached_property
    def _row_bytes(self) -> int:
        return row_bytes(self.parts[0].of.info) if self.parts else 0

    def inputs(self) -> Iterator[StoredKey]:
        """See :class:`EditedTensor`."""
        for part in self.parts:
            yield from part.of.inputs()

    def fill(self, start: int, into: Bytes, read: ReadStored) -> None:
        """See :class:`EditedTensor`."""
        begin, stop = 0, start + len(into)
        for part in self.parts:
            end = begin + part.count * self._row_bytes
            low, high = max(start, begin), min(stop, end)
            if low < high:
                first = part.first * self._row_bytes + low - begin
                part.of.fill(first, into[low - start : high - start], read)
            begin = end


class Zeros(msgspec.Struct, frozen=True):
    """A tensor of zeros."""

    info: TensorInfo

    @property
    def whole(self) -> StoredKey | None:
        """See :class:`EditedTensor`."""
        return None

    def inputs(self) -> Iterator[StoredKey]:
        """See :class:`EditedTensor`."""
        return iter(())

    def fill(self, start: int, into: Bytes, read: ReadStored) -> None:  # noqa: ARG002 - of the protocol
        """See :class:`EditedTensor`."""
        into[:] = 0


class Repeated(msgspec.Struct, frozen=True, dict=True):
    """A tensor with rows that are all equal to the only row of another one."""

    info: TensorInfo
    row: EditedTensor

    @property
    def whole(self) -> StoredKey | None:
        """See :class:`EditedTensor`."""
        return None

    def inputs(self) -> Iterator[StoredKey]:
        """See :class:`EditedTensor`."""
        yield from self.row.inputs()

    def fill(self, start: int, into: Bytes, read: ReadStored) -> None:
        """See :class:`EditedTensor`."""
        size = row_bytes(self.info)
        row = np.empty(size, np.uint8)
        self.row.fill(0, row, read)
        head = min(-start % size, len(into))  # the rest of a row that began before
        into[:head] = row[size - head :][:head] if head < len(into) else row[start % size :][:head]
        whole = (len(into) - head) // size * size
        into[head : head + whole].reshape(-1, size)[:] = row
        into[head + whole :] = row[: len(into) - head - whole]


class MeanRow(msgspec.Struct, frozen=True, dict=True):
    """The mean of all rows of a tensor: added up in float64 in their order, divided, and cast once.

    The first thread that needs it computes it. Threads of a load or conversion may ask for it at the same time.
    """

    info: TensorInfo
    of: EditedTensor

    @property
    def whole(self) -> StoredKey | None:
        """See :class:`EditedTensor`."""
        return None

    def inputs(self) -> Iterator[StoredKey]:
        """See :class:`EditedTensor`."""
        yield from self.of.inputs()

    def fill(self, start: int, into: Bytes, read: ReadStored) -> None:
        """See :class:`EditedTensor`."""
        memo = self._memo
        with memo.lock:
            if memo.row is None:
                memo.row = self._compute(read)
        into[:] = memo.row[start : start + len(into)]

    @cached_property
    def _memo(self) -> _MeanMemo:
        return _MeanMemo()

    def _compute(self, read: ReadStored) -> Bytes:
        rows, width = self.of.info.shape[0], dtype_width(self.of.info.dtype)
        size = row_bytes(self.of.info)
        total = np.zeros(size // width, np.float64)
        at_once = max(1, _PASS_BYTES // max(1, size))
        for first in range(0, rows, at_once):
            raw = np.empty(min(at_once, rows - first) * size, np.uint8)
            self.of.fill(first * size, raw, read)
            for row in to_float64(raw, self.of.info.dtype).reshape(-1, len(total)):
                total += row
        return from_float64(total / rows, self.info.dtype)


class _MeanMemo:
    """The mean row, once a thread has computed it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.row: Bytes | None = None


class NormalRows(msgspec.Struct, frozen=True):
    """Rows of normal random numbers with mean 0. Each row depends on the ``seed``, the ``name`` and its number alone.

    The generator is NumPy's ``RandomState``. Its numbers are the same in all versions of NumPy.
    """

    info: TensorInfo
    name: str
    std: float
    seed: int

    @property
    def whole(self) -> StoredKey | None:
        """See :class:`EditedTensor`."""
        return None

    def inputs(self) -> Iterator[StoredKey]:
        """See :class:`EditedTensor`."""
        return iter(())

    def fill(self, start: int, into: Bytes, read: ReadStored) -> None:  # noqa: ARG002 - of the protocol
        """See :class:`EditedTensor`."""
        size = row_bytes(self.info)
        for number in range(start // size, -(-(start + len(into)) // size)):
            begin = number * size
            low, high = max(start, begin), min(start + len(into), begin + size)
            into[low - start : high - start] = self._row(number)[low - begin : high - begin]

    def _row(self, number: int) -> Bytes:
        state = np.random.RandomState([self.seed, zlib.crc32(self.name.encode()), number])
        count = row_bytes(self.info) // dtype_width(self.info.dtype)
        return from_float64(state.standard_normal(count) * self.std, self.info.dtype)


class AverageFormula(msgspec.Struct, frozen=True):
    """The mean of tensors of one shape: added up in float64 in their order, divided, and cast once."""

    info: TensorInfo
    of: tuple[EditedTensor, ...]

    @property
    def whole(self) -> StoredKey | None:
        """See :class:`EditedTensor`."""
        return self.of[0].whole if len(self.of) == 1 else None

    def inputs(self) -> Iterator[StoredKey]:
        """See :class:`EditedTensor`."""
        for tensor in self.of:
            yield from tensor.inputs()

    def fill(self, start: int, into: Bytes, read: ReadStored) -> None:
        """See :class:`EditedTensor`."""
        size = min(len(into), PIECE * dtype_width(self.info.dtype))
        fill_piece = self._fill_in_float64 if self._needs_float64 else self._fill_in_float32
        raws = [np.empty(size, np.uint8) for _ in self.of[:2]]  # once: new memory takes longer than the sums
        for at in range(0, len(into), size):
            piece = into[at : at + size]
            fill_piece(start + at, piece, read, [raw[: len(piece)] for raw in raws])

    @property
    def _needs_float64(self) -> bool:
        """True if float32 may give other bytes: see :func:`_mean_of_two`."""
        return len(self.of) != 2 or self.info.dtype == "F64"  # noqa: PLR2004 - two

    def _fill_in_float32(self, start: int, into: Bytes, read: ReadStored, raws: Sequence[Bytes]) -> None:
        for tensor, raw in zip(self.of, raws, strict=True):
            tensor.fill(start, raw, read)
        mean = _mean_of_two(*(_as_float32(raw, self.info.dtype) for raw in raws))
        cast_elements(mean.view(np.uint8), "F32" if mean.dtype == np.float32 else "F64", self.info.dtype, into)

    def _fill_in_float64(self, start: int, into: Bytes, read: ReadStored, raws: Sequence[Bytes]) -> None:
        total = np.full(len(into) // dtype_width(self.info.dtype), -0.0)  # the sum of negative zeros is one
        for tensor in self.of:
            tensor.fill(start, raws[0], read)
            with np.errstate(invalid="ignore"):  # NaNs that signal; infinities with unlike signs
                total += as_array(raws[0], self.info.dtype)  # exact in float64
        total /= len(self.of)
        cast_elements(total.view(np.uint8), "F64", self.info.dtype, into)


def _as_float32(raw: Bytes, dtype: str) -> npt.NDArray[np.float32]:
    """Return elements as float32. Tables are faster than NumPy for all narrow dtypes but bfloat16."""
    if dtype in ("F32", "BF16"):
        return as_array(raw, dtype)
    floats = np.empty(len(raw) // dtype_width(dtype), np.float32)
    cast_elements(raw, dtype, "F32", floats.view(np.uint8))
    return floats


def _mean_of_two(first: npt.NDArray[np.float32], second: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """Return the mean of elements as float32, or as float64 if a sum overflows.

    A sum that is rounded to float64 and then to float32 equals the sum that is rounded to float32 at once, because
    float64 has more than twice as many bits (Figueroa, 1995, "When is double rounding innocuous?"). Half of it is
    exact, or the sum was. So both ways give the same bytes; this one takes two thirds of the time.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        total = first + second
        if np.isfinite(total).all():
            total *= np.float32(0.5)
            return total
        return (first.astype(np.float64) + second) / 2


class CastFormula(msgspec.Struct, frozen=True):
    """The elements of a tensor in another floating-point dtype, rounded as torch rounds them."""

    info: TensorInfo
    of: EditedTensor

    @property
    def whole(self) -> StoredKey | None:
        """See :class:`EditedTensor`."""
        return self.of.whole if self.of.info == self.info else None

    def inputs(self) -> Iterator[StoredKey]:
        """See :class:`EditedTensor`."""
        yield from self.of.inputs()

    def fill(self, start: int, into: Bytes, read: ReadStored) -> None:
        """See :class:`EditedTensor`."""
        width, stored_width = dtype_width(self.info.dtype), dtype_width(self.of.info.dtype)
        for at in range(0, len(into), PIECE * width):
            piece = into[at : at + PIECE * width]
            raw = np.empty(len(piece) // width * stored_width, np.uint8)
            self.of.fill((start + at) // width * stored_width, raw, read)
            cast_elements(raw, self.of.info.dtype, self.info.dtype, piece)


def row_bytes(info: TensorInfo) -> int:
    """Return the size of a row, which is all but the first dimension, in bytes."""
    return math.prod(info.shape[1:]) * dtype_width(info.dtype)


def with_rows(info: TensorInfo, rows: int) -> TensorInfo:
    """Return the description of a tensor with another number of rows."""
    return TensorInfo(info.dtype, (rows, *info.shape[1:]))


def join_rows(parts: Sequence[RowRange], like: TensorInfo) -> EditedTensor:
    """Return a tensor of rows of others, in the dtype and with the rows of ``like``."""
    present = tuple(part for part in parts if part.count)
    return Rows(with_rows(like, sum(part.count for part in present)), present)


def cast(tensor: EditedTensor, dtype: str) -> EditedTensor:
    """Return a tensor in another floating-point dtype."""
    return tensor if tensor.info.dtype == dtype else CastFormula(TensorInfo(dtype, tensor.info.shape), tensor)


def is_floating(info: TensorInfo) -> bool:
    """Return whether a tensor has elements that can be added up and rounded."""
    return info.dtype in FLOATING


def to_float64(raw: Bytes, dtype: str) -> npt.NDArray[Any]:
    """Return elements as float64, exactly."""
    return as_array(raw, dtype).astype(np.float64)


def from_float64(values: npt.NDArray[Any], dtype: str) -> Bytes:
    """Return the bytes of elements in a dtype, rounded as torch rounds float64."""
    into = np.empty(len(values) * dtype_width(dtype), np.uint8)
    cast_elements(np.ascontiguousarray(values).view(np.uint8), "F64", dtype, into)
    return into
