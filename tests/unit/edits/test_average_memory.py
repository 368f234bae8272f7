"""Tests that the memory of an average does not grow with the number of checkpoints."""

from __future__ import annotations

import tracemalloc

import numpy as np

from rankless.edits.formulas import AverageFormula, StoredFormula
from rankless.formats.edited_reader import StoredKey
from rankless.ondisk.data_files import TensorInfo
from rankless.storage.aligned_memory import Bytes


def measure_average(checkpoints: int) -> int:
    """Average as many tensors of 2 MB. Return the most bytes that were allocated meanwhile."""
    info = TensorInfo("F32", (2**19,))
    stored = [StoredFormula(StoredKey(number, "model", "w"), info) for number in range(checkpoints)]
    into = np.empty(info.nbytes, np.uint8)

    def read(key: StoredKey, _: int, piece: Bytes) -> None:
        piece.view(np.float32)[:] = key.source

    tracemalloc.start()
    AverageFormula(info, tuple(stored)).fill(0, into, read)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(into.view(np.float32), np.full(2**19, (checkpoints - 1) / 2, np.float32))
    return peak


def test_three_checkpoints_take_as_much_as_fifty() -> None:
    """Two take less: their mean needs no float64."""
    assert measure_average(2) < measure_average(50) < 1.1 * measure_average(3)
