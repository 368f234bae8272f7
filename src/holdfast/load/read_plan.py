"""What one rank reads in a load: the plan, with the files and targets that it names by number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from holdfast.engine.comm.session import RankGroup, Session
from holdfast.engine.io.device_streams import Accelerator, synchronize_devices
from holdfast.engine.io.p2p import P2PExchange
from holdfast.engine.io.read import read_common, read_pieces
from holdfast.engine.io.read_shared import read_shared, read_stripes
from holdfast.engine.io.requests import Fragments, Moved
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


class _FileIndex:
    """Where tensors lie in files, by number. Tensors have the number of the first stored tensor that they are."""

    def __init__(self, reader: Reader, numbered: Sequence[tuple[str, str]], wanted: Iterable[int]) -> None:
        """``numbered`` are the stored tensors, ``wanted`` those that any rank wants: files have equal numbers then."""
        self._stored, self._numbered = underlying_reader(reader), numbered
        self._number = {key: i for i, key in enumerate(numbered)}
        self._whole = {tensor: self._all_of(tensor) for tensor in sorted(wanted)}
        files = dict.fromkeys(extent.file for extents in self._whole.values() for extent in extents)
        self.numbers = {file: number for number, file in enumerate(files)}

    def _all_of(self, tensor: int) -> Sequence[FileExtent]:
        group, name = self._numbered[tensor]
        return self._stored.extents(group, name, 0, self._stored.groups[group][name].nbytes)

    def locate(self, tensor: int) -> Locate:
        """Where the bytes of a stored tensor lie."""
        group, name = self._numbered[tensor]
        whole = self._whole[tensor]

        def pieces(start: int, stop: int) -> list[FileRange]:
            is_whole = whole and start == whole[0].start and stop == whole[-1].stop
            return [
                FileRange(tensor, first, last, first - start, self.numbers[file], offset)
                for file, offset, first, last in (whole if is_whole else self._stored.extents(group, name, start, stop))
            ]

        return pieces

    def locate_made(self, group: str, made: TensorMapping) -> Locate:
        """Where the bytes of a tensor lie, as pieces of the stored tensors that it is: so they can be verified."""
        if len(made.of) == 1:
            return self.locate(self._number[group, made.names[0]])
        homes = {name: self.locate(self._number[group, name]) for name in made.names}

        def pieces(start: int, stop: int) -> list[FileRange]:
            return [
                piece._replace(local=piece.local + at - start)
                for at, (name, first, last) in made.ranges(start, stop)
                for piece in homes[name](first, last)
            ]

        return pieces


@dataclass(frozen=True)
class ReadPlan:
    """One rank's share of the reading; ``more`` goes into targets that take what another target has taken, too."""

    plan: LoadPlan
    numbered: Sequence[tuple[str, str]]
    files: Sequence[Source]
    more: Sequence[Sequence[FileRange]]
    exchange: bool

    @classmethod
    def of(
        cls, reader: Reader, intake: LoadTargets, wanted: Sequence[GlobalTensor], ranks: RankGroup, *, exchange: bool
    ) -> ReadPlan:
        """Plan it. Tensors have the same numbers on all ranks."""
        inner = underlying_reader(reader).groups
        numbered = sorted((group, name) for group, names in inner.items() for name in names)
        number = {key: i for i, key in enumerate(numbered)}
        made = {
            (group, name): mapping_of(reader, group, name) for group, names in reader.groups.items() for name in names
        }
        # What other ranks want may be put together of stored tensors that only they know to belong together.
        held = {number[one.group, made[one.group, one.name].names[0]]: one for one in wanted if _key(one) in made}
        files = _FileIndex(reader, numbered, {number[key] for key in _read(wanted, inner, made)})

        def locate(tensor: int) -> Locate:
            return files.locate_made(held[tensor].group, made[_key(held[tensor])])

        me = ranks.global_ranks()[ranks.rank]
        return cls(
            plan=plan_load(held, ranks.rank, locate, exchange=exchange),
            numbered=numbered,
            more=[
                _runs(target, made[key].info, me, files.locate_made(key[0], made[key])) for key, target in intake.more
            ],
            files=list(files.numbers),
            exchange=exchange,
        )

    @property
    def nbytes(self) -> int:
        """The bytes that this rank reads."""
        return self.plan.nbytes + sum(map(count_bytes, self.more))

    def run(
        self,
        reader: Reader,
        intake: LoadTargets,
        ranks: RankGroup,
        session: Session,
        moved: Moved,
        *,
        accelerator: Accelerator = torch.accelerator,
    ) -> Fragments:
        """Read into the targets of the intake, which all have memory now. Returns what was hashed here.

        What the caller has enqueued on their devices comes before that, and what it enqueues later after it.
        """
        targets = [target.local for target in (*intake.targets.values(), *(target for _, target in intake.more))]
        synchronize_devices(targets, accelerator)
        found = self._fill(reader, intake, ranks, session, moved)
        synchronize_devices(targets, accelerator)
        return found

    def _fill(self, reader: Reader, intake: LoadTargets, ranks: RankGroup, session: Session, moved: Moved) -> Fragments:
        number = {key: i for i, key in enumerate(self.numbered)}
        infos = {key: reader.groups[key[0]][key[1]] for key in intake.targets}
        parts: dict[int, TensorBytes] = {}
        for (group, name), target in intake.targets.items():
            numbers = [number[group, one] for one in mapping_of(reader, group, name).names]
            parts |= dict.fromkeys(numbers, _sink(target, infos[group, name]))
        found: Fragments = {}
        if self.exchange:
            with P2PExchange(ranks.gloo(session.timeout), session) as wire:
                found = read_shared(self.files, self.plan.shared, parts.__getitem__, wire, moved)
        found |= read_stripes(self.files, self.plan.alone, ranks.rank, parts.__getitem__, moved)
        found |= read_common(self.files, self.plan.common, ranks.rank, parts.__getitem__, moved)
        found |= read_pieces(self.files, self.plan.pieces, parts.__getitem__, moved)
        for (key, target), pieces in zip(intake.more, self.more, strict=True):
            sinks = {piece.tensor: _sink(target, infos[key]) for piece in pieces}
            for tensor, fragments in read_common(self.files, pieces, ranks.rank, sinks.__getitem__, moved).items():
                found.setdefault(tensor, []).extend(fragments)
        return found


def _key(held: GlobalTensor) -> tuple[str, str]:
    return held.group, held.name


def _read(
    wanted: Sequence[GlobalTensor],
    stored: Mapping[str, Mapping[str, TensorInfo]],
    made: Mapping[tuple[str, str], TensorMapping],
) -> Iterator[tuple[str, str]]:
    """The stored tensors that any rank may read: the same on all ranks, whatever each puts together of them."""
    for group in {one.group for one in wanted if one.name not in stored.get(one.group, {})}:
        yield from ((group, name) for name in stored.get(group, {}))
    for one in wanted:
        if one.name in stored.get(one.group, {}):
            yield _key(one)
        if _key(one) in made:
            yield from ((one.group, name) for name in made[_key(one)].names)


def _sink(target: TensorView, info: TensorInfo) -> TensorBytes:
    return TensorBytes(target.local, DTYPES[info.dtype])


def _runs(target: TensorView, info: TensorInfo, me: int, locate: Locate) -> list[FileRange]:
    """What goes into a target, as it lies in files. ``me`` is the rank's job-wide number."""
    coordinate = () if target.layout is None else placements.shard_index(target.layout, me)
    if coordinate is None:
        return []
    return list(
        contiguous_requests(local_shard(info, target.layout.division if target.layout else (), coordinate), locate)
    )
