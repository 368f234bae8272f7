"""Staging: what this rank will write is copied into memory of ours, so that training may go on while it is written."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from holdfast.engine.gather import put_together
from holdfast.engine.local import Bytes, LocalPart
from holdfast.engine.plan import SavePlan
from holdfast.engine.routes import Owned
from holdfast.engine.transfer import Chunk, PartOf, Piece, in_threads, tensor_chunks
from holdfast.engine.wire import Wire
from holdfast.storage.bulk import aligned_buffer


class Arena:
    """Memory that is kept from save to save: fresh pages would cost more than the copy."""

    def __init__(self) -> None:
        self._memory: Bytes = np.empty(0, np.uint8)

    def room(self, nbytes: int) -> Bytes:
        """So many bytes. What was there before is lost."""
        if len(self._memory) < nbytes:
            self._memory = np.empty(0, np.uint8)  # first let go of the old, then take the new
            self._memory = np.frombuffer(aligned_buffer(nbytes), np.uint8)
        return self._memory[:nbytes]


class Staged(NamedTuple):
    """Pieces whose bytes are all in one memory, where ``local`` counts from its start."""

    pieces: Sequence[Piece]
    memory: LocalPart

    def part_of(self, tensor: int) -> LocalPart:
        """Where the bytes of any tensor are."""
        del tensor
        return self.memory


def stage(plan: SavePlan, part_of: PartOf, arena: Arena, wire: Wire | None) -> Staged:
    """Copy this rank's pieces, and put together the stripes that it owns. The tensors are not needed afterwards."""
    chunks = list(tensor_chunks(plan.pieces))
    stripes = [piece for crossing in plan.crossings if isinstance(crossing, Owned) for piece in crossing.pieces]
    sizes = [chunk.size for chunk in chunks] + [piece.stop - piece.start for piece in stripes]
    starts = itertools.accumulate(sizes, initial=0)
    # Chunks take their places first, and the stripes those that are left.
    placed = list(zip(chunks, starts, strict=False))
    memory = arena.room(sum(sizes))
    in_threads(lambda item: _copy(item[0], memory, item[1], part_of), placed)
    staged = [piece for chunk, start in placed for piece in _moved(chunk, start)]
    if wire is not None:
        for (piece, stripe), start in zip(put_together(plan.crossings, part_of, wire), starts, strict=False):
            np.copyto(memory[start : start + len(stripe)], stripe)
            staged.append(piece._replace(local=start))
    staged.sort(key=lambda piece: (piece.file, piece.offset))
    return Staged(staged, LocalPart(torch.from_numpy(memory)))


def _copy(chunk: Chunk, memory: Bytes, start: int, part_of: PartOf) -> None:
    for piece in chunk.pieces:
        at = start + piece.offset - chunk.offset
        part_of(piece.tensor).copy_out(piece.local, memory[at : at + piece.stop - piece.start])


def _moved(chunk: Chunk, start: int) -> Iterator[Piece]:
    for piece in chunk.pieces:
        yield piece._replace(local=start + piece.offset - chunk.offset)
