"""Detection of torn snapshots: tensors that were changed between the call of a save and a copy that is made later.

Some of the chunks that are copied later are hashed at the call, and again after the copy.

:mod:`rankless.engine.io.staging` samples in the thread of the caller and checks in the background thread, on each rank;
the vote on the copies makes the error common, before anything is committed.

Three hashes are compared: of the tensor at the call, of its copy, and of the tensor after the copy. A hash after the
copy alone would not show a change that was made before the copy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from rankless.engine.io.requests import ShardOf
from rankless.engine.plan.file_ranges import IoChunk
from rankless.errors import TornSnapshotError
from rankless.ondisk.block_crcs import crc64
from rankless.process.worker_threads import run_in_threads
from rankless.storage.aligned_memory import Bytes

#: The number of deferred chunks that are hashed at the call, different ones at each save; it takes about 5 ms.
SAMPLED_CHUNKS = 12

#: As the number of chunks to sample: all of them.
ALL_CHUNKS = sys.maxsize


class StagedChunk(NamedTuple):
    """A chunk of tensors, and the place of its copy."""

    chunk: IoChunk
    destination: Bytes


class SampledChunk(NamedTuple):
    """A chunk, and its CRC at the call of the save."""

    staged: StagedChunk
    crc: int


def choose_chunks(staged_chunks: Sequence[StagedChunk], count: int, save_number: int) -> Sequence[StagedChunk]:
    """Return about ``count`` of the chunks, different ones in each save."""
    stride = max(1, -(-len(staged_chunks) // count))
    return staged_chunks[save_number % stride :: stride]


def sample_chunks(
    staged_chunks: Sequence[StagedChunk], count: int, save_number: int, shard_of: ShardOf
) -> list[SampledChunk]:
    """Hash about ``count`` of the chunks as they are now, different ones in each save."""
    sampled = choose_chunks(staged_chunks, count, save_number)
    crcs = run_in_threads(lambda staged: _chunk_crc(staged.chunk, shard_of), sampled)
    return [SampledChunk(staged, crc) for staged, crc in zip(sampled, crcs, strict=True)]


def check_sampled_chunks(sampled: Sequence[SampledChunk], shard_of: ShardOf, names: Sequence[tuple[str, str]]) -> None:
    """Raise ``TornSnapshotError`` if a sampled chunk, or its copy, is not as at the call.

    ``names`` has the group and name of each tensor, for example ``("model", "layers.0.weight")``.
    """
    results = run_in_threads(partial(_is_unchanged, shard_of), sampled)
    for (staged, _), is_unchanged in zip(sampled, results, strict=True):
        if not is_unchanged:
            raise torn_error(staged.chunk, names)


def _is_unchanged(shard_of: ShardOf, sampled: SampledChunk) -> bool:
    return sampled.crc == crc64(sampled.staged.destination) == _chunk_crc(sampled.staged.chunk, shard_of)


def _chunk_crc(chunk: IoChunk, shard_of: ShardOf) -> int:
    crc = 0
    for file_range in chunk.file_ranges:
        crc = shard_of(file_range.tensor).compute_crc(
            file_range.local, file_range.local + file_range.stop - file_range.start, crc
        )
    return crc


def torn_error(chunk: IoChunk, names: Sequence[tuple[str, str]]) -> TornSnapshotError:
    """Return the error of a chunk that has changed. ``names`` has the group and name of each tensor."""
    group, name = names[chunk.file_ranges[0].tensor]
    others = len(chunk.file_ranges) - 1
    tensor_text = f"{group} tensor {name!r}" + (f" or one of {others} next to it" if others else "")
    return TornSnapshotError(
        f"{tensor_text} changed while it was copied, by something other than a step of an optimizer "
        '(a write to .data, a kernel, a graph); save with staging="eager". Nothing was saved'
    )
