"""The plan of a save: which ranks write which bytes.

It is a pure function of the specs of all ranks and of the own rank.

:mod:`rankless.save.training_content` calls :func:`plan_save` on every rank in the vote "preparing the save",
:mod:`rankless.components.component_content` calls :func:`plan_into_files` in the vote "comparing replicas". All ranks
must get the same files, numbers of tensors and order of stripes from the same specs: no sets, no clock, no order by
rank. Names, sizes and contents of the files must not depend on the number of ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import msgspec
from msgspec.structs import asdict, replace

from rankless.engine.plan.cell_transfers import CellTransfer, TransferTable, tabulate_transfers
from rankless.engine.plan.equal_shares import split_evenly
from rankless.engine.plan.file_ranges import FileRange, count_bytes
from rankless.engine.plan.file_writers import PlacedTensor, WriterMap
from rankless.engine.plan.global_spec import GlobalSpec, GlobalTensor
from rankless.engine.plan.layout_types import Coordinate
from rankless.engine.plan.rank_order import order_ranks
from rankless.engine.plan.shard_byte_ranges import LocalShard, Locate, local_shard, locate_shard
from rankless.engine.plan.split_tensors import split_ranges, stored_tensors
from rankless.engine.plan.stripe_owners import (
    OwnedStripe,
    StripeRoutes,
    StripeTask,
    is_striped,
)
from rankless.engine.plan.tensor_writers import ShardWriters
from rankless.engine.plan.writer_cells import CellGrain, CellPlanner
from rankless.errors import StateError
from rankless.observe.spans import traced
from rankless.ondisk.data_files import DataFile, TensorInfo, pack_files


class ReplicatedShard(msgspec.Struct, frozen=True):
    """Bytes of this rank's shard of a tensor that other ranks hold, too: ``nbytes`` that must be equal."""

    tensor: int
    nbytes: int


class SavePlan(msgspec.Struct, frozen=True, dict=True):
    """The files of a checkpoint, and the work of one rank.

    The rank writes ``file_ranges`` from its own shards. ``stripe_tasks`` are stripes that it assembles or contributes
    to, in an order that is the same on all ranks; ``needs_exchange`` is the same on all ranks, too: whether any of them
    has something to send. ``replicas`` are the shards to compare with other ranks, by the ranks that hold them. If the
    ranks are on several hosts, the rank sends the bytes ``sent`` of its file ranges and stripes to other ranks instead
    of writing them, and writes the bytes ``received`` from others. ``rank_order`` has all ranks, those that write
    adjacent bytes next to each other; it is the same on all ranks. ``striped_shards`` are the rank's shards of the
    tensors that are written in stripes, for hashing.
    """

    files: Sequence[DataFile]
    groups: Mapping[str, Sequence[DataFile]]
    tensors: Sequence[tuple[str, str]]
    file_ranges: Sequence[FileRange]
    stripe_tasks: Sequence[StripeTask]
    replicas: Mapping[tuple[int, ...], Sequence[ReplicatedShard]]
    needs_exchange: bool
    sent: Sequence[CellTransfer] = ()
    received: TransferTable = tabulate_transfers([])
    rank_order: Sequence[int] = ()
    striped_shards: Sequence[StripedShard] = ()

    @cached_property
    def tensor_sizes(self) -> Sequence[int]:
        """The size in bytes of each stored tensor, by number."""
        return [entry.nbytes for file in self.files for entry in file.entries.values()]

    @cached_property
    def tensors_by_file(self) -> Sequence[range]:
        """The numbers of the tensors of each file."""
        stops = accumulate(len(file.entries) for file in self.files)
        return [range(stop - len(file.entries), stop) for file, stop in zip(self.files, stops, strict=True)]

    @property
    def nbytes(self) -> int:
        """The bytes that this rank writes or sends, of its own shards and stripes."""
        stripes = (task.file_ranges for task in self.stripe_tasks if isinstance(task, OwnedStripe))
        return count_bytes(self.file_ranges) + sum(count_bytes(file_ranges) for file_ranges in stripes)


