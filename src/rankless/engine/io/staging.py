"""Staging: the bytes that this rank writes are copied into a buffer, so that training can continue during the write.

Tensors that do not change until a certain moment may be copied later. Hashes detect if they have changed nevertheless:
see :mod:`rankless.engine.io.torn_snapshot`. Tensors on accelerators are copied by the devices, see
:mod:`rankless.engine.io.device_staging`, all others by threads.

:mod:`rankless.save.shard_writer` calls :func:`stage_tensors` on each rank, in the thread of the caller, in the vote
"copying what is to be saved". :meth:`StagedTensors.copy_deferred` runs in the background thread, in a second vote of
this name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch

from rankless.engine.io.device_staging import DeviceStaging
from rankless.engine.io.device_streams import find_copy_streams
from rankless.engine.io.pinned_memory import pin_for
from rankless.engine.io.requests import ShardOf
from rankless.engine.io.staging_memory import Arena
from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.engine.io.torn_snapshot import (
    ALL_CHUNKS,
    SAMPLED_CHUNKS,
    SampledChunk,
    StagedChunk,
    check_sampled_chunks,
    choose_chunks,
    sample_chunks,
)
from rankless.engine.plan.file_ranges import FileRange, IoChunk, count_bytes, tensor_chunks
from rankless.engine.plan.save_plan import SavePlan
from rankless.engine.plan.stripe_owners import OwnedStripe
from rankless.observe.spans import traced
from rankless.process.worker_threads import count_threads, run_in_threads
from rankless.storage.aligned_memory import Bytes

if TYPE_CHECKING:
    from rankless.engine.io.p2p import P2PExchange

#: If tensors are on accelerators, others of at most this size in bytes, such as the step counts of an optimizer, are
#: copied at the call: otherwise steps would have to wait for a thread.
_SMALL = 64 * 2**10


Chunk = TypeVar("Chunk")


class DeferredCopies(msgspec.Struct, frozen=True):
    """The tensors, by number, that are copied later, and the number of their chunks to sample.

    The sample depends on ``save_number``. If the save ``is_overlapped``, the call does not wait for accelerators.
    """

    tensors: frozenset[int] = frozenset()
    sampled_chunks: int = SAMPLED_CHUNKS
    save_number: int = 0
    is_overlapped: bool = False

    def sample_on_devices(self, chunks: Sequence[StagedChunk]) -> Sequence[StagedChunk]:
        """Return the chunks on accelerators to sample: none if the call waits for them, because they cannot change."""
        return [] if self.waits_for_devices else choose_chunks(chunks, self.sampled_chunks, self.save_number)

    @property
    def waits_for_devices(self) -> bool:
        """True if the call waits until accelerators have copied. Then nothing can change meanwhile.

        An overlapped save waits, too, if all chunks are compared (``staging_check="full"``).
        """
        return not self.is_overlapped or self.sampled_chunks == ALL_CHUNKS


class StagedTensors:
    """File ranges with all their bytes in one buffer; ``local`` is the offset there."""

    def __init__(
        self, file_ranges: Sequence[FileRange], memory: Bytes, in_threads: LaterCopies, on_devices: DeviceStaging
    ) -> None:
        self.file_ranges, self.memory = file_ranges, TensorBytes(torch.from_numpy(memory))
        self._in_threads, self._on_devices = in_threads, on_devices

    def shard_of(self, tensor: int) -> TensorBytes:
        """Return the buffer, which has the bytes of all tensors."""
        del tensor
        return self.memory

    def restrict_to(self, file_ranges: Sequence[FileRange]) -> StagedTensors:
        """Return the same buffer with parts of the file ranges only."""
        restricted = copy(self)
        restricted.file_ranges = file_ranges
        return restricted

    def place_ranges(self, plan: SavePlan) -> SavePlan:
        """Return a plan with all file ranges in the buffer: the ranges of the shards and of the stripes."""
        return msgspec.structs.replace(plan, file_ranges=self.file_ranges, stripe_tasks=(), striped_shards=())

    @property
    def order_steps(self) -> Callable[[], None] | None:
        """Return a function: the kernels that the calling thread enqueues on accelerators after it follow the copies.

        ``None`` if threads copy tensors, too: then a step must wait until these are copied.
        """
        is_ordered = self._on_devices.streams and not self._in_threads.chunks
        return self._on_devices.precede_caller if is_ordered else None

    def abandon(self) -> None:
        """Wait until no device writes into the buffer any more, whatever has happened."""
        self._on_devices.abandon()

    @traced("copy what was deferred", "copy")
    def copy_deferred(self, names: Sequence[tuple[str, str]]) -> None:
        """Copy the deferred chunks. Raises ``TornSnapshotError`` if a sampled one has changed since the call.

        The background thread of an overlapped save calls it; the vote on the copies makes its error common.
        """
        self._in_threads.copy(names)
        self._on_devices.finish(names)


class LaterCopies(msgspec.Struct, frozen=True):
    """Chunks that threads copy later, and the sample of them that was hashed at the call."""

    chunks: Sequence[StagedChunk]
    sampled: Sequence[SampledChunk]
    shard_of: ShardOf

    def copy(self, names: Sequence[tuple[str, str]]) -> None:
        """Copy them. Raises ``TornSnapshotError``, which has one of the ``names``, if a sampled one has changed."""
        run_in_threads(lambda staged: _copy_chunk(staged, self.shard_of), self.chunks)
        check_sampled_chunks(self.sampled, self.shard_of, names)


def stage_tensors(
    plan: SavePlan, shard_of: ShardOf, arena: Arena, p2p: P2PExchange | None, deferred: DeferredCopies
) -> StagedTensors:
    """Copy this rank's file ranges, and assemble the stripes that it owns.

    Only the ``deferred`` tensors are still needed afterwards, until :meth:`StagedTensors.copy_deferred` has returned;
    in an overlapped save also all that are on accelerators.

    All ranks call it if the plan needs an exchange, else each for itself. Stripes are exchanged here, so a deferred
    copy needs no other rank.
    """
    on_devices = DeviceStaging(find_copy_streams(_iterate_shards(plan, shard_of)), shard_of)
    parts = _divide_plan(plan, shard_of, on_devices, deferred)
    stripes = [
        file_range for task in plan.stripe_tasks if isinstance(task, OwnedStripe) for file_range in task.file_ranges
    ]
    total = sum(chunk.size for chunks in parts for chunk in chunks) + count_bytes(stripes)
    memory = pin_for(on_devices.streams, arena.reserve_bytes(total))
    allocate = _make_allocator(memory)
    staged = _Parts(*([StagedChunk(chunk, allocate(chunk.size)) for chunk in chunks] for chunks in parts))
    staged_ranges = list(_staged_ranges((chunk for chunks in staged for chunk in chunks), memory))
    with on_devices.abandon_on_error():
        sampled_on_device = deferred.sample_on_devices(staged.later_on_device)
        on_devices.enqueue(memory, staged.on_device, staged.later_on_device, sampled_on_device)
        threads = count_threads(sum(part.chunk.size for part in staged.now))
        run_in_threads(lambda staged_chunk: _copy_chunk(staged_chunk, shard_of), staged.now, threads)
        sampled = sample_chunks(staged.later, deferred.sampled_chunks, deferred.save_number, shard_of)
        if p2p is not None:
            from rankless.engine.io.write_stripes import assemble_stripes  # noqa: PLC0415 - few saves have stripes

            for file_range, stripe in assemble_stripes(plan.stripe_tasks, shard_of, p2p):
                destination = allocate(len(stripe))
                np.copyto(destination, stripe)
                staged_ranges.append(file_range._replace(local=_offset_in(destination, memory)))
        if deferred.waits_for_devices:
            on_devices.wait()
    staged_ranges.sort(key=lambda file_range: (file_range.file, file_range.offset))
    return StagedTensors(staged_ranges, memory, LaterCopies(staged.later, sampled, shard_of), on_devices)


class _Parts(NamedTuple, Generic[Chunk]):
    """Chunks by who copies them, threads or devices, and when."""

    later: Sequence[Chunk]
    now: Sequence[Chunk]
    on_device: Sequence[Chunk] = ()
    later_on_device: Sequence[Chunk] = ()


def _iterate_shards(plan: SavePlan, shard_of: ShardOf) -> Iterator[TensorBytes]:
    for tensor in {file_range.tensor for file_range in plan.file_ranges}:
        yield shard_of(tensor)


def _divide_plan(
    plan: SavePlan, shard_of: ShardOf, on_devices: DeviceStaging, deferred: DeferredCopies
) -> _Parts[IoChunk]:
    """Return the chunks of a plan."""
    later, device_tensors = deferred.tensors, set[int]()
    if on_devices.streams:
        devices = {stream.device for stream in on_devices.streams}
        tensors = {file_range.tensor for file_range in plan.file_ranges}
        device_tensors = {tensor for tensor in tensors if shard_of(tensor).device in devices}
        small = {tensor for tensor in tensors - device_tensors if shard_of(tensor).nbytes <= _SMALL}
        later = deferred.tensors - small

    def make_chunks(*, is_later: bool, is_on_device: bool) -> list[IoChunk]:
        return list(
            tensor_chunks(
                file_range
                for file_range in plan.file_ranges
                if (file_range.tensor in later) == is_later and (file_range.tensor in device_tensors) == is_on_device
            )
        )

    host = make_chunks(is_later=True, is_on_device=False), make_chunks(is_later=False, is_on_device=False)
    if not device_tensors:
        return _Parts(*host)
    return _Parts(*host, make_chunks(is_later=False, is_on_device=True), make_chunks(is_later=True, is_on_device=True))


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
