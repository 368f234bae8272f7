"""What one rank reads in a load: the plan, with the files and targets that it names by number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.engine import layouts
from holdfast.engine.fetch import LoadPlan, plan_load
from holdfast.engine.local import LocalPart
from holdfast.engine.membership import Held
from holdfast.engine.parts import part
from holdfast.engine.ranks import Ranks, Session
from holdfast.engine.read import read_common, read_pieces
from holdfast.engine.routes import Locate, as_it_lies
from holdfast.engine.spread import read_shared, read_stripes
from holdfast.engine.transfer import Fragments, Moved, Piece, nbytes_of
from holdfast.engine.wire import Wire
from holdfast.engine.woven import Source
from holdfast.formats.reader import Extent, Reader
from holdfast.layout.files import TensorInfo
from holdfast.state.restore import Intake
from holdfast.state.tensors import DTYPES, Described


class _Files:
    """Where tensors, by number, lie in files, by number."""

    def __init__(self, reader: Reader, numbered: Sequence[tuple[str, str]], wanted: Iterable[int]) -> None:
        """``wanted`` are the tensors that any rank wants: so that files have the same numbers on all ranks."""
        self._extents, self._numbered = reader.extents, numbered
        self._whole = {tensor: self._all_of(tensor, reader) for tensor in sorted(wanted)}
        files = dict.fromkeys(extent.file for extents in self._whole.values() for extent in extents)
        self.numbers = {file: number for number, file in enumerate(files)}

    def _all_of(self, tensor: int, reader: Reader) -> Sequence[Extent]:
        group, name = self._numbered[tensor]
        return reader.extents(group, name, 0, reader.groups[group][name].nbytes)

    def locate(self, tensor: int) -> Locate:
        """Where the bytes of a tensor lie."""
        group, name = self._numbered[tensor]
        whole = self._whole[tensor]

        def pieces(start: int, stop: int) -> list[Piece]:
            is_whole = whole and start == whole[0].start and stop == whole[-1].stop
            return [
                Piece(tensor, first, last, first - start, self.numbers[file], offset)
                for file, offset, first, last in (whole if is_whole else self._extents(group, name, start, stop))
            ]

        return pieces


@dataclass(frozen=True)
class Reading:
    """One rank's share of the reading; ``more`` goes into targets that take what another target has taken, too."""

    plan: LoadPlan
    numbered: Sequence[tuple[str, str]]
    files: Sequence[Source]
    more: Sequence[Sequence[Piece]]
    exchange: bool

    @classmethod
    def of(cls, reader: Reader, intake: Intake, wanted: Sequence[Held], ranks: Ranks, *, exchange: bool) -> Reading:
        """Plan it. Tensors have the same numbers on all ranks."""
        numbered = sorted((group, name) for group, names in reader.groups.items() for name in names)
        number = {key: i for i, key in enumerate(numbered)}
        held = {number[one.group, one.name]: one for one in wanted}
        files = _Files(reader, numbered, held)
        plan = plan_load(held, ranks.rank, files.locate, exchange=exchange)
        me = ranks.global_ranks()[ranks.rank]
        return cls(
            plan=plan,
            numbered=numbered,
            more=[
                _runs(target, reader.groups[key[0]][key[1]], me, files.locate(number[key]))
                for key, target in intake.more
            ],
            files=list(files.numbers),
            exchange=exchange,
        )

    @property
    def nbytes(self) -> int:
        """The bytes that this rank reads."""
        return self.plan.nbytes + sum(map(nbytes_of, self.more))

    def run(self, reader: Reader, intake: Intake, ranks: Ranks, session: Session, moved: Moved) -> Fragments:
        """Read into the targets of the intake, which all have memory now. Returns what was hashed here."""
        number = {key: i for i, key in enumerate(self.numbered)}
        infos = {key: reader.groups[key[0]][key[1]] for key in intake.targets}
        parts = {number[key]: _sink(target, infos[key]) for key, target in intake.targets.items()}
        found: Fragments = {}
        if self.exchange:
            with Wire(ranks.gloo(session.timeout), session) as wire:
                found = read_shared(self.files, self.plan.shared, parts.__getitem__, wire, moved)
        found |= read_stripes(self.files, self.plan.alone, ranks.rank, parts.__getitem__, moved)
        found |= read_common(self.files, self.plan.common, ranks.rank, parts.__getitem__, moved)
        found |= read_pieces(self.files, self.plan.pieces, parts.__getitem__, moved)
        for (key, target), pieces in zip(intake.more, self.more, strict=True):
            sinks = {piece.tensor: _sink(target, infos[key]) for piece in pieces}
            for tensor, fragments in read_common(self.files, pieces, ranks.rank, sinks.__getitem__, moved).items():
                found.setdefault(tensor, []).extend(fragments)
        return found


def _sink(target: Described, info: TensorInfo) -> LocalPart:
    return LocalPart(target.local, DTYPES[info.dtype])


def _runs(target: Described, info: TensorInfo, me: int, locate: Locate) -> list[Piece]:
    """What goes into a target, as it lies in files. ``me`` is the rank's job-wide number."""
    coordinate = () if target.layout is None else layouts.part_of(target.layout, me)
    if coordinate is None:
        return []
    return list(as_it_lies(part(info, target.layout.division if target.layout else (), coordinate), locate))