class StripedShard(NamedTuple):
    """A shard of a tensor that is written in stripes, and the places of the tensor's bytes in files.

    Of ranks with equal shards, one has it in its plan.
    """

    shard: LocalShard
    spans: Sequence[TensorSpan]

    def iter_ranges(self) -> Iterator[FileRange]:
        """Yield the ranges of the shard. There may be very many."""
        return locate_shard(self.shard, lambda start, stop: list(_locate_range(self.spans, start, stop)))


class TensorSpan(NamedTuple):
    """Bytes ``[start, stop)`` of a tensor as ranks hold it, and their place in a file.

    They are stored in tensor number ``tensor`` from its byte ``at`` on, and in file number ``file`` from byte
    ``offset`` on. For example, ``TensorSpan(0, 64, 3, 0, 1, 4096)`` has the first 64 bytes: they are the beginning of
    tensor 3, and lie at byte 4096 of file 1.
    """

    start: int
    stop: int
    tensor: int
    at: int
    file: int
    offset: int


#: A plan without tensors.
EMPTY_PLAN = SavePlan((), {}, (), (), (), {}, needs_exchange=False)


@traced("plan", "plan")
def plan_save(
    global_spec: GlobalSpec, rank: int, limit: int, host_of: Sequence[int] = (), grain: CellGrain | None = None
) -> SavePlan:
    """Return the plan of ``rank``. Its files are the same on every rank.

    ``limit`` is the most bytes of tensors in one file. ``host_of`` has the number of the host of each rank; it may be
    empty if all ranks are on one host. With a ``grain``, cells of this size are written by one rank of one host.

    A training save calls it on every rank, unless the plan of an earlier save is still right.
    """
    tensors = {(tensor.group, tensor.name): tensor for tensor in global_spec.iter_tensors()}
    groups = _pack_groups(tensors, global_spec.tied_names(), limit)
    files = [file for group in groups.values() for file in group]
    names = [(group, name) for group, group_files in groups.items() for file in group_files for name in file.entries]
    starts = [
        (number, file.data_start + entry.data_offsets[0])
        for number, file in enumerate(files)
        for entry in file.entries.values()
    ]
    numbered_starts = {key: (number, *start) for number, (key, start) in enumerate(zip(names, starts, strict=True))}
    tensor_of = {
        (key[0], name): key
        for key, tensor in tensors.items()
        for name in stored_tensors(key[1], tensor.info, tensor.splits)
    }
    spans = {
        key: _tensor_spans(tensors[key], numbered_starts) for key in dict.fromkeys(tensor_of[name] for name in names)
    }
    plan = _plan_spans(tensors, spans, rank, [file.size for file in files], host_of=host_of, grain=grain)
    rank_order = order_ranks(tensors.values(), len(global_spec.spec_of))
    return replace(plan, files=files, groups=groups, tensors=names, rank_order=rank_order)


def _tensor_spans(tensor: GlobalTensor, starts: Mapping[tuple[str, str], tuple[int, int, int]]) -> list[TensorSpan]:
    """Return the spans of a tensor. ``starts`` has the number, file and offset of each stored tensor."""
    if not tensor.splits:
        number, file, offset = starts[tensor.group, tensor.name]
        return [TensorSpan(0, tensor.info.nbytes, number, 0, file, offset)]
    spans = []
    for (start, stop), name, at in split_ranges(tensor.info, tensor.splits):
        number, file, offset = starts[tensor.group, name]
        spans.append(TensorSpan(start, stop, number, at, file, offset + at))
    return sorted(spans)


