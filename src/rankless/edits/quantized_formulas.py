"""The values of quantized tensors, as formulas: elements times the scale of their block, and MXFP4.

The verb ``dequantise`` builds them. The values are those that transformers computes, bit for bit: products in float32,
cast once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rankless.edits.cast_elements import cast_elements
from rankless.formats.edited_reader import EditedTensor, ReadStored, StoredKey
from rankless.inspection.bits_to_floats import as_array
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import dtype_width
from rankless.storage.aligned_memory import Bytes

#: How many elements are computed at a time.
_PIECE = 2**18

#: The values of the 16 codes of FP4 (E2M1), as the OCP Microscaling specification has them.
_FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

#: The exponent that an E8M0 scale has for 1.
_E8M0_BIAS = 127

_Floats = npt.NDArray[Any]


class Scaled(msgspec.Struct, frozen=True, dict=True):
    """The elements of ``of``, each times the scale of its block.

    The tensor is looked at as matrices of ``shape``, rows and columns, one after another. Each is divided into blocks
    of ``block`` rows and columns; ``scales`` has the scales of all blocks, row by row.
    """

    info: TensorInfo
    of: EditedTensor
    scales: EditedTensor
    shape: tuple[int, int]
    block: tuple[int, int]

    @property
    def whole(self) -> StoredKey | None:
        """See :class:`EditedTensor`."""
        return None

    def inputs(self) -> Iterator[StoredKey]:
        """See :class:`EditedTensor`."""
        yield from self.of.inputs()
        yield from self.scales.inputs()

    def fill(self, start: int, into: Bytes, read: ReadStored) -> None:
        """See :class:`EditedTensor`."""
        width, stored_width = dtype_width(self.info.dtype), dtype_width(self.of.info.dtype)
        scales = self._read_scales(read)
        for at in range(0, len(into), _PIECE * width):
            piece = into[at : at + _PIECE * width]
            first, count = (start + at) // width, len(piece) // width
            raw = np.empty(count * stored_width, np.uint8)
            self.of.fill(first * stored_width, raw, read)
            with np.errstate(invalid="ignore", over="ignore"):
                values = as_array(raw, self.of.info.dtype).astype(np.float32) * scales[self._scale_of(first, count)]
            cast_elements(values.view(np.uint8), "F32", self.info.dtype, piece)

    def _scale_of(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Return the number of the scale of each element in a range."""
        rows, columns = self.shape
        row, column = np.divmod(np.arange(first, first + count), columns)
        matrix, row = np.divmod(row, rows)
        down, across = -(-rows // self.block[0]), -(-columns // self.block[1])
        numbers: npt.NDArray[np.int64] = (matrix * down + row // self.block[0]) * across + column // self.block[1]
        return numbers

    def _read_scales(self, read: ReadStored) -> _Floats:
        memo = self._memo
        with memo.lock:
            if memo.values is None:
                raw = np.empty(self.scales.info.nbytes, np.uint8)
                self.scales.fill(0, raw, read)
                memo.values = _as_scales(raw, self.scales.info.dtype)
            scales: _Floats = memo.values
        return scales

    @cached_property
    def _memo(self) -> _Memo:
        return _Memo()


class MicroScaled(msgspec.Struct, frozen=True, dict=True):
    """A stack of matrices in MXFP4, each transposed: gpt-oss stores experts so.

    ``blocks`` are bytes of two values, ``[experts, rows, groups, bytes]``; ``scales`` the exponents of the groups. The
    tensor is ``[experts, values of a row, rows]``.
    """

    info: TensorInfo
    blocks: EditedTensor
    scales: EditedTensor

    @property
    def whole(self) -> StoredKey | None:
        """See :class:`EditedTensor`."""
        return None

    def inputs(self) -> Iterator[StoredKey]:
        """See :class:`EditedTensor`."""
        yield from self.blocks.inputs()
        yield from self.scales.inputs()

    def fill(self, start: int, into: Bytes, read: ReadStored) -> None:
        """See :class:`EditedTensor`. A matrix is computed as a whole, and kept for the next range."""
        size = math.prod(self.info.shape[1:]) * dtype_width(self.info.dtype)
        at = start
        while at < start + len(into):
            number, offset = divmod(at, size)
            stop = min(start + len(into), (number + 1) * size)
            into[at - start : stop - start] = self._matrix(number, read)[offset : offset + stop - at]
            at = stop

    def _matrix(self, number: int, read: ReadStored) -> Bytes:
        memo = self._memo
        with memo.lock:
            if memo.number != number or memo.values is None:
                memo.values, memo.number = self._compute(number, read), number
            matrix: Bytes = memo.values
        return matrix

    def _compute(self, number: int, read: ReadStored) -> Bytes:
        _, rows, groups, width = self.blocks.info.shape
        codes, exponents = np.empty(rows * groups * width, np.uint8), np.empty(rows * groups, np.uint8)
        self.blocks.fill(number * len(codes), codes, read)
        self.scales.fill(number * len(exponents), exponents, read)
        values = np.empty((rows * groups, 2 * width), np.float32)
        pairs = codes.reshape(rows * groups, width)
        values[:, 0::2], values[:, 1::2] = _FP4_VALUES[pairs & 0x0F], _FP4_VALUES[pairs >> 4]
        with np.errstate(invalid="ignore", over="ignore"):
            values *= _as_scales(exponents, "U8")[:, None]
        transposed = np.ascontiguousarray(values.reshape(rows, groups * 2 * width).T)
        into = np.empty(transposed.size * dtype_width(self.info.dtype), np.uint8)
        cast_elements(transposed.reshape(-1).view(np.uint8), "F32", self.info.dtype, into)
        return into

    @cached_property
    def _memo(self) -> _Memo:
        return _Memo()


class _Memo:
    """The result of one thread, for all threads: the scales, or the matrix of this number."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.values: Any = None
        self.number = -1


def _as_scales(raw: Bytes, dtype: str) -> _Floats:
    """Return scales as float32. Integers of one byte are exponents of E8M0."""
    if dtype == "U8":
        with np.errstate(over="ignore"):
            return np.ldexp(np.float32(1), raw.astype(np.int32) - _E8M0_BIAS)
    return as_array(raw, dtype).astype(np.float32)
