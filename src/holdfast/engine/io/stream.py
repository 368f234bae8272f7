"""Tensors that are not in memory: their bytes are read from a checkpoint when asked for, and cast on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from holdfast.engine.io.requests import Fragments, merge_fragments
from holdfast.engine.io.source_reader import SourceReader
from holdfast.ondisk.blocks import BLOCK_BYTES, Fragment, crc64
from holdfast.storage.memory import Bytes

#: Number of a source, and offset, start and stop of each range that holds bytes ``[start, stop)`` of a tensor.
Locate = Callable[[int, int], Sequence[tuple[int, int, int, int]]]


@dataclass
class ReadFragments:
    """What was read of the tensors of a checkpoint, hashed: to be compared with what it should be."""

    _found: list[tuple[int, Fragment]] = field(default_factory=list)

    def note(self, tensor: int, start: int, data: Bytes) -> None:
        """Take note of bytes from ``start`` on, which may reach over several blocks."""
        at = start
        while at < start + len(data):
            stop = min(start + len(data), (at // BLOCK_BYTES + 1) * BLOCK_BYTES)
            self._found.append((tensor, Fragment(at, stop, crc64(data[at - start : stop - start]))))
            at = stop

    def fragments(self) -> Fragments:
        """All of it."""
        return merge_fragments([self._found])


@dataclass(frozen=True)
class StreamedTensor:
    """A tensor of a checkpoint, by its number; ``dtype`` is that of the bytes that come out."""

    tensor: int
    stored: torch.dtype
    dtype: torch.dtype
    locate: Locate
    opened: SourceReader
    heard: ReadFragments

    def copy_out(self, start: int, into: Bytes) -> None:
        """Fill ``into`` with the bytes from ``start`` on, both whole elements. Raises ``CorruptCheckpointError``."""
        if self.stored == self.dtype:
            self._read(start, into)
            return
        first, number = start // self.dtype.itemsize, len(into) // self.dtype.itemsize
        raw = np.empty(number * self.stored.itemsize, np.uint8)
        self._read(first * self.stored.itemsize, raw)
        torch.from_numpy(into).view(self.dtype).copy_(torch.from_numpy(raw).view(self.stored))

    def _read(self, start: int, into: Bytes) -> None:
        for source, offset, low, high in self.locate(start, start + len(into)):
            self.opened.read(source, offset, into[low - start : high - start].data)
        self.heard.note(self.tensor, start, into)
