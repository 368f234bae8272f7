"""The plan of one rank's reads in a load, and its execution.

:mod:`rankless.load.load_operation` builds it on every rank in the vote "matching …", and runs it in the vote "reading".
The numbers of tensors and files must be equal on all ranks: the exchanged items name them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import msgspec

from rankless.engine.comm.session import RankGroup, Session
from rankless.engine.io.device_streams import CopyStream, begin_copies
from rankless.engine.io.read import read_file_ranges, read_host_shared
from rankless.engine.io.read_shared import read_shared, read_stripes
from rankless.engine.io.requests import Fragments, OnBytesMoved
from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.engine.io.tensor_sources import Source
from rankless.engine.plan import layout_types
from rankless.engine.plan.file_ranges import FileRange, count_bytes
from rankless.engine.plan.global_spec import GlobalTensor
from rankless.engine.plan.layout_types import BoxSharded
from rankless.engine.plan.load_plan import BroadcastChunk, LoadPlan, plan_load
from rankless.engine.plan.shard_byte_ranges import Locate, local_shard, locate_shard
from rankless.errors import UnsupportedTensorError
from rankless.formats.reader import FileExtent, Reader
from rankless.formats.remapped_reader import TensorMapping, find_mappings, underlying_reader
from rankless.observe.spans import traced
from rankless.ondisk.data_files import TensorInfo
from rankless.state.restore import LoadTargets
from rankless.state.tensor_views import DTYPES, TensorView
from rankless.storage.reader_pool import MakeReaders, ReaderPool

#: The group and the name of a tensor.
_Key = tuple[str, str]


class _FileIndex:
    """An index from tensor numbers to file ranges. A joined tensor has the number of its first stored tensor."""

    def __init__(self, reader: Reader, numbering: Mapping[_Key, int], readable: Collection[int]) -> None:
        """Index the stored tensors that any rank may read. ``numbering`` has the numbers of all, in order.

        Files have equal numbers on all ranks, because ``readable`` is equal on all ranks.
        """
        stored = self._stored = underlying_reader(reader)
        self._numbering, self._keys = numbering, list(numbering)
        self.numbers: dict[Source, int] = {}
        self._whole: dict[int, Sequence[FileRange]] = {}
        groups = stored.groups
        for tensor in sorted(readable):
            group, name = self._keys[tensor]
            extents = stored.find_extents(group, name, 0, groups[group][name].nbytes)
            self._whole[tensor] = self._number_files(tensor, 0, extents)

    def _number_files(self, tensor: int, start: int, extents: Iterable[FileExtent]) -> Sequence[FileRange]:
        """Return the file ranges of a tensor's bytes from ``start`` on."""
        numbers = self.numbers
        return [
            FileRange(tensor, first, last, first - start, numbers.setdefault(file, len(numbers)), offset)
            for file, offset, first, last in extents
        ]

    def locate_bytes(self, tensor: int, start: int, stop: int) -> Sequence[FileRange]:
        """Return the file ranges of bytes of a stored tensor."""
        whole = self._whole[tensor]
        if whole and start == 0 and stop == whole[-1].stop:
            return whole
        return self._number_files(tensor, start, self._stored.find_extents(*self._keys[tensor], start, stop))

    def locate_mapping(self, group: str, mapping: TensorMapping) -> Locate:
        """Return a function that maps byte ranges of a joined tensor to file ranges of its stored tensors.

        The file ranges have the numbers of the stored tensors, so that their CRCs can be verified.
        """
        if not _is_joined(mapping):
            return partial(self.locate_bytes, self._numbering[group, mapping.ranges[0].name])

        def find_file_ranges(start: int, stop: int) -> list[FileRange]:
            return [
                file_range._replace(local=file_range.local + at - start)
                for at, (name, first, last) in mapping.find_ranges(start, stop)
                for file_range in self.locate_bytes(self._numbering[group, name], first, last)
            ]

        return find_file_ranges


