"""Flat buffers of optimizer states: the parts of many parameters lie one after another in a buffer.

The readers of ``torch_dist`` and ``torch`` make them, on each rank that opens a checkpoint.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rankless.engine.io.tensor_sources import SourceChunk
from rankless.engine.plan.element_ranges import IndexBox
from rankless.formats.chunked_tensor import ChunkedTensor
from rankless.formats.chunked_tensor_slices import Chunks, cut_slice, offset_slices, reshape_flat_slices, whole_box
from rankless.formats.stored_tensor import StoredTensor
from rankless.formats.torchfile.torch_placeholders import TorchTensor
from rankless.megatron.reader.rank_parts import RankPart
from rankless.ondisk.data_files import TensorInfo
from rankless.ondisk.dtypes import dtype_width


@dataclass(frozen=True)
class FlatTensor:
    """A tensor of one dimension that ranges are cut from."""

    stored: StoredTensor
    chunks: Chunks

    @classmethod
    def from_chunked(cls, stored: ChunkedTensor) -> FlatTensor:
        """Return a tensor of a folder of ``torch.distributed.checkpoint``."""
        return cls(stored, tuple(sorted(stored.chunks, key=lambda chunk: chunk.box)))

    @classmethod
    def from_torch(cls, stored: TorchTensor) -> FlatTensor:
        """Return a tensor in a file of ``torch.save``."""
        whole = whole_box(stored.info.shape)
        window = stored.storage.window
        return cls(stored, (SourceChunk(whole, stored.find_location, (window.path, window.start)),))

    @property
    def info(self) -> TensorInfo:
        """The dtype and the shape."""
        return self.stored.info

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.info.shape[0]

    @cached_property
    def edges(self) -> Sequence[int]:
        """The first element of each chunk."""
        return [chunk.box.offset[0] for chunk in self.chunks]

    def cut_range(self, start: int, stop: int) -> Chunks:
        """Return the chunks of elements ``[start, stop)``, with offsets from ``start`` on."""
        first = max(0, bisect.bisect_right(self.edges, start) - 1)
        last = bisect.bisect_left(self.edges, stop)
        return cut_slice(self.chunks[first:last], IndexBox((start,), (stop - start,)))

    def cut_part(self, part: RankPart, start: int) -> Chunks:
        """Return the chunks of a part that begins at element ``start``, with offsets in its parameter."""
        width, chunks = dtype_width(self.info.dtype), []
        for box in part.boxes:
            stop = start + math.prod(box.shape)
            shaped = reshape_flat_slices(self.cut_range(start, stop), box.shape, width)
            chunks.append(offset_slices(shaped, box.offset))
            start = stop
        return tuple(chunk for of_box in chunks for chunk in of_box)


@dataclass(frozen=True)
class FlatBuffer:
    """The states of the parameters of one buffer, as flat tensors of equal length.

    Attributes:
        label: The name for messages.
        master: The master weights.
        states: The other states by name, such as ``exp_avg``.
        has_edges: Whether parameters begin and end at the edges of the chunks of ``master``.
    """

    label: str
    master: FlatTensor
    states: Mapping[str, FlatTensor]
    has_edges: bool
