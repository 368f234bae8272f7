"""The plan of one rank's reads in a load, and its execution."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from holdfast.engine.comm.session import RankGroup, Session
from holdfast.engine.io.device_streams import Accelerator, synchronize_devices
from holdfast.engine.io.p2p import P2PExchange
from holdfast.engine.io.read import read_file_ranges, read_host_shared
from holdfast.engine.io.read_shared import read_shared, read_stripes
from holdfast.engine.io.requests import Fragments, OnBytesMoved
from holdfast.engine.io.sources import Source
from holdfast.engine.io.tensor_bytes import TensorBytes
from holdfast.engine.plan import placements
from holdfast.engine.plan.file_ranges import FileRange, count_bytes
from holdfast.engine.plan.global_spec import GlobalTensor
from holdfast.engine.plan.load_plan import LoadPlan, plan_load
from holdfast.engine.plan.routes import Locate, contiguous_requests
from holdfast.engine.plan.shards import local_shard
from holdfast.formats.reader import FileExtent, Reader
from holdfast.formats.remapped_reader import TensorMapping, mapping_of, underlying_reader
from holdfast.ondisk.files import TensorInfo
from holdfast.state.restore import LoadTargets
from holdfast.state.tensors import DTYPES, TensorView
from holdfast.storage.reader_pool import MakeReaders, ReaderPool


class _FileIndex:
    """An index from tensor numbers to file ranges. A joined tensor has the number of its first stored tensor."""

    def __init__(self, reader: Reader, numbered: Sequence[tuple[str, str]], requested: Iterable[int]) -> None:
        """``numbered`` are the stored tensors. ``requested`` are those that any rank requests.

        Files have equal numbers on all ranks, because ``requested`` is equal on all ranks.
        """
        self._stored, self._numbered = underlying_reader(reader), numbered
        self._number = {key: i for i, key in enumerate(numbered)}
        self._extents = {tensor: self._find_all_extents(tensor) for tensor in sorted(requested)}
        files = dict.fromkeys(extent.file for extents in self._extents.values() for extent in extents)
        self.numbers = {file: number for number, file in enumerate(files)}

    def _find_all_extents(self, tensor: int) -> Sequence[FileExtent]:
        group, name = self._numbered[tensor]
        return self._stored.find_extents(group, name, 0, self._stored.groups[group][name].nbytes)

    def locate_tensor(self, tensor: int) -> Locate:
        """Return a function that maps byte ranges of a stored tensor to file ranges."""
        group, name = self._numbered[tensor]
        all_extents = self._extents[tensor]

        def find_file_ranges(start: int, stop: int) -> list[FileRange]:
            is_whole = all_extents and start == all_extents[0].start and stop == all_extents[-1].stop
            extents = all_extents if is_whole else self._stored.find_extents(group, name, start, stop)
            return [
                FileRange(tensor, first, last, first - start, self.numbers[file], offset)
                for file, offset, first, last in extents
            ]

        return find_file_ranges

    def locate_mapping(self, group: str, mapping: TensorMapping) -> Locate:
        """Return a function that maps byte ranges of a joined tensor to file ranges of its stored tensors.

        The file ranges have the numbers of the stored tensors, so that their CRCs can be verified.
        """
        if len(mapping.ranges) == 1:
            return self.locate_tensor(self._number[group, mapping.names[0]])
        locate_stored = {name: self.locate_tensor(self._number[group, name]) for name in mapping.names}

        def find_file_ranges(start: int, stop: int) -> list[FileRange]:
            return [
                file_range._replace(local=file_range.local + at - start)
                for at, (name, first, last) in mapping.find_ranges(start, stop)
                for file_range in locate_stored[name](first, last)
            ]

        return find_file_ranges


@dataclass(frozen=True)
class ReadPlan:
    """One rank's share of the reads.

    ``numbered`` are the stored tensors and ``files`` the files, by number. ``alias_ranges`` are the file ranges for
    each aliased target, which is filled with the same stored tensor as another target.
    """

    plan: LoadPlan
    numbered: Sequence[tuple[str, str]]
    files: Sequence[Source]
    alias_ranges: Sequence[Sequence[FileRange]]
    exchange: bool

    @classmethod
    def build(
        cls, reader: Reader, targets: LoadTargets, tensors: Sequence[GlobalTensor], ranks: RankGroup, *, exchange: bool
    ) -> ReadPlan:
        """Plan the reads of this rank. ``tensors`` are those that any rank requests.

        Tensors have the same numbers on all ranks.
        """
        stored = underlying_reader(reader).groups
        numbered = sorted((group, name) for group, names in stored.items() for name in names)
        number = {key: i for i, key in enumerate(numbered)}
        mappings = {
            (group, name): mapping_of(reader, group, name) for group, names in reader.groups.items() for name in names
        }
        # Another rank may request a tensor joined from stored tensors that this rank does not know to belong together.
        requested = {
            number[tensor.group, mappings[_key_of(tensor)].names[0]]: tensor
            for tensor in tensors
            if _key_of(tensor) in mappings
        }
        files = _FileIndex(reader, numbered, {number[key] for key in _readable_keys(tensors, stored, mappings)})

        def locate_requested(number: int) -> Locate:
            tensor = requested[number]
            return files.locate_mapping(tensor.group, mappings[_key_of(tensor)])

        global_rank = ranks.global_ranks()[ranks.rank]
        return cls(
            plan=plan_load(requested, ranks.rank, locate_requested, exchange=exchange),
            numbered=numbered,
            alias_ranges=[
                _shard_file_ranges(target, mappings[key].info, global_rank, files.locate_mapping(key[0], mappings[key]))
                for key, target in targets.aliased_targets
            ],
            files=list(files.numbers),
            exchange=exchange,
        )

    @property
    def nbytes(self) -> int:
        """The number of bytes that this rank reads."""
        return self.plan.nbytes + sum(map(count_bytes, self.alias_ranges))

    def iter_file_ranges(self) -> Iterator[FileRange]:
        """Yield what this rank itself reads."""
        yield from self.plan.file_ranges
        yield from self.plan.host_shared
        for stripe in self.plan.local_stripes:
            yield from stripe.file_ranges
        for file_ranges in self.alias_ranges:
            yield from file_ranges

    def run(
        self,
        reader: Reader,
        targets: LoadTargets,
        ranks: RankGroup,
        session: Session,
        on_moved: OnBytesMoved,
        *,
        make_readers: MakeReaders = ReaderPool,
        accelerator: Accelerator = torch.accelerator,
    ) -> Fragments:
        """Read into the targets, all of which have memory now. Return the CRCs of the fragments that were hashed.

        The reads run after the work that the caller has enqueued on the targets' devices, and before later work.
        """
        aliases = (target for _, target in targets.aliased_targets)
        tensors = [target.local for target in (*targets.targets.values(), *aliases)]
        synchronize_devices(tensors, accelerator)
        fragments = self._fill_targets(reader, targets, ranks, session, _Moves(on_moved, make_readers))
        synchronize_devices(tensors, accelerator)
        return fragments

    def _fill_targets(
        self, reader: Reader, targets: LoadTargets, ranks: RankGroup, session: Session, moves: _Moves
    ) -> Fragments:
        number = {key: i for i, key in enumerate(self.numbered)}
        infos = {key: reader.groups[key[0]][key[1]] for key in targets.targets}
        sinks: dict[int, TensorBytes] = {}
        for (group, name), target in targets.targets.items():
            numbers = [number[group, stored] for stored in mapping_of(reader, group, name).names]
            sinks |= dict.fromkeys(numbers, _target_bytes(target, infos[group, name]))
        sink_of = sinks.__getitem__
        fragments: Fragments = {}
        read_options: dict[str, Any] = {"on_moved": moves.on_moved, "make_readers": moves.make_readers}
        if self.exchange:
            with P2PExchange(ranks.gloo_group(session.timeout), session) as p2p:
                fragments = read_shared(self.files, self.plan.exchanged, sink_of, p2p, **read_options)
        fragments |= read_stripes(self.files, self.plan.local_stripes, ranks.rank, sink_of, **read_options)
        fragments |= read_host_shared(self.files, self.plan.host_shared, ranks.rank, sink_of, **read_options)
        fragments |= read_file_ranges(self.files, self.plan.file_ranges, sink_of, **read_options)
        for (key, target), file_ranges in zip(targets.aliased_targets, self.alias_ranges, strict=True):
            alias_sinks = {file_range.tensor: _target_bytes(target, infos[key]) for file_range in file_ranges}
            more = read_host_shared(self.files, file_ranges, ranks.rank, alias_sinks.__getitem__, **read_options)
            for tensor, read_again in more.items():
                fragments.setdefault(tensor, []).extend(read_again)
        return fragments


class _Moves(NamedTuple):
    """The callback for bytes that were moved, and the maker of the readers of files."""

    on_moved: OnBytesMoved
    make_readers: MakeReaders


def _key_of(tensor: GlobalTensor) -> tuple[str, str]:
    return tensor.group, tensor.name


def _readable_keys(
    tensors: Sequence[GlobalTensor],
    stored: Mapping[str, Mapping[str, TensorInfo]],
    mappings: Mapping[tuple[str, str], TensorMapping],
) -> Iterator[tuple[str, str]]:
    """Yield the stored tensors that any rank may read: the same on all ranks, however each rank joins them."""
    for group in {tensor.group for tensor in tensors if tensor.name not in stored.get(tensor.group, {})}:
        yield from ((group, name) for name in stored.get(group, {}))
    for tensor in tensors:
        key = _key_of(tensor)
        if tensor.name in stored.get(tensor.group, {}):
            yield key
        if key in mappings:
            yield from ((tensor.group, name) for name in mappings[key].names)


def _target_bytes(target: TensorView, info: TensorInfo) -> TensorBytes:
    return TensorBytes(target.local, DTYPES[info.dtype])


def _shard_file_ranges(target: TensorView, info: TensorInfo, global_rank: int, locate: Locate) -> list[FileRange]:
    """Return the file ranges of this rank's shard of a target."""
    coordinate = () if target.layout is None else placements.coordinate_of_rank(target.layout, global_rank)
    if coordinate is None:
        return []
    return list(
        contiguous_requests(local_shard(info, target.layout.division if target.layout else (), coordinate), locate)
    )