class Reads(msgspec.Struct, frozen=True, dict=True):
    """One rank's share of the reads.

    ``number`` has the numbers of the stored tensors, and ``files`` are the files by number. ``mappings`` are the
    requested tensors. ``later_users`` are the requested tensors that share a stored tensor with an earlier one.
    ``alias_ranges`` are the file ranges for each target of :func:`_iterate_aliases`, which each rank reads for itself.
    """

    plan: LoadPlan
    number: Mapping[_Key, int]
    mappings: Mapping[_Key, TensorMapping]
    later_users: Mapping[_Key, None]
    files: Sequence[Source]
    alias_ranges: Sequence[Sequence[FileRange]]
    exchange: bool

    @classmethod
    @traced("plan", "plan")
    def build(
        cls, reader: Reader, targets: LoadTargets, tensors: Sequence[GlobalTensor], ranks: RankGroup, *, exchange: bool
    ) -> Reads:
        """Plan the reads of this rank. ``tensors`` are those that any rank requests.

        Tensors have the same numbers on all ranks.

        An error of it is raised on all ranks, in the last vote before anything changes.
        """
        groups = underlying_reader(reader).groups
        numbered = sorted((group, name) for group, names in groups.items() for name in names)
        number = {key: i for i, key in enumerate(numbered)}
        keys = [(tensor.group, tensor.name) for tensor in tensors]
        # Another rank may request a tensor joined from stored tensors that this rank does not know to belong together.
        mappings = find_mappings(reader, keys)
        later_users = _find_later_users(mappings)
        first_parts = {key: number[key[0], mappings[key].ranges[0].name] for key in mappings if key not in later_users}
        requested = {first_parts[key]: tensor for key, tensor in zip(keys, tensors, strict=True) if key in first_parts}
        files = _FileIndex(reader, number, _find_readable(keys, number, mappings))

        joined = {
            first_part: files.locate_mapping(key[0], mappings[key])
            for key, first_part in first_parts.items()
            if _is_joined(mappings[key])
        }

        def locate_requested(number: int, start: int, stop: int) -> Sequence[FileRange]:
            locate = joined.get(number)
            return files.locate_bytes(number, start, stop) if locate is None else locate(start, stop)

        by_key = dict(zip(keys, tensors, strict=True))
        return cls(
            plan=plan_load(requested, ranks.rank, locate_requested, exchange=exchange),
            number=number,
            mappings=mappings,
            later_users=later_users,
            alias_ranges=[
                _alias_file_ranges(
                    _Alias(key, target, targets.tensors.by_source[key], by_key[key]),
                    mappings[key].info,
                    ranks,
                    files.locate_mapping(key[0], mappings[key]),
                )
                for key, target in _iterate_aliases(targets, later_users)
            ],
            files=list(files.numbers),
            exchange=exchange,
        )

    @cached_property
    def nbytes(self) -> int:
        """The number of bytes that this rank reads."""
        return self.plan.nbytes + sum(map(count_bytes, self.alias_ranges))

    def iter_stored(self, targets: LoadTargets) -> Iterator[_Key]:
        """Yield the stored tensors that fill the targets."""
        for key in targets.tensors.by_source:
            yield from ((key[0], name) for name in self.mappings[key].names)

    def iter_file_ranges(self) -> Iterator[FileRange]:
        """Yield the ranges that this rank itself reads."""
        yield from self.plan.file_ranges
        yield from self.plan.host_shared
        for stripe in self.plan.local_stripes:
            yield from stripe.file_ranges
        for file_ranges in self.alias_ranges:
            yield from file_ranges

    def find_read_files(self) -> set[int]:
        """Return the numbers of the files that this rank reads, or that others read for it."""
        exchanged = (
            file_range
            for item in self.plan.exchanged
            for file_range in (item.chunk.file_ranges if isinstance(item, BroadcastChunk) else item.file_ranges)
        )
        return {file_range.file for file_range in itertools.chain(self.iter_file_ranges(), exchanged)}

    @traced("read", "read")
    def run(
        self,
        targets: LoadTargets,
        ranks: RankGroup,
        session: Session,
        on_moved: OnBytesMoved,
        *,
        make_readers: MakeReaders = ReaderPool,
    ) -> Fragments:
        """Read into the targets. All of them have memory now. Return the CRCs of the fragments that were hashed.

        The reads run after the work that the caller has enqueued on the targets' devices, and before later work.

        Each rank calls it in the vote "reading", in the thread of the caller.
        """
        aliases = (target for _, target in targets.tensors.aliases)
        tensors = [target.local for target in (*targets.tensors.by_source.values(), *aliases)]
        return self._fill_targets(targets, ranks, session, _Moves(on_moved, make_readers, begin_copies(tensors)))

    def _fill_targets(self, targets: LoadTargets, ranks: RankGroup, session: Session, moves: _Moves) -> Fragments:
        sinks: dict[int, TensorBytes] = {}
        aliases = list(_iterate_aliases(targets, self.later_users))
        for key in targets.tensors.by_source.keys() - self.later_users.keys():
            mapping, target = self.mappings[key], targets.tensors.by_source[key]
            sink = _target_bytes(target, mapping.info)
            for part in mapping.ranges:
                sinks[self.number[key[0], part.name]] = sink
        sink_of = sinks.__getitem__
        fragments: Fragments = {}
        read_options: dict[str, Any] = {"on_moved": moves.on_moved, "make_readers": moves.make_readers}
        own_options = {**read_options, "streams": moves.streams}
        if self.exchange:
            from rankless.engine.io.p2p import P2PExchange  # noqa: PLC0415 - a load of one rank sends nothing

            with P2PExchange(ranks.gloo_group(session.timeout), session) as p2p:
                fragments = read_shared(self.files, self.plan.exchanged, sink_of, p2p, **read_options)
        fragments |= read_stripes(self.files, self.plan.local_stripes, ranks.rank, sink_of, **read_options)
        fragments |= read_host_shared(self.files, self.plan.host_shared, ranks.rank, sink_of, **own_options)
        fragments |= read_file_ranges(self.files, self.plan.file_ranges, sink_of, **own_options)
        for (key, target), file_ranges in zip(aliases, self.alias_ranges, strict=True):
            sink = _target_bytes(target, self.mappings[key].info)
            alias_sinks = {file_range.tensor: sink for file_range in file_ranges}
            more = read_host_shared(self.files, file_ranges, ranks.rank, alias_sinks.__getitem__, **own_options)
            for tensor, read_again in more.items():
                fragments.setdefault(tensor, []).extend(read_again)
        return fragments