@traced("plan", "plan")
def plan_into_files(
    global_spec: GlobalSpec,
    rank: int,
    names: Sequence[tuple[str, str]],
    spans_by_tensor: Mapping[tuple[str, str], Sequence[TensorSpan]],
    *,
    file_sizes: Sequence[int],
    host_of: Sequence[int] = (),
    grain: CellGrain | None = None,
) -> SavePlan:
    """Return the plan of ``rank`` for files with a given layout. ``names`` are the stored tensors by number.

    ``spans_by_tensor`` has the places of the bytes of each tensor that ranks hold, in an order that is the same on all
    ranks. A tensor may be stored as several tensors, and it may be stored twice. ``host_of`` and ``grain``
    are as in :func:`plan_save`.

    A save of one component calls it on every rank, with the layout that rank 0 has decided.
    """
    tensors = {(tensor.group, tensor.name): tensor for tensor in global_spec.iter_tensors()}
    spans = dict(sorted(spans_by_tensor.items(), key=_span_positions))
    rank_order = order_ranks((tensors[key] for key in spans), len(global_spec.spec_of))
    plan = _plan_spans(tensors, spans, rank, file_sizes, host_of=host_of, grain=grain)
    return replace(plan, tensors=names, rank_order=rank_order)


def _plan_spans(
    tensors: Mapping[tuple[str, str], GlobalTensor],
    spans: Mapping[tuple[str, str], Sequence[TensorSpan]],
    rank: int,
    file_sizes: Sequence[int],
    *,
    host_of: Sequence[int],
    grain: CellGrain | None = None,
) -> SavePlan:
    """Return the plan of ``rank`` for tensors with known places, without the descriptions of the files."""
    builder = _SavePlanBuilder(rank)
    for key, of_tensor in spans.items():
        builder.add_tensor(tensors[key], of_tensor)
    plan = replace(
        EMPTY_PLAN,
        stripe_tasks=builder.stripe_tasks,
        replicas=builder.replicas,
        striped_shards=builder.striped_shards,
    )
    if len({*host_of}) <= 1:
        return replace(plan, file_ranges=builder.build_file_ranges(), needs_exchange=_has_stripes(tensors))
    writers = ShardWriters({key: tensors[key] for key in spans}, _writer_ranks)
    writer_map = WriterMap(_spans_by_file(spans), file_sizes, writers)
    planner = CellPlanner(writer_map, host_of, rank, grain)
    cells = planner.plan_rank(builder.ranges_by_writers, builder.stripe_ranges())
    needs_exchange = grain is not None or _has_stripes(tensors) or _may_share_cells(tensors)
    return replace(plan, **asdict(cells), needs_exchange=needs_exchange)


def _spans_by_file(spans: Mapping[tuple[str, str], Sequence[TensorSpan]]) -> dict[int, list[PlacedTensor]]:
    by_file: dict[int, list[PlacedTensor]] = {}
    for key, of_tensor in spans.items():
        for span in of_tensor:
            stop = span.offset + span.stop - span.start
            by_file.setdefault(span.file, []).append(PlacedTensor(span.offset, stop, key, span.start))
    return by_file


def _span_positions(item: tuple[tuple[str, str], Sequence[TensorSpan]]) -> list[tuple[int, int]]:
    return [(span.file, span.offset) for span in item[1]]


def _has_stripes(tensors: Mapping[tuple[str, str], GlobalTensor]) -> bool:
    """Return whether any tensor is moved in stripes."""
    return any(is_striped(tensor) for tensor in tensors.values())


def _may_share_cells(tensors: Mapping[tuple[str, str], GlobalTensor]) -> bool:
    """Return whether ranks of different hosts may hold bytes of one cell: unless all ranks hold everything."""
    return (
        any(tensor.division for tensor in tensors.values())
        or len({(tensor.all_ranks(), tensor.shared) for tensor in tensors.values()}) > 1
    )


def _pack_groups(
    tensors: Mapping[tuple[str, str], GlobalTensor], tied: Mapping[str, Mapping[str, str]], limit: int
) -> dict[str, list[DataFile]]:
    infos: dict[str, dict[str, TensorInfo]] = {}
    apart: dict[str, set[str]] = {}
    for (group, name), tensor in tensors.items():
        for key, info in stored_tensors(name, tensor.info, tensor.splits).items():
            if key in infos.setdefault(group, {}):
                raise StateError(f"two {group} tensors would be stored under the name {key!r}")
            infos[group][key] = info
            if tensor.apart:
                apart.setdefault(group, set()).add(key)
    return {
        group: pack_files(group, packed, tied.get(group, {}), limit, apart.get(group, ()))
        for group, packed in sorted(infos.items())
    }


