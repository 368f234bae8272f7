"""The plan of a copy between running ranks: the bytes of its shards that each rank sends to each other rank.

It is a pure function of three arguments: the tensors that the source ranks hold, the tensors that the receiving ranks
request, and the own rank.

:mod:`rankless.live_copy.copy_operation` calls :func:`plan_copy` on every rank, in the last vote before tensors of the
caller change; :mod:`rankless.engine.io.copy_exchange` calls :func:`split_into_messages` in the vote "copying". Sender
and receiver derive the same runs and messages in the same order, each for itself: the order may depend on the arguments
only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankless.engine.plan.file_ranges import CHUNK
from rankless.engine.plan.global_spec import GlobalTensor
from rankless.engine.plan.layout_types import Coordinate, Division, ranks_by_coordinate
from rankless.engine.plan.save_plan import ReplicatedShard
from rankless.engine.plan.shard_byte_ranges import local_shard
from rankless.errors import StateError
from rankless.observe.spans import traced
from rankless.ondisk.data_files import TensorInfo

#: Ranks that hold the same bytes do not divide fewer bytes than this among them.
MIN_SHARE = 64 * 2**10

#: A piece is only cut at multiples of the largest element, in bytes.
_ALIGNMENT = 16

_Numbers = NDArray[np.int64]


class CopyRun(NamedTuple):
    """Pieces of one tensor: ``number`` of them, each of ``size`` bytes.

    The first one is at byte ``source`` of the source's shard, and goes to byte ``target`` of the receiver's shard. Each
    further one follows after a step.
    """

    tensor: int
    source: int
    target: int
    size: int
    number: int = 1
    source_step: int = 0
    target_step: int = 0

    @property
    def nbytes(self) -> int:
        """The size of all pieces in bytes."""
        return self.size * self.number

    def select_pieces(self, first: int, stop: int) -> CopyRun:
        """Return some of the pieces."""
        source, target = self.source + first * self.source_step, self.target + first * self.target_step
        return self._replace(source=source, target=target, number=stop - first)

    def slice_piece(self, start: int, stop: int) -> CopyRun:
        """Return bytes ``[start, stop)`` of the first piece."""
        return CopyRun(self.tensor, self.source + start, self.target + start, stop - start)


@dataclass
class CopyPlan:
    """The share of one rank in a copy.

    ``local`` are the bytes that it copies itself, from a tensor of its own to another one. ``sent`` are those that it
    sends, by receiver, and ``received`` those that it gets, by sender; sender and receiver have the same runs.
    ``replicas`` are the requested shards that other source ranks hold, too, by the ranks that hold them. ``tensors``
    have the same numbers on all ranks.
    """

    tensors: Sequence[tuple[str, str]]
    local: list[CopyRun] = field(default_factory=list)
    sent: dict[int, list[CopyRun]] = field(default_factory=dict)
    received: dict[int, list[CopyRun]] = field(default_factory=dict)
    replicas: dict[tuple[int, ...], list[ReplicatedShard]] = field(default_factory=dict)


#: The runs that one rank receives, by the ranks that hold them.
_Streams = dict[tuple[int, ...], list[CopyRun]]


@traced("plan", "plan")
def plan_copy(
    held: Mapping[tuple[str, str], GlobalTensor], requested: Mapping[tuple[str, str], GlobalTensor], rank: int
) -> CopyPlan:
    """Return the plan of ``rank``. The source ranks have the tensors ``held``, the receivers want ``requested``.

    Bytes that a receiver holds itself are copied there. Others are divided evenly among the ranks that hold them. Of
    tensors that need not be equal on all ranks (buffers), the lowest rank's are taken. Raises ``StateError`` if no
    source rank holds bytes that this rank requests.
    """
    plan = CopyPlan(sorted(held))
    numbered = {number: (held[key], requested[key]) for number, key in enumerate(plan.tensors) if key in requested}
    receivers = sorted({receiver for _, request in numbered.values() for receiver in request.all_ranks()})
    for receiver in receivers:
        streams = _receive_all(numbered, rank) if receiver == rank else _send_all(numbered, rank, receiver)
        for holders, runs in sorted(streams.items()):
            if receiver in holders:
                plan.local += runs
                continue
            for sender, share in _divide(holders, receiver, runs):
                if receiver == rank:
                    plan.received.setdefault(sender, []).extend(share)
                elif sender == rank:
                    plan.sent.setdefault(receiver, []).extend(share)
    for number, (tensor, _) in numbered.items():
        coordinate = tensor.coordinate_of(rank)
        holders = () if coordinate is None or not tensor.shared else tensor.holder_ranks(coordinate)
        if coordinate is not None and len(holders) > 1:
            shard = local_shard(tensor.info, tensor.division, coordinate)
            plan.replicas.setdefault(holders, []).append(ReplicatedShard(number, shard.nbytes))
    return plan


def _receive_all(tensors: Mapping[int, tuple[GlobalTensor, GlobalTensor]], rank: int) -> _Streams:
    """Return all that a rank receives, or copies itself."""
    streams: _Streams = {}
    for number, (held, requested) in tensors.items():
        target = requested.coordinate_of(rank)
        for source in held.iter_coordinates() if target is not None else ():
            runs = _find_runs(held, source, requested, target)
            if not runs:
                continue
            holders = _holders_for(held, source, rank)
            if not holders:
                raise _missing_shard_error(held, source, rank)
            streams.setdefault(holders, []).extend(run._replace(tensor=number) for run in runs)
    return streams


def _missing_shard_error(held: GlobalTensor, source: Coordinate, rank: int) -> StateError:
    owners = {rank for layout in held.layouts for rank in ranks_by_coordinate(layout).get(source, ())}
    inside = ", ".join(f"rank {owner}" for owner in sorted(owners) if owner >= 0)
    return StateError(
        f"rank {rank} needs a shard of {held.group} tensor {held.name!r} that no source rank holds: it was on "
        f"{inside or 'a rank that is not in the process group'}; copy from all ranks that hold the state, or load a "
        "checkpoint"
    )


def _send_all(tensors: Mapping[int, tuple[GlobalTensor, GlobalTensor]], rank: int, receiver: int) -> _Streams:
    """Return the parts of the shards that ``rank`` holds which ``receiver`` gets from any of their holders."""
    streams: _Streams = {}
    for number, (held, requested) in tensors.items():
        source, target = held.coordinate_of(rank), requested.coordinate_of(receiver)
        if source is None or target is None:
            continue
        holders = _holders_for(held, source, receiver)
        if rank in holders and receiver not in holders:
            runs = _find_runs(held, source, requested, target)
            streams.setdefault(holders, []).extend(run._replace(tensor=number) for run in runs)
    return streams


def _holders_for(held: GlobalTensor, source: Coordinate, receiver: int) -> tuple[int, ...]:
    """Return the ranks that may send a shard to a receiver: itself alone, if it is one of them."""
    holders = held.holder_ranks(source)
    if not held.shared:
        return holders[:1]
    return (receiver,) if receiver in holders else holders


def _divide(
    holders: tuple[int, ...], receiver: int, runs: Sequence[CopyRun]
) -> Iterator[tuple[int, Sequence[CopyRun]]]:
    """Yield each sender with its share of a receiver's bytes: about equally many from each."""
    total = sum(run.nbytes for run in runs)
    count = max(1, min(len(holders), total // MIN_SHARE))
    pending, done = deque(runs), 0
    for number in range(count):
        share = take_runs(pending, total * (number + 1) // count - done)
        done += sum(run.nbytes for run in share)
        yield holders[(receiver + number) % len(holders)], share


def take_runs(pending: deque[CopyRun], nbytes: int) -> list[CopyRun]:
    """Remove and return at most ``nbytes`` bytes from the front; all of them, unless a piece could not be cut there."""
    taken = []
    while pending and nbytes > 0:
        run = pending.popleft()
        whole = min(run.number, nbytes // run.size)
        if whole:
            taken.append(run.select_pieces(0, whole))
        part = 0 if whole == run.number else (nbytes - whole * run.size) // _ALIGNMENT * _ALIGNMENT
        if whole < run.number:
            rest = run.select_pieces(whole, run.number)
            pending.extendleft(_without_start(rest, part))
            taken += [rest.slice_piece(0, part)] if part else []
            break
        nbytes -= run.nbytes
    return taken


def _without_start(run: CopyRun, part: int) -> Iterator[CopyRun]:
    """Yield the rest of a run without the first bytes of its first piece, last run first."""
    if not part:
        yield run
        return
    if run.number > 1:
        yield run.select_pieces(1, run.number)
    yield run.slice_piece(part, run.size)


def split_into_messages(runs: Sequence[CopyRun]) -> Iterator[list[CopyRun]]:
    """Yield the runs in messages of at most a chunk. Sender and receiver get the same messages from the same runs."""
    pending = deque(runs)
    while pending:
        yield take_runs(pending, CHUNK)


def _find_runs(
    held: GlobalTensor, source: Coordinate, requested: GlobalTensor, target: Coordinate | None
) -> tuple[CopyRun, ...]:
    return () if target is None else _overlap(held.info, held.division, source, requested.division, target)


@lru_cache(maxsize=65536)
def _overlap(
    info: TensorInfo,
    source_division: Division,
    source: Coordinate,
    target_division: Division,
    target: Coordinate,
) -> tuple[CopyRun, ...]:
    """Return the bytes that two shards have in common, ascending. The tensor's number is 0."""
    source_shard = local_shard(info, source_division, source)
    target_shard = local_shard(info, target_division, target)
    if not source_shard.nbytes or not target_shard.nbytes:
        return ()
    return tuple(_compress(*_intersect(source_shard.range_columns(), target_shard.range_columns())))


def _intersect(
    source: tuple[_Numbers, _Numbers], target: tuple[_Numbers, _Numbers]
) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Return the offsets in both shards, and the sizes, of the ranges that are in both; adjacent ones are merged."""
    (source_starts, source_stops), (target_starts, target_stops) = source, target
    first = np.searchsorted(target_stops, source_starts, "right")
    counts = np.maximum(np.searchsorted(target_starts, source_stops, "left") - first, 0)
    row = np.repeat(np.arange(len(source_starts)), counts)
    column = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.maximum(source_starts[row], target_starts[column])
    sizes = np.minimum(source_stops[row], target_stops[column]) - starts
    at_source = starts - source_starts[row] + _bytes_before(source_starts, source_stops)[row]
    at_target = starts - target_starts[column] + _bytes_before(target_starts, target_stops)[column]
    if len(sizes) > 1:
        ends = np.diff(at_source) != sizes[:-1]
        is_first = np.concatenate([[True], ends | (np.diff(at_target) != sizes[:-1])])
        firsts = np.flatnonzero(is_first)
        return at_source[firsts], at_target[firsts], np.add.reduceat(sizes, firsts)
    return at_source, at_target, sizes


def _bytes_before(starts: _Numbers, stops: _Numbers) -> _Numbers:
    """Return the offset of each range in its shard."""
    ends: _Numbers = np.cumsum(stops - starts)
    return ends - (stops - starts)


def _compress(source: _Numbers, target: _Numbers, sizes: _Numbers) -> Iterator[CopyRun]:
    """Yield pieces as runs of equal ones at equal distances."""
    steps = np.stack([np.diff(source), np.diff(target), np.diff(sizes)])
    changes = np.flatnonzero((steps[:, 1:] != steps[:, :-1]).any(axis=0)) + 1
    stretch_ends = [*changes.tolist(), steps.shape[1]]
    first = 0
    for end in stretch_ends:  # the steps from piece ``first`` to number ``end`` are alike
        if first >= end:
            continue
        if steps[2, first]:
            yield from _single_pieces(source, target, sizes, first, end)
            first = end
            continue
        source_step, target_step = int(steps[0, first]), int(steps[1, first])
        yield CopyRun(
            0, int(source[first]), int(target[first]), int(sizes[first]), end - first + 1, source_step, target_step
        )
        first = end + 1
    yield from _single_pieces(source, target, sizes, first, len(sizes))


def _single_pieces(source: _Numbers, target: _Numbers, sizes: _Numbers, first: int, stop: int) -> Iterator[CopyRun]:
    columns = (column[first:stop].tolist() for column in (source, target, sizes))
    yield from (CopyRun(0, *piece) for piece in zip(*columns, strict=True))
