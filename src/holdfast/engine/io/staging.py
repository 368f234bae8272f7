"""Staging: what this rank will write is copied into memory of ours, so that training may go on while it is written.

Some of it may be copied later: what does not change until a certain moment. That it did not is proven by hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from holdfast.engine.io.p2p import P2PExchange
from holdfast.engine.io.requests import PartOf, run_in_threads
from holdfast.engine.io.staging_memory import Arena
from holdfast.engine.io.tensor_bytes import TensorBytes
from holdfast.engine.io.write_stripes import assemble_stripes
from holdfast.engine.plan.file_ranges import FileRange, IoChunk, tensor_chunks
from holdfast.engine.plan.routes import OwnedStripe
from holdfast.engine.plan.save_plan import SavePlan
from holdfast.errors import TornSnapshotError
from holdfast.ondisk.blocks import crc64
from holdfast.storage.memory import Bytes

#: Of the chunks that are copied later, so many are hashed at the call, others each time; that takes about 5 ms.
SAMPLED_CHUNKS = 12


@dataclass(frozen=True)
class DeferredCopies:
    """Which tensors, by number, are copied later, and how many of their chunks are watched; others each ``turn``."""

    tensors: frozenset[int] = frozenset()
    watched: int = SAMPLED_CHUNKS
    turn: int = 0


@dataclass(frozen=True)
class _StagedChunk:
    """A chunk, and where it goes in the arena. ``crc``: what it was at the call, where it is watched."""

    chunk: IoChunk
    into: Bytes
    crc: int | None = None


class StagedTensors:
    """Pieces whose bytes are all in one memory, where ``local`` counts from its start."""

    def __init__(
        self, pieces: Sequence[FileRange], memory: Bytes, later: Sequence[_StagedChunk], source: PartOf
    ) -> None:
        self.pieces, self._memory = pieces, TensorBytes(torch.from_numpy(memory))
        self._later, self._source = later, source

    def part_of(self, tensor: int) -> TensorBytes:
        """Where the bytes of any tensor are."""
        del tensor
        return self._memory

    def complete(self, names: Sequence[tuple[str, str]]) -> None:
        """Copy what was left for later. Raises ``TornSnapshotError`` where it is seen to have changed since the call."""
        run_in_threads(lambda placed: _copy(placed, self._source), self._later)
        watched = [placed for placed in self._later if placed.crc is not None]
        for placed, same in zip(watched, run_in_threads(self._is_as_it_was, watched), strict=True):
            if not same:
                raise _torn([names[piece.tensor] for piece in placed.chunk.pieces])

    def _is_as_it_was(self, placed: _StagedChunk) -> bool:
        return placed.crc == crc64(placed.into) == _crc(placed.chunk, self._source)


def stage_tensors(
    plan: SavePlan, part_of: PartOf, arena: Arena, wire: P2PExchange | None, later: DeferredCopies
) -> StagedTensors:
    """Copy this rank's pieces, and put together the stripes that it owns.

    Only the tensors in ``later`` are still needed afterwards, until the copy is complete.
    """
    left = list(tensor_chunks(piece for piece in plan.pieces if piece.tensor in later.tensors))
    chunks = list(tensor_chunks(piece for piece in plan.pieces if piece.tensor not in later.tensors))
    stripes = [piece for crossing in plan.crossings if isinstance(crossing, OwnedStripe) for piece in crossing.pieces]
    total = sum(chunk.size for chunk in (*left, *chunks)) + sum(piece.stop - piece.start for piece in stripes)
    memory = arena.room(total)
    places = _places(memory)
    for_later = [_StagedChunk(chunk, places(chunk.size)) for chunk in left]
    now = [_StagedChunk(chunk, places(chunk.size)) for chunk in chunks]
    run_in_threads(lambda placed: _copy(placed, part_of), now)
    for_later = _watch(for_later, later, part_of)
    staged = list(_moved((*for_later, *now), memory))
    if wire is not None:
        for piece, stripe in assemble_stripes(plan.crossings, part_of, wire):
            into = places(len(stripe))
            np.copyto(into, stripe)
            staged.append(piece._replace(local=_start(into, memory)))
    staged.sort(key=lambda piece: (piece.file, piece.offset))
    return StagedTensors(staged, memory, for_later, part_of)


def _places(memory: Bytes) -> Callable[[int], Bytes]:
    """Hands out the memory, from its start on."""
    taken = 0

    def place(nbytes: int) -> Bytes:
        nonlocal taken
        taken += nbytes
        return memory[taken - nbytes : taken]

    return place


def _start(into: Bytes, memory: Bytes) -> int:
    return into.ctypes.data - memory.ctypes.data


def _moved(every: Iterable[_StagedChunk], memory: Bytes) -> Iterator[FileRange]:
    """The pieces of chunks, as they lie in the memory."""
    for placed in every:
        start = _start(placed.into, memory) - placed.chunk.offset
        yield from (piece._replace(local=start + piece.offset) for piece in placed.chunk.pieces)


def _copy(placed: _StagedChunk, part_of: PartOf) -> None:
    for piece in placed.chunk.pieces:
        at = piece.offset - placed.chunk.offset
        part_of(piece.tensor).copy_out(piece.local, placed.into[at : at + piece.stop - piece.start])


def _watch(every: Sequence[_StagedChunk], later: DeferredCopies, part_of: PartOf) -> list[_StagedChunk]:
    """Hash the chunks to be watched as they are now."""
    stride = max(1, -(-len(every) // later.watched))
    watched = range(later.turn % stride, len(every), stride)
    crcs = run_in_threads(lambda number: _crc(every[number].chunk, part_of), watched)
    known = dict(zip(watched, crcs, strict=True))
    return [_StagedChunk(placed.chunk, placed.into, known.get(number)) for number, placed in enumerate(every)]


def _torn(names: Sequence[tuple[str, str]]) -> TornSnapshotError:
    group, name = names[0]
    which = f"{group} tensor {name!r}" + (f" or one of {len(names) - 1} beside it" if names[1:] else "")
    return TornSnapshotError(
        f"{which} changed while it was copied, by something other than a step of an optimizer (a write to .data, a "
        'kernel, a graph); save with staging="eager". Nothing was saved'
    )


def _crc(chunk: IoChunk, part_of: PartOf) -> int:
    crc = 0
    for piece in chunk.pieces:
        crc = part_of(piece.tensor).crc(piece.local, piece.local + piece.stop - piece.start, crc)
    return crc
