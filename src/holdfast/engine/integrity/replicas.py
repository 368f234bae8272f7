"""Proof that ranks which hold the same run hold the same bytes, before they share the writing of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import msgspec
import numpy as np
import torch

from holdfast.engine.integrity.sampling import SampledRange, sample_everything, sample_some
from holdfast.engine.io.requests import PartOf, run_in_threads
from holdfast.engine.io.tensor_bytes import TensorBytes
from holdfast.engine.plan.file_ranges import CHUNK
from holdfast.engine.plan.save_plan import ReplicatedShard, SavePlan
from holdfast.engine.plan.spec import digest_spec
from holdfast.ondisk.blocks import combine_crcs, crc64

#: Bytes that one thread hashes before it takes more.
_JOB = 16 * CHUNK

#: How many tensors an error names.
_SHOWN = 5

_encode = msgspec.msgpack.Encoder().encode
_decode_digests = msgspec.msgpack.Decoder(dict[bytes, bytes]).decode
_decode_details = msgspec.msgpack.Decoder(dict[bytes, list[tuple[int, int]]]).decode


def digest_replicas(plan: SavePlan, part_of: PartOf, save: int) -> bytes:
    """24 bytes for each set of holders that this rank is in, over their parts: all at save 0, then some of each."""
    return _encode({_key(holders): _digest(replicas, part_of, save) for holders, replicas in plan.replicas.items()})


def have_equal_replicas(posted: Sequence[bytes]) -> bool:
    """Whether all ranks' digests are equal wherever they hold the same."""
    known: dict[bytes, bytes] = {}
    return all(
        known.setdefault(key, digest) == digest for raw in posted for key, digest in _decode_digests(raw).items()
    )


def replica_details(plan: SavePlan, part_of: PartOf) -> bytes:
    """The tensor and CRC of every replicated part, to find out which differ."""
    return _encode(
        {
            _key(holders): [(replica.tensor, _crc(part_of(replica.tensor), 0, replica.nbytes)) for replica in replicas]
            for holders, replicas in plan.replicas.items()
        }
    )


def describe_mismatch(plan: SavePlan, posted: Sequence[bytes]) -> str:
    """The message that names the tensors that differ, and the ranks. Tensors have one number in every rank's plan."""
    reports = [_decode_details(raw) for raw in posted]
    for key in dict.fromkeys(key for report in reports for key in report):
        said = {rank: report[key] for rank, report in enumerate(reports) if key in report}
        first = next(iter(said))
        differing = [i for i, mine in enumerate(said[first]) if any(crcs[i] != mine for crcs in said.values())]
        if differing:
            ranks = [rank for rank, crcs in said.items() if crcs[differing[0]] != said[first][differing[0]]]
            names = [plan.tensors[said[first][i][0]] for i in differing]
            return _message(names, first, ranks)
    return "replicated tensors changed on some rank while they were being saved; save between steps. Nothing was saved"


def _message(names: Sequence[tuple[str, str]], first: int, ranks: Sequence[int]) -> str:
    shown = ", ".join(f"{group} tensor {name!r}" for group, name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (
        f"ranks hold different values of {shown}{more}: rank {first} and rank {', '.join(map(str, ranks))} differ. "
        "Either the replicas have diverged, or these are different tensors under one name (parts of one tensor must "
        "be a DTensor; stages of a pipeline need names of their own). Nothing was saved"
    )


def _key(holders: tuple[int, ...]) -> bytes:
    """8 bytes for a set of ranks, of which there may be thousands."""
    return digest_spec(np.array(holders, dtype="<u4").tobytes(), 8)


def _digest(replicas: Sequence[ReplicatedShard], part_of: PartOf, save: int) -> bytes:
    ranges = sample_everything(replicas) if save == 0 else sample_some(replicas, save)
    crcs = run_in_threads(partial(crc_of_shard, part_of=part_of), _jobs(ranges))
    return digest_spec(np.array(crcs, dtype="<u8").tobytes(), 16)


def _jobs(ranges: Iterable[SampledRange]) -> Iterator[list[SampledRange]]:
    """Ranges in turn, about as many bytes of them together as one thread hashes at a time."""
    job, size = list[SampledRange](), 0
    for one in ranges:
        job.append(one)
        size += one.stop - one.start
        if size >= _JOB:
            yield job
            job, size = [], 0
    if job:
        yield job


def crc_of_shard(ranges: Iterable[SampledRange], part_of: PartOf) -> int:
    """The CRC of ranges one after another. Those on an accelerator come from there together: each copy waits for it."""
    crc, size = 0, 0
    waiting: list[torch.Tensor] = []
    for tensor, start, stop in ranges:
        part = part_of(tensor)
        remote = part.remote(start, stop)
        if waiting and (remote is None or remote.device != waiting[0].device or size > CHUNK):
            crc, size = crc64(torch.cat(waiting).cpu().numpy(), crc), 0
            waiting.clear()
        if remote is None:
            crc = part.crc(start, stop, crc)
        else:
            waiting.append(remote)
            size += stop - start
    return crc64(torch.cat(waiting).cpu().numpy(), crc) if waiting else crc


def _crc(part: TensorBytes, start: int, stop: int) -> int:
    cuts = [(at, min(stop, at + CHUNK)) for at in range(start, stop, CHUNK)]
    return combine_crcs((part.crc(low, high), high - low) for low, high in cuts)
