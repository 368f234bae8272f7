"""Who holds what: the specs and meshes of all ranks, put together. Every rank derives the same from them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import msgspec

from holdfast.engine.plan import placements
from holdfast.engine.plan.placements import Coordinate, Division, MeshShape, PlacementLayout
from holdfast.engine.plan.shards import local_shard
from holdfast.engine.plan.spec import OWN, PER_RANK, LayoutSpec, Meshes, Spec, TensorSpec
from holdfast.engine.plan.split_tensors import Splits
from holdfast.errors import RankMismatchError, StateError
from holdfast.ondisk.files import TensorInfo

#: Ranks of a mesh that are not in the group.
_OUTSIDE = -1


class GlobalTensor(msgspec.Struct, frozen=True):
    """A tensor of the checkpoint, how it is divided, and who holds its parts.

    ``layouts`` are all that its holders say, of one division; ``whole`` are those that hold it undivided.
    ``shared`` parts have equal values on all their holders. It is ``complete`` where all ranks of its meshes are
    among those that ``named`` it. ``splits`` are what it is stored as, where that is not one tensor of its name.
    """

    group: str
    name: str
    info: TensorInfo
    shared: bool
    named: tuple[int, ...]
    whole: tuple[int, ...] = ()
    layouts: tuple[PlacementLayout, ...] = ()
    division: Division = ()
    complete: bool = True
    splits: Splits = ()

    def holders(self, coordinate: Coordinate) -> tuple[int, ...]:
        """The ranks, ascending, that hold a part."""
        if not self.layouts and self.complete:
            return self.whole
        every = [placements.holding_coordinates(layout).get(coordinate, ()) for layout in self.layouts]
        if len(every) == 1 and not self.whole and self.complete:
            return every[0]
        found = {*itertools.chain(*every), *self.whole}
        return tuple(sorted(found if self.complete else found & {*self.named}))

    def coordinate(self, rank: int) -> Coordinate | None:
        """The part that a rank holds; ``None`` where it holds none."""
        if rank in self.whole:
            return ()
        if not self.complete and rank not in self.named:
            return None
        found = (placements.shard_index(layout, rank) for layout in self.layouts)
        return next((one for one in found if one is not None), None)

    def everyone(self) -> tuple[int, ...]:
        """The ranks, ascending, that hold any part."""
        if len(self.layouts) == 1 and not self.whole and self.complete:
            return placements.all_coordinates(self.layouts[0].mesh)
        found = {*self.whole, *itertools.chain(*(layout.mesh.ranks for layout in self.layouts))}
        return tuple(sorted(found & {*self.named}))

    def coordinates(self) -> Iterator[Coordinate]:
        """The places of all parts."""
        return itertools.product(*(range(parts) for parts, _ in self.division))


class _HolderTable(NamedTuple):
    """Who holds tensors that the same specs name with the same layouts: see :class:`GlobalTensor`."""

    named: tuple[int, ...]
    whole: tuple[int, ...]
    layouts: tuple[PlacementLayout, ...]
    division: Division
    complete: bool


#: The specs that name a tensor, by number, each with the number of its layout there.
_Naming = tuple[tuple[int, int | None], ...]


@dataclass(frozen=True)
class GlobalSpec:
    """The distinct specs and mesh tables of a group of ranks, and which of them each rank has.

    ``place_of`` maps the job-wide numbers of ranks, by which meshes name them, to those in the group.
    """

    specs: Sequence[Spec]
    tables: Sequence[Meshes]
    spec_of: Sequence[int]
    table_of: Sequence[int]
    place_of: Mapping[int, int]
    _meshes: dict[MeshShape, MeshShape] = field(default_factory=dict, compare=False)
    _found: dict[_Naming, _HolderTable] = field(default_factory=dict, compare=False)

    @cached_property
    def members(self) -> list[tuple[int, ...]]:
        """The ranks, ascending, of each spec."""
        ranks: list[list[int]] = [[] for _ in self.specs]
        for rank, spec in enumerate(self.spec_of):
            ranks[spec].append(rank)
        return [tuple(members) for members in ranks]

    @cached_property
    def _tables(self) -> list[list[int]]:
        """The mesh tables that ranks of each spec have."""
        pairs = sorted(set(zip(self.spec_of, self.table_of, strict=True)))
        return [[table for spec, table in pairs if spec == number] for number in range(len(self.specs))]

    @cached_property
    def _layouts(self) -> list[list[tuple[PlacementLayout, ...]]]:
        """What each layout of each spec is on its ranks: one for each distinct mesh."""
        return [
            [self._on_meshes(layout, self._tables[number]) for layout in spec.layouts]
            for number, spec in enumerate(self.specs)
        ]

    @cached_property
    def _divisions(self) -> list[list[tuple[Division, ...]]]:
        """The distinct divisions by these layouts: one, unless meshes have other shapes on other ranks."""
        return [
            [tuple(dict.fromkeys(layout.division for layout in same)) for same in spec_layouts]
            for spec_layouts in self._layouts
        ]

    def _on_meshes(self, layout: LayoutSpec, tables: Sequence[int]) -> tuple[PlacementLayout, ...]:
        meshes = dict.fromkeys(self._mesh(self.tables[table].table[layout.mesh]) for table in tables)
        return tuple(placements.is_supported(PlacementLayout(mesh, layout.placements)) for mesh in meshes)

    def _mesh(self, mesh: MeshShape) -> MeshShape:
        """A mesh over the group's own numbers of ranks."""
        if mesh not in self._meshes:
            ranks = tuple(self.place_of.get(rank, _OUTSIDE) for rank in mesh.ranks)
            self._meshes[mesh] = MeshShape(mesh.shape, ranks)
        return self._meshes[mesh]

    def tensors(self) -> Iterator[GlobalTensor]:
        """Every tensor that some rank holds. Raises ``RankMismatchError`` where ranks describe one differently."""
        naming: dict[tuple[str, str], list[int]] = {}
        table = [{(tensor.group, tensor.name): tensor for tensor in spec.tensors} for spec in self.specs]
        for number, tensors in enumerate(table):
            for key in tensors:
                naming.setdefault(key, []).append(number)
        for (group, name), numbers in naming.items():
            named = [(number, table[number][group, name]) for number in numbers]
            if group == OWN:
                yield from self._own(named)
            else:
                yield self._held(named)

    def _own(self, named: Sequence[tuple[int, TensorSpec]]) -> Iterator[GlobalTensor]:
        for number, own in named:
            for rank in self.members[number]:
                info = TensorInfo(own.dtype, own.shape)
                yield GlobalTensor(PER_RANK, f"{rank}/{own.name}", info, shared=True, named=(rank,), whole=(rank,))

    def _held(self, named: Sequence[tuple[int, TensorSpec]]) -> GlobalTensor:
        tensor = named[0][1]
        for what in ("dtype", "shape", "splits") if len(named) > 1 else ():
            self._agree(tensor, what, [(number, getattr(other, what)) for number, other in named])
        naming = tuple((number, other.layout) for number, other in named)
        holders = self._found.get(naming)
        if holders is None:
            holders = self._found[naming] = self._holders(tensor, naming)
        info = TensorInfo(tensor.dtype, tensor.shape)
        held = GlobalTensor(tensor.group, tensor.name, info, tensor.shared, *holders, splits=tensor.splits)
        if not held.complete:
            _check_parts(held)
        return held

    def _holders(self, tensor: TensorSpec, naming: _Naming) -> _HolderTable:
        """Who holds a tensor, and all others that are named so."""
        divisions = [(number, one) for number, layout in naming for one in self._divisions_of(number, layout)]
        self._agree(tensor, "layout", divisions)
        found = tuple(dict.fromkeys(one for number, layout in naming for one in self._layouts_of(number, layout)))
        self._check_meshes(tensor, found)
        named = self._ranks([number for number, _ in naming])
        return _HolderTable(
            named=named,
            whole=self._ranks([number for number, layout in naming if layout is None]),
            layouts=found,
            division=divisions[0][1],
            complete={*named}.issuperset(rank for layout in found for rank in layout.mesh.ranks),
        )

    def _divisions_of(self, number: int, layout: int | None) -> tuple[Division, ...]:
        return ((),) if layout is None else self._divisions[number][layout]

    def _layouts_of(self, number: int, layout: int | None) -> tuple[PlacementLayout, ...]:
        return () if layout is None else self._layouts[number][layout]

    def _ranks(self, specs: Sequence[int]) -> tuple[int, ...]:
        """The ranks, ascending, of some specs."""
        if len(specs) == 1:
            return self.members[specs[0]]
        return tuple(sorted(itertools.chain(*(self.members[number] for number in specs))))

    def _agree(self, tensor: TensorSpec, what: str, said: Sequence[tuple[int, object]]) -> None:
        """Raise ``RankMismatchError`` where specs, by number, say different things of one tensor."""
        first, mine = said[0]
        for number, other in said[1:]:
            if other != mine:
                raise RankMismatchError(
                    f"ranks disagree about the {what} of {tensor.group} tensor {tensor.name!r}: "
                    f"rank {self.members[first][0]} has {_told(what, mine)}, rank {self.members[number][0]} has "
                    f"{_told(what, other)}; parts of one tensor must be a DTensor, and different tensors need "
                    "different names"
                )

    def _check_meshes(self, tensor: TensorSpec, found: tuple[PlacementLayout, ...]) -> None:
        """Raise where a mesh has ranks from outside of the group, or two of them place one rank otherwise."""
        for layout in found:
            if _OUTSIDE in layout.mesh.ranks:
                original = next(mesh for mesh, own in self._meshes.items() if own is layout.mesh)
                outside = min(rank for rank in original.ranks if rank not in self.place_of)
                raise StateError(
                    f"{tensor.group} tensor {tensor.name!r} is sharded over rank {outside}, "
                    "which is not in the process group that saves or loads it"
                )
        places: dict[int, Coordinate] = {}
        parts = (item for layout in found for item in placements.holding_coordinates(layout).items())
        for coordinate, rank in ((coordinate, rank) for coordinate, ranks in parts for rank in ranks):
            if places.setdefault(rank, coordinate) != coordinate:
                raise RankMismatchError(
                    f"ranks disagree about the mesh of {tensor.group} tensor {tensor.name!r}: they place rank "
                    f"{rank} in it otherwise; make meshes of the same ranks in the same order on all of them"
                )

    def tied(self) -> dict[str, dict[str, str]]:
        """``{group: {tied name: stored name}}`` over all ranks."""
        result: dict[str, dict[str, str]] = {}
        for spec in self.specs:
            for group, names in spec.tied.items():
                result.setdefault(group, {}).update(names)
        return result

    def names(self, what: str) -> set[str]:
        """The other names of a kind that any rank knows."""
        return {name for spec in self.specs for name in spec.names.get(what, ())}


def _check_parts(held: GlobalTensor) -> None:
    """Raise ``StateError`` where nobody brings a part."""
    for coordinate in held.coordinates():
        if not held.holders(coordinate) and local_shard(held.info, held.division, coordinate).nbytes:
            ranks = sorted(
                rank for layout in held.layouts for rank in placements.holding_coordinates(layout).get(coordinate, ())
            )
            raise StateError(
                f"a part of {held.group} tensor {held.name!r} is missing: rank {ranks[0]} should hold it and does not "
                "name it; all ranks of a tensor's mesh must bring it"
            )


def _told(what: str, said: object) -> object:
    return "it whole" if what in {"layout", "splits"} and said == () else said
