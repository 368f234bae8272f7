"""Proof by content: a master weight, rounded to the dtype of the model, is the weight that lies in the same checkpoint.

Megatron copies the masters to the model after each step, so they are equal bit for bit.

The search of buckets samples with it on each rank; :class:`~rankless.megatron.reader.megatron_reader.MegatronReader`
compares all when files are checked. Weights are rounded as torch does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from rankless.engine.plan.element_ranges import ElementRange
from rankless.errors import CorruptCheckpointError
from rankless.formats.chunked_tensor_slices import JoinedTensor, cut_slice
from rankless.formats.read_stored_tensor import read_tensor_bytes
from rankless.formats.stored_tensor import StoredTensor
from rankless.megatron.reader.flat_buffers import FlatTensor
from rankless.megatron.reader.rank_parts import RankPart
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import dtype_width

#: The dtype of master weights, and the dtypes of weights that can be compared with them.
MASTER, ROUNDED = "F32", frozenset({"F32", "BF16", "F16"})

#: The most elements of a part that are compared before it is used, and the elements of each of three samples of others.
_WHOLE, _SAMPLE = 2**14, 256

#: The elements that are compared at a time.
_BLOCK = 2**20

#: The bits of a 32-bit number that bfloat16 does not have.
_DROPPED = 16


def sample_ranges(numel: int) -> list[ElementRange]:
    """Return the elements of a part that are compared before it is used: all, or some at the ends and in the middle."""
    if numel <= _WHOLE:
        return [ElementRange(0, numel)]
    return [ElementRange(start, start + _SAMPLE) for start in (0, (numel - _SAMPLE) // 2, numel - _SAMPLE)]


def round_masters(raw: bytes, dtype: str) -> bytes:
    """Return 32-bit numbers in another dtype, rounded to the nearest, as torch does."""
    if dtype == MASTER:
        return raw
    import numpy as np  # noqa: PLC0415 - importing NumPy is slow, and most checkpoints do not need it

    if dtype == "F16":
        with np.errstate(over="ignore"):
            return np.frombuffer(raw, "<f4").astype("<f2").tobytes()
    bits = np.frombuffer(raw, "<u4")
    lowest = (bits >> np.uint32(_DROPPED)) & np.uint32(1)
    rounded = (bits + np.uint32(2 ** (_DROPPED - 1) - 1) + lowest) >> np.uint32(_DROPPED)
    return rounded.astype("<u2").tobytes()


class WeightParts:
    """The weights of a model. The parts of ranks are read as the ranks stored them."""

    def __init__(self, weights: Mapping[str, JoinedTensor]) -> None:
        self._weights = weights

    def dtype_of(self, part: RankPart) -> str:
        """Return the dtype of the weights."""
        return self._weights[part.name].info.dtype

    def read_part(self, part: RankPart, elements: ElementRange) -> bytes:
        """Return a range of the elements of a part."""
        weight, data = self._weights[part.name], bytearray()
        width = dtype_width(weight.info.dtype)
        sizes = [math.prod(box.shape) for box in part.boxes]
        for box, stop in zip(part.boxes, accumulate(sizes), strict=True):
            start = stop - math.prod(box.shape)
            low, high = max(start, elements.start), min(stop, elements.stop)
            if low < high:
                piece = JoinedTensor(TensorInfo(weight.info.dtype, box.shape), cut_slice(weight.chunks, box))
                data += read_tensor_bytes(piece, (low - start) * width, (high - start) * width)
        return bytes(data)

    def sample_part(self, part: RankPart) -> bytes:
        """Return the elements of a part that are compared before it is used."""
        return b"".join(self.read_part(part, elements) for elements in sample_ranges(part.numel))


def read_masters(master: FlatTensor, elements: ElementRange) -> bytes:
    """Return a range of master weights."""
    width = dtype_width(MASTER)
    return read_tensor_bytes(master.stored, elements.start * width, elements.stop * width)


def sample_masters(master: FlatTensor, start: int, numel: int) -> bytes:
    """Return the elements that are compared of a part of ``numel`` elements which begins at ``start``."""
    return b"".join(
        read_masters(master, ElementRange(start + elements.start, start + elements.stop))
        for elements in sample_ranges(numel)
    )


def check_masters(pairs: Sequence[tuple[str, StoredTensor, StoredTensor]], source: str) -> None:
    """Raise ``CorruptCheckpointError`` naming the first parameter if its master weights, rounded, are not its weights.

    ``pairs`` are parameters with their weights and their masters.
    """
    for name, weight, master in pairs:
        if any(weights != masters for weights, masters in _iterate_blocks(weight, master)):
            raise CorruptCheckpointError(
                f"{source}: the master weights of {name!r}, rounded, are not its weights: they were changed after the "
                "last step, or files of two saves were mixed; read it without its optimizer (--key optimizer=skip)"
            )


def _iterate_blocks(weight: StoredTensor, master: StoredTensor) -> Iterator[tuple[bytes, bytes]]:
    numel, width = math.prod(weight.info.shape), dtype_width(weight.info.dtype)
    for start in range(0, numel, _BLOCK):
        stop = min(start + _BLOCK, numel)
        masters = read_tensor_bytes(master, start * dtype_width(MASTER), stop * dtype_width(MASTER))
        yield read_tensor_bytes(weight, start * width, stop * width), round_masters(masters, weight.info.dtype)
