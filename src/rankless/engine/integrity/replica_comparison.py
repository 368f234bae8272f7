"""Comparison of replicas: ranks that hold the same shard compare its bytes before they share the writing of it.

:mod:`rankless.save.shard_writer` calls it on every rank: :func:`digest_replicas` in the vote that opens the output,
where rank 0's decision compares the digests, and :func:`replica_details` in the vote "comparing replicas". All ranks
hold this second vote only if the first found a difference. A live copy does the same. Nothing is written before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import msgspec
import numpy as np

from rankless.engine.integrity.sampling import sample_everything, sample_some
from rankless.engine.io.device_streams import CopyStream, find_copy_streams
from rankless.engine.io.device_windows import ShardRange, copy_into_windows
from rankless.engine.io.requests import ShardOf
from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.engine.plan.element_ranges import TensorRange
from rankless.engine.plan.file_ranges import CHUNK
from rankless.engine.plan.save_plan import ReplicatedShard
from rankless.engine.plan.tensor_specs import digest_bytes
from rankless.ondisk.block_crcs import combine_crcs, crc64
from rankless.process.worker_threads import run_in_threads

#: Bytes that one thread hashes at a time.
_BATCH_BYTES = 16 * CHUNK

#: The most tensors that an error message names.
_SHOWN = 5

_encode = msgspec.msgpack.Encoder().encode
_decode_digests = msgspec.msgpack.Decoder(dict[bytes, bytes]).decode
_decode_details = msgspec.msgpack.Decoder(dict[bytes, list[tuple[int, int]]]).decode


class ReplicaPlan(Protocol):
    """The part of a plan that a comparison needs: the tensors by number, and the shards that ranks hold alike."""

    @property
    def tensors(self) -> Sequence[tuple[str, str]]:
        """The tensors, with the same numbers on all ranks."""

    @property
    def replicas(self) -> Mapping[tuple[int, ...], Sequence[ReplicatedShard]]:
        """The shards of this rank that other ranks hold, too, by the ranks that hold them."""


def digest_replicas(plan: ReplicaPlan, shard_of: ShardOf, save: int) -> bytes:
    """Return 24 bytes for each set of holders that this rank is in: a digest over their shards.

    It covers all bytes at save 0, later a sample.
    """
    return _encode(
        {_holders_key(holders): _digest_shards(replicas, shard_of, save) for holders, replicas in plan.replicas.items()}
    )


def have_equal_replicas(posted: Sequence[bytes]) -> bool:
    """Return whether the digests of all ranks are equal for each set of holders."""
    digests: dict[bytes, bytes] = {}
    return all(
        digests.setdefault(key, digest) == digest for raw in posted for key, digest in _decode_digests(raw).items()
    )


def replica_details(plan: ReplicaPlan, shard_of: ShardOf) -> bytes:
    """Return the number and the CRC of every replicated shard, encoded, to find those that differ."""
    return _encode(
        {
            _holders_key(holders): [
                (replica.tensor, crc_of_shard(shard_of(replica.tensor), 0, replica.nbytes)) for replica in replicas
            ]
            for holders, replicas in plan.replicas.items()
        }
    )


def describe_mismatch(plan: ReplicaPlan, posted: Sequence[bytes], *, outcome: str = "saved") -> str:
    """Return a message that names the tensors that differ, and the ranks. Nothing was ``saved``, or ``copied``.

    Tensors have the same number in every rank's plan.
    """
    reports = [_decode_details(raw) for raw in posted]
    for key in dict.fromkeys(key for report in reports for key in report):
        crcs_by_rank = {rank: report[key] for rank, report in enumerate(reports) if key in report}
        first = next(iter(crcs_by_rank))
        differing = [
            i for i, crc in enumerate(crcs_by_rank[first]) if any(crcs[i] != crc for crcs in crcs_by_rank.values())
        ]
        if differing:
            ranks = [
                rank for rank, crcs in crcs_by_rank.items() if crcs[differing[0]] != crcs_by_rank[first][differing[0]]
            ]
            names = [plan.tensors[crcs_by_rank[first][i][0]] for i in differing]
            return f"{_mismatch_message(names, first, ranks)}. Nothing was {outcome}"
    return (
        f"replicated tensors changed on some rank while they were being {outcome}; do that between steps. "
        f"Nothing was {outcome}"
    )


def _mismatch_message(names: Sequence[tuple[str, str]], first: int, ranks: Sequence[int]) -> str:
    shown = ", ".join(f"{group} tensor {name!r}" for group, name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (
        f"ranks hold different values of {shown}{more}: rank {first} and rank {', '.join(map(str, ranks))} differ. "
        "Either the replicas have diverged, for example because ranks that hold the same parameters got other batches "
        "(pass process_group= to their data loader), or these are different tensors under one name (shards of one "
        "tensor must be a DTensor; stages of a pipeline need names of their own)"
    )


def _holders_key(holders: tuple[int, ...]) -> bytes:
    """Return 8 bytes that identify a set of ranks. A set may have thousands."""
    return digest_bytes(np.array(holders, dtype="<u4").tobytes(), 8)


def _digest_shards(replicas: Sequence[ReplicatedShard], shard_of: ShardOf, save: int) -> bytes:
    ranges = sample_everything(replicas) if save == 0 else sample_some(replicas, save)
    streams = find_copy_streams(shard_of(replica.tensor) for replica in replicas)
    if streams:
        crcs = _hash_on_devices(streams, list(_batch_ranges(ranges)), shard_of)
    else:
        crcs = run_in_threads(partial(crc_of_ranges, shard_of=shard_of), _batch_ranges(ranges))
    return digest_bytes(np.array(crcs, dtype="<u8").tobytes(), 16)


def hash_shards(shards: Sequence[TensorBytes], save: int) -> list[int]:
    """Return the CRC of each shard: of all its bytes at save 0, of a sample at later ones, as of replicas."""
    numbered = [ReplicatedShard(number, shard.nbytes) for number, shard in enumerate(shards)]
    batches: list[list[TensorRange]] = [[] for _ in shards]
    for sampled in sample_everything(numbered) if save == 0 else sample_some(numbered, save):
        batches[sampled.tensor].append(sampled)
    streams = find_copy_streams(shards)
    if streams:
        return _hash_on_devices(streams, batches, shards.__getitem__)
    hash_batch = partial(crc_of_ranges, shard_of=shards.__getitem__)
    is_small = sum(shard.nbytes for shard in shards) <= _BATCH_BYTES  # then threads take longer than the work
    return list(map(hash_batch, batches)) if is_small else run_in_threads(hash_batch, batches)


def _hash_on_devices(
    streams: Sequence[CopyStream], batches: Sequence[Sequence[TensorRange]], shard_of: ShardOf
) -> list[int]:
    """Return the CRC of each batch. The devices copy the next ranges while this thread hashes.

    The first wait is for all that the caller has enqueued: a save of replicas cannot begin before these are equal.
    """
    crcs = [0] * len(batches)
    groups = [(number, group) for number, batch in enumerate(batches) for group in _batch_ranges(batch, CHUNK)]
    copies = copy_into_windows(
        streams,
        ([ShardRange(shard_of(tensor), start, stop) for tensor, start, stop in group] for _, group in groups),
        2 * CHUNK,
    )
    for (number, _), data in zip(groups, copies, strict=True):
        crcs[number] = crc64(data, crcs[number])
    return crcs


def _batch_ranges(ranges: Iterable[TensorRange], nbytes: int = _BATCH_BYTES) -> Iterator[list[TensorRange]]:
    """Group ranges, in order, into batches of at least ``nbytes``: by default one thread's share at a time."""
    batch, size = list[TensorRange](), 0
    for sampled_range in ranges:
        batch.append(sampled_range)
        size += sampled_range.stop - sampled_range.start
        if size >= nbytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def crc_of_ranges(ranges: Iterable[TensorRange], shard_of: ShardOf) -> int:
    """Return the CRC of concatenated ranges."""
    crc = 0
    for tensor, start, stop in ranges:
        crc = shard_of(tensor).compute_crc(start, stop, crc)
    return crc


def crc_of_shard(shard: TensorBytes, start: int, stop: int) -> int:
    """Return the CRC of bytes ``[start, stop)`` of a shard."""
    chunks = [(low, min(stop, low + CHUNK)) for low in range(start, stop, CHUNK)]
    return combine_crcs((shard.compute_crc(low, high), high - low) for low, high in chunks)