def _writer_ranks(tensor: GlobalTensor, coordinate: Coordinate) -> tuple[int, ...]:
    """Return the ranks that may write a shard: all its holders, or only the first if their values may differ."""
    holders = tensor.holder_ranks(coordinate)
    return holders if tensor.shared else holders[:1]


def _locate_range(spans: Sequence[TensorSpan], start: int, stop: int) -> Iterator[FileRange]:
    """Yield the file ranges of bytes ``[start, stop)`` of a tensor. ``spans`` are in the order of their ends, too."""
    for span in spans[bisect_right(spans, start, key=_span_end) :]:
        if span.start >= stop:
            break
        low, high = max(start, span.start), min(stop, span.stop)
        if low < high:
            skip = low - span.start
            yield FileRange(
                span.tensor, span.at + skip, span.at + skip + high - low, low - start, span.file, span.offset + skip
            )


def _span_end(span: TensorSpan) -> int:
    return span.stop


class _SavePlanBuilder:
    """Collects the bytes that one rank writes, sends, and compares with replicas."""

    def __init__(self, rank: int) -> None:
        self._rank, self._routes = rank, StripeRoutes(rank, _writer_ranks)
        self.ranges_by_writers: dict[tuple[int, ...], list[FileRange]] = {}
        self.stripe_tasks: list[StripeTask] = []
        self.striped_shards: list[StripedShard] = []
        self.replicas: dict[tuple[int, ...], list[ReplicatedShard]] = {}

    def add_tensor(self, tensor: GlobalTensor, spans: Sequence[TensorSpan]) -> None:
        """Add the rank's work for one tensor."""
        if not spans:
            return
        coordinate = tensor.coordinate_of(self._rank)
        if coordinate is None:
            return
        shard, holders = local_shard(tensor.info, tensor.division, coordinate), tensor.holder_ranks(coordinate)
        if tensor.shared and len(holders) > 1 and shard.nbytes:
            self.replicas.setdefault(holders, []).append(ReplicatedShard(spans[0].tensor, shard.nbytes))

        def locate_range(start: int, stop: int) -> list[FileRange]:
            return list(_locate_range(spans, start, stop))

        writers = _writer_ranks(tensor, coordinate)
        if is_striped(tensor):
            self._add_stripes(tensor, locate_range)
            if self._rank == writers[spans[0].tensor % len(writers)]:
                self.striped_shards.append(StripedShard(shard, spans))
        elif self._rank in writers:
            self.ranges_by_writers.setdefault(writers, []).extend(locate_shard(shard, locate_range))

    def _add_stripes(self, tensor: GlobalTensor, locate_range: Locate) -> None:
        """Add the stripes that this rank owns, and the stripes that get a contribution from it."""
        self.stripe_tasks += (
            task
            for task in self._routes.route_tensor(tensor, locate_range)
            if isinstance(task, OwnedStripe) or task.contribution.sender == self._rank
        )

    def stripe_ranges(self) -> list[FileRange]:
        """Return the ranges of the stripes that this rank assembles."""
        owned = (task for task in self.stripe_tasks if isinstance(task, OwnedStripe))
        return [file_range for task in owned for file_range in task.file_ranges]

    def build_file_ranges(self) -> list[FileRange]:
        """Return the ranges that this rank writes from its own shards, in the order of the files."""
        return sorted(
            (
                file_range
                for holders, file_ranges in self.ranges_by_writers.items()
                for file_range in split_evenly(
                    sorted(file_ranges, key=_file_position), holders.index(self._rank), len(holders)
                )
                if file_range.start < file_range.stop
            ),
            key=_file_position,
        )


def _file_position(file_range: FileRange) -> tuple[int, int]:
    return file_range.file, file_range.offset