class _Moves(NamedTuple):
    """The callback for bytes that were moved, the maker of the readers of files, and the streams of accelerators."""

    on_moved: OnBytesMoved
    make_readers: MakeReaders
    streams: Sequence[CopyStream]


def _is_joined(mapping: TensorMapping) -> bool:
    """Return whether a tensor is more than the first bytes of one stored tensor."""
    return len(mapping.ranges) > 1 or mapping.ranges[0].start > 0


def _find_later_users(mappings: Mapping[_Key, TensorMapping]) -> dict[_Key, None]:
    """Return the tensors that share a stored tensor with an earlier one, such as other parts of it.

    Each rank reads its part of these for itself, without an exchange.
    """
    first_users: dict[_Key, _Key] = {}
    later: dict[_Key, None] = {}
    for key, mapping in mappings.items():
        for name in mapping.names:
            if first_users.setdefault((key[0], name), key) != key:
                later[key] = None
    return later


def _iterate_aliases(targets: LoadTargets, later_users: Collection[_Key]) -> Iterator[tuple[_Key, TensorView]]:
    """Yield the targets that are filled with stored tensors which also fill another target."""
    yield from targets.tensors.aliases
    for key in later_users:
        if key in targets.tensors.by_source:
            yield key, targets.tensors.by_source[key]


def _find_readable(
    keys: Sequence[_Key], numbering: Mapping[_Key, int], mappings: Mapping[_Key, TensorMapping]
) -> set[int]:
    """Return the stored tensors that any rank may read: the same on all ranks, however each rank joins them."""
    joined_groups = {key[0] for key in keys if key not in numbering}
    joined = {number for (group, _), number in numbering.items() if group in joined_groups} if joined_groups else set()
    own = {numbering[group, part.name] for (group, _), mapping in mappings.items() for part in mapping.ranges}
    return {numbering[key] for key in keys if key in numbering} | joined | own


def _target_bytes(target: TensorView, info: TensorInfo) -> TensorBytes:
    return TensorBytes(target.local, DTYPES[info.dtype])


class _Alias(NamedTuple):
    """A further target of a stored tensor, the first one, and the tensor as all ranks request it."""

    key: _Key
    target: TensorView
    first: TensorView
    requested: GlobalTensor


def _alias_file_ranges(alias: _Alias, info: TensorInfo, ranks: RankGroup, locate: Locate) -> list[FileRange]:
    """Return the file ranges of this rank's shard of a further target.

    Raises ``UnsupportedTensorError`` if only one of both targets is divided by the rule of its layout.
    """
    target, first, requested = alias.target, alias.first, alias.requested
    has_pieces = any(isinstance(placement, BoxSharded) for _, placement in requested.division)
    if (has_pieces or target.pieces is not None) and (target.layout, target.pieces) != (first.layout, first.pieces):
        raise UnsupportedTensorError(
            f"{alias.key[0]} tensor {alias.key[1]!r} is tied to another one in the checkpoint; here both are separate, "
            "and their shards have different sizes: shard them alike, or tie them"
        )
    if has_pieces:
        division, coordinate = requested.division, requested.coordinate_of(ranks.rank)
    elif target.layout is None:
        division, coordinate = (), ()
    else:
        global_rank = ranks.global_ranks()[ranks.rank]
        division, coordinate = target.layout.division, layout_types.coordinate_of_rank(target.layout, global_rank)
    if coordinate is None:
        return []
    return list(locate_shard(local_shard(info, division, coordinate), locate))
