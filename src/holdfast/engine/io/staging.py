"""Staging: the bytes that this rank writes are copied into a buffer, so that training can continue during the write.

Tensors that do not change until a certain moment may be copied later. Hashes detect if they have changed nevertheless:
see :mod:`holdfast.engine.io.torn_snapshot`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from holdfast.engine.io.p2p import P2PExchange
from holdfast.engine.io.requests import ShardOf
from holdfast.engine.io.staging_memory import Arena
from holdfast.engine.io.tensor_bytes import TensorBytes
from holdfast.engine.io.torn_snapshot import SampledChunk, StagedChunk, check_sampled_chunks, sample_chunks
from holdfast.engine.io.write_stripes import assemble_stripes
from holdfast.engine.plan.file_ranges import FileRange, tensor_chunks
from holdfast.engine.plan.routes import OwnedStripe
from holdfast.engine.plan.save_plan import SavePlan
from holdfast.observe.spans import traced
from holdfast.process.worker_threads import run_in_threads
from holdfast.storage.memory import Bytes

#: The number of deferred chunks that are hashed at the call, different ones at each save; it takes about 5 ms.
SAMPLED_CHUNKS = 12


@dataclass(frozen=True)
class DeferredCopies:
    """The tensors, by number, that are copied later, and the number of their chunks to sample.

    The sample depends on ``save_number``.
    """

    tensors: frozenset[int] = frozenset()
    sampled_chunks: int = SAMPLED_CHUNKS
    save_number: int = 0


class StagedTensors:
    """File ranges whose bytes are all in one buffer; ``local`` is the offset there."""

    def __init__(
        self,
        file_ranges: Sequence[FileRange],
        memory: Bytes,
        deferred: Sequence[StagedChunk],
        sampled: Sequence[SampledChunk],
        source: ShardOf,
    ) -> None:
        self.file_ranges, self._memory = file_ranges, TensorBytes(torch.from_numpy(memory))
        self._deferred, self._sampled, self._source = deferred, sampled, source

    def shard_of(self, tensor: int) -> TensorBytes:
        """Return the buffer, which has the bytes of all tensors."""
        del tensor
        return self._memory

    @traced("copy what was deferred", "copy")
    def copy_deferred(self, names: Sequence[tuple[str, str]]) -> None:
        """Copy the deferred chunks. Raises ``TornSnapshotError`` if a sampled one has changed since the call."""
        run_in_threads(lambda staged: _copy_chunk(staged, self._source), self._deferred)
        check_sampled_chunks(self._sampled, self._source, names)


def stage_tensors(
    plan: SavePlan, shard_of: ShardOf, arena: Arena, p2p: P2PExchange | None, deferred: DeferredCopies
) -> StagedTensors:
    """Copy this rank's file ranges, and assemble the stripes that it owns.

    Only the ``deferred`` tensors are still needed afterwards, until :meth:`StagedTensors.copy_deferred` has returned.
    """
    deferred_chunks = list(
        tensor_chunks(file_range for file_range in plan.file_ranges if file_range.tensor in deferred.tensors)
    )
    chunks = list(
        tensor_chunks(file_range for file_range in plan.file_ranges if file_range.tensor not in deferred.tensors)
    )
    stripes = [
        file_range for task in plan.stripe_tasks if isinstance(task, OwnedStripe) for file_range in task.file_ranges
    ]
    total = sum(chunk.size for chunk in (*deferred_chunks, *chunks)) + sum(
        file_range.stop - file_range.start for file_range in stripes
    )
    memory = arena.reserve_bytes(total)
    allocate = _make_allocator(memory)
    staged_deferred = [StagedChunk(chunk, allocate(chunk.size)) for chunk in deferred_chunks]
    eager = [StagedChunk(chunk, allocate(chunk.size)) for chunk in chunks]
    run_in_threads(lambda staged: _copy_chunk(staged, shard_of), eager)
    sampled = sample_chunks(staged_deferred, deferred.sampled_chunks, deferred.save_number, shard_of)
    staged_ranges = list(_staged_ranges((*staged_deferred, *eager), memory))
    if p2p is not None:
        for file_range, stripe in assemble_stripes(plan.stripe_tasks, shard_of, p2p):
            destination = allocate(len(stripe))
            np.copyto(destination, stripe)
            staged_ranges.append(file_range._replace(local=_offset_in(destination, memory)))
    staged_ranges.sort(key=lambda file_range: (file_range.file, file_range.offset))
    return StagedTensors(staged_ranges, memory, staged_deferred, sampled, shard_of)


def _make_allocator(memory: Bytes) -> Callable[[int], Bytes]:
    """Return a function that hands out the buffer from its start on."""
    used = 0

    def allocate_bytes(nbytes: int) -> Bytes:
        nonlocal used
        used += nbytes
        return memory[used - nbytes : used]

    return allocate_bytes


def _offset_in(destination: Bytes, memory: Bytes) -> int:
    return destination.ctypes.data - memory.ctypes.data


def _staged_ranges(staged_chunks: Iterable[StagedChunk], memory: Bytes) -> Iterator[FileRange]:
    """Yield the file ranges of chunks, with their offsets in the buffer."""
    for staged in staged_chunks:
        start = _offset_in(staged.destination, memory) - staged.chunk.offset
        yield from (file_range._replace(local=start + file_range.offset) for file_range in staged.chunk.file_ranges)


def _copy_chunk(staged: StagedChunk, shard_of: ShardOf) -> None:
    for file_range in staged.chunk.file_ranges:
        start = file_range.offset - staged.chunk.offset
        shard_of(file_range.tensor).copy_out(
            file_range.local, staged.destination[start : start + file_range.stop - file_range.start]
        )
