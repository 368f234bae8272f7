"""The merged specs and meshes of all ranks: which ranks hold which shards. Every rank derives the same from them.

:meth:`SpecDirectory.build_global_spec <rankless.engine.comm.spec_directory.SpecDirectory.build_global_spec>` makes one
on every rank after the exchange of specs of a save, load or live copy. :meth:`GlobalSpec.iter_tensors` runs in the next
vote, where its errors become common. The order of the tensors decides the numbers of tensors in plans, and must be
equal on all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec

from rankless.engine.plan import layout_types
from rankless.engine.plan.layout_types import Coordinate, Division, MeshShape, PlacementLayout
from rankless.engine.plan.shard_byte_ranges import local_shard
from rankless.engine.plan.split_tensors import Splits
from rankless.engine.plan.tensor_specs import OWN, PER_RANK, STATE, HeldPieces, LayoutSpec, Meshes, Spec, TensorSpec
from rankless.engine.plan.uneven_shard_layout import ReportedPart, lay_out_pieces
from rankless.errors import RankMismatchError, StateError
from rankless.ondisk.data_files import TensorInfo, intern_info

#: Stands for ranks of a mesh that are not in the process group.
_OUTSIDE = -1


class GlobalTensor(msgspec.Struct, frozen=True):
    """A tensor of the checkpoint, its division, and the ranks that hold its shards.

    ``layouts`` has the layouts that its holders report; all have one division. ``whole_ranks`` hold the tensor
    undivided. Shards of a ``shared`` tensor have equal values on all their holders. The tensor ``is_complete`` if all
    ranks of its meshes are among the ``reporting_ranks``: their specs name it. ``splits`` are the stored tensors, if it
    is not stored as one tensor of its name. A tensor that is ``apart`` shares no file with tensors that are not.
    """

    group: str
    name: str
    info: TensorInfo
    shared: bool
    reporting_ranks: tuple[int, ...]
    whole_ranks: tuple[int, ...] = ()
    layouts: tuple[PlacementLayout, ...] = ()
    division: Division = ()
    is_complete: bool = True
    splits: Splits = ()
    apart: bool = False

    def holder_ranks(self, coordinate: Coordinate) -> tuple[int, ...]:
        """Return the ranks, ascending, that hold a shard."""
        if not self.layouts and self.is_complete:
            return self.whole_ranks
        rank_sets = [layout_types.ranks_by_coordinate(layout).get(coordinate, ()) for layout in self.layouts]
        if len(rank_sets) == 1 and not self.whole_ranks and self.is_complete:
            return rank_sets[0]
        ranks = {*itertools.chain(*rank_sets), *self.whole_ranks}
        return tuple(sorted(ranks if self.is_complete else ranks & {*self.reporting_ranks}))

    def coordinate_of(self, rank: int) -> Coordinate | None:
        """Return the coordinate of the shard that a rank holds; ``None`` if it holds none."""
        if rank in self.whole_ranks:
            return ()
        if not self.is_complete and rank not in self.reporting_ranks:
            return None
        coordinates = (layout_types.coordinate_of_rank(layout, rank) for layout in self.layouts)
        return next((coordinate for coordinate in coordinates if coordinate is not None), None)

    def all_ranks(self) -> tuple[int, ...]:
        """Return the ranks, ascending, that hold any shard."""
        if len(self.layouts) == 1 and not self.whole_ranks and self.is_complete:
            return layout_types.sorted_ranks(self.layouts[0].mesh)
        ranks = {*self.whole_ranks, *itertools.chain(*(layout.mesh.ranks for layout in self.layouts))}
        return tuple(sorted(ranks & {*self.reporting_ranks}))

    def iter_coordinates(self) -> Iterator[Coordinate]:
        """Return the coordinates of all shards."""
        return itertools.product(*(range(count) for count, _ in self.division))


def _of_lowest_form(tensor_specs: Sequence[tuple[int, TensorSpec]]) -> list[tuple[int, TensorSpec]]:
    """Return the specs of a tensor that have the dtype and shape which the lowest rank has."""
    lowest = tensor_specs[0][1]
    return [naming for naming in tensor_specs if (naming[1].dtype, naming[1].shape) == (lowest.dtype, lowest.shape)]


class _HolderTable(NamedTuple):
    """The holders of all tensors that the same specs name with the same layouts: see :class:`GlobalTensor`."""

    reporting_ranks: tuple[int, ...]
    whole_ranks: tuple[int, ...]
    layouts: tuple[PlacementLayout, ...]
    division: Division
    is_complete: bool


#: The specs that name a tensor, by number, each with the number of its layout there.
_Naming = tuple[tuple[int, int | None], ...]


class GlobalSpec(msgspec.Struct, frozen=True, eq=False, dict=True):
    """The distinct specs and mesh tables of a process group, and which of them each rank has.

    ``group_rank_of`` maps global ranks, which meshes contain, to ranks of the group. If the spec ``is_partial``, some
    ranks of the meshes may be missing, and their shards with them.
    """

    specs: Sequence[Spec]
    mesh_tables: Sequence[Meshes]
    spec_of: Sequence[int]
    table_of: Sequence[int]
    group_rank_of: Mapping[int, int]
    is_partial: bool = False
    _meshes: dict[MeshShape, MeshShape] = msgspec.field(default_factory=dict)
    _holder_tables: dict[_Naming, _HolderTable] = msgspec.field(default_factory=dict)

    @cached_property
    def ranks_by_spec(self) -> list[tuple[int, ...]]:
        """The ranks, ascending, of each spec."""
        ranks: list[list[int]] = [[] for _ in self.specs]
        for rank, spec in enumerate(self.spec_of):
            ranks[spec].append(rank)
        return [tuple(spec_ranks) for spec_ranks in ranks]

    @cached_property
    def _tables_by_spec(self) -> list[list[int]]:
        """The mesh tables that ranks of each spec have."""
        pairs = sorted(set(zip(self.spec_of, self.table_of, strict=True)))
        return [[table for spec, table in pairs if spec == number] for number in range(len(self.specs))]

    @cached_property
    def _layouts_by_spec(self) -> list[list[tuple[PlacementLayout, ...]]]:
        """The layouts of each spec on its ranks: one for each distinct mesh."""
        return [
            [self._on_meshes(layout, self._tables_by_spec[number]) for layout in spec.layouts]
            for number, spec in enumerate(self.specs)
        ]

    @cached_property
    def _divisions_by_spec(self) -> list[list[tuple[Division, ...]]]:
        """The distinct divisions by these layouts: one, unless meshes have different shapes on different ranks."""
        return [
            [tuple(dict.fromkeys(layout.division for layout in on_meshes)) for on_meshes in spec_layouts]
            for spec_layouts in self._layouts_by_spec
        ]

    def _on_meshes(self, layout: LayoutSpec, tables: Sequence[int]) -> tuple[PlacementLayout, ...]:
        meshes = dict.fromkeys(self._to_group_ranks(self.mesh_tables[table].table[layout.mesh]) for table in tables)
        return tuple(layout_types.intern_layout(PlacementLayout(mesh, layout.placements)) for mesh in meshes)

    def _to_group_ranks(self, mesh: MeshShape) -> MeshShape:
        """Return a mesh of global ranks as a mesh of ranks of the group."""
        if mesh not in self._meshes:
            ranks = tuple(self.group_rank_of.get(rank, _OUTSIDE) for rank in mesh.ranks)
            self._meshes[mesh] = MeshShape(mesh.shape, ranks)
        return self._meshes[mesh]

    def iter_tensors(self) -> Iterator[GlobalTensor]:
        """Yield every tensor that some rank holds.

        Raises ``RankMismatchError`` if ranks describe a tensor differently.

        Each rank iterates in the vote on its plan. The order comes from the specs, and is equal on all ranks.
        """
        naming: dict[tuple[str, str], list[tuple[int, TensorSpec]]] = {}
        for number, spec in enumerate(self.specs):
            for key, tensor in {(tensor.group, tensor.name): tensor for tensor in spec.tensors}.items():
                naming.setdefault(key, []).append((number, tensor))
        for (group, _), tensor_specs in naming.items():
            if group == OWN:
                yield from self._per_rank_tensors(tensor_specs)
            elif group == STATE:
                yield self._merge_tensor(_of_lowest_form(tensor_specs))
            else:
                yield self._merge_tensor(tensor_specs)

    def _per_rank_tensors(self, tensor_specs: Sequence[tuple[int, TensorSpec]]) -> Iterator[GlobalTensor]:
        for number, tensor in tensor_specs:
            for rank in self.ranks_by_spec[number]:
                info = TensorInfo(tensor.dtype, tensor.shape)
                name = f"{rank}/{tensor.name}"
                yield GlobalTensor(PER_RANK, name, info, shared=True, reporting_ranks=(rank,), whole_ranks=(rank,))

    def _merge_tensor(self, tensor_specs: Sequence[tuple[int, TensorSpec]]) -> GlobalTensor:
        tensor = tensor_specs[0][1]
        if len(tensor_specs) > 1:
            for field_name in ("dtype", "shape", "splits"):
                self._require_equal(
                    tensor, field_name, [(number, getattr(other, field_name)) for number, other in tensor_specs]
                )
            self._require_equally_frozen(tensor_specs)
        naming = tuple([(number, other.layout) for number, other in tensor_specs])
        if (tensor.group, tensor.name) in self._names_in_pieces:
            holders = self._lay_out_pieces(tensor, naming)
        elif naming in self._holder_tables:
            holders = self._holder_tables[naming]
        else:
            holders = self._holder_tables[naming] = self._build_holder_table(tensor, naming)
        info = intern_info(tensor.dtype, tensor.shape)
        global_tensor = GlobalTensor(
            tensor.group, tensor.name, info, tensor.shared, *holders, splits=tensor.splits, apart=tensor.apart
        )
        if not global_tensor.is_complete and not self.is_partial:
            _check_shards(global_tensor)
        return global_tensor

    def _build_holder_table(self, tensor: TensorSpec, naming: _Naming) -> _HolderTable:
        """Return the holders of a tensor, and of all others that the same specs name with the same layouts."""
        divisions = [(number, division) for number, layout in naming for division in self._divisions_of(number, layout)]
        self._require_equal(tensor, "layout", divisions)
        layouts = tuple(dict.fromkeys(itertools.chain(*(self._layouts_of(*spec_layout) for spec_layout in naming))))
        self._check_meshes(tensor, layouts)
        reporting_ranks = self._ranks_of_specs([number for number, _ in naming])
        return _HolderTable(
            reporting_ranks=reporting_ranks,
            whole_ranks=self._ranks_of_specs([number for number, layout in naming if layout is None]),
            layouts=layouts,
            division=divisions[0][1],
            is_complete={*reporting_ranks}.issuperset(rank for layout in layouts for rank in layout.mesh.ranks),
        )

    def _lay_out_pieces(self, tensor: TensorSpec, naming: _Naming) -> _HolderTable:
        """Return the holders of a tensor if ranks hold other parts of it than a layout describes."""
        reporting_ranks = self._ranks_of_specs([number for number, _ in naming])
        layout_of = dict(naming)
        key = tensor.group, tensor.name
        parts = {}
        for rank in reporting_ranks:
            number, table = self.spec_of[rank], self.table_of[rank]
            layout = layout_of[number]
            on_rank = None
            if layout is not None:
                (on_rank,) = self._on_meshes(self.specs[number].layouts[layout], [table])
            parts[rank] = ReportedPart(on_rank, self._pieces_by_table[table].get(key))
        layouts = tuple(dict.fromkeys(part.layout for part in parts.values() if part.layout is not None))
        self._check_meshes(tensor, layouts)
        joint = lay_out_pieces(f"{tensor.group} tensor {tensor.name!r}", tensor.shape, parts)
        if joint is None:
            return _HolderTable(reporting_ranks, reporting_ranks, (), (), is_complete=True)
        joint = layout_types.intern_layout(joint)
        return _HolderTable(reporting_ranks, (), (joint,), joint.division, is_complete=True)

    @cached_property
    def _pieces_by_table(self) -> list[dict[tuple[str, str], HeldPieces]]:
        """The pieces in each mesh table, by group and name of their tensor."""
        return [{(named.group, named.name): named.pieces for named in table.pieces} for table in self.mesh_tables]

    @cached_property
    def _names_in_pieces(self) -> set[tuple[str, str]]:
        """The group and name of each tensor with ranks that hold other elements than the rule gives them."""
        return {key for table in self._pieces_by_table for key, held in table.items() if not held.is_empty_by_rule}

    def _divisions_of(self, number: int, layout: int | None) -> tuple[Division, ...]:
        return ((),) if layout is None else self._divisions_by_spec[number][layout]

    def _layouts_of(self, number: int, layout: int | None) -> tuple[PlacementLayout, ...]:
        return () if layout is None else self._layouts_by_spec[number][layout]

    def _ranks_of_specs(self, specs: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks, ascending, of some specs."""
        if len(specs) == 1:
            return self.ranks_by_spec[specs[0]]
        return tuple(sorted(itertools.chain(*(self.ranks_by_spec[number] for number in specs))))

    def _require_equal(self, tensor: TensorSpec, field_name: str, values: Sequence[tuple[int, object]]) -> None:
        """Raise ``RankMismatchError`` if specs, by number, have different values of a tensor's field."""
        first, expected = values[0]
        for number, other in values[1:]:
            if other != expected:
                raise RankMismatchError(
                    f"ranks disagree about the {field_name} of {tensor.group} tensor {tensor.name!r}: "
                    f"rank {self.ranks_by_spec[first][0]} has {_describe_value(field_name, expected)}, "
                    f"rank {self.ranks_by_spec[number][0]} has {_describe_value(field_name, other)}; "
                    "shards of one tensor must be a DTensor, and different tensors need different names"
                )

    def _require_equally_frozen(self, tensor_specs: Sequence[tuple[int, TensorSpec]]) -> None:
        """Raise ``RankMismatchError`` if some ranks keep a tensor apart, because it is frozen, and others do not."""
        first = {tensor.apart: number for number, tensor in reversed(tensor_specs)}
        if len(first) > 1:
            tensor, ranks = tensor_specs[0][1], {apart: self.ranks_by_spec[first[apart]][0] for apart in first}
            raise RankMismatchError(
                f"parameter {tensor.name!r} of {tensor.group} is frozen on rank {ranks[True]} but not on rank "
                f'{ranks[False]}; with frozen="apart", set its requires_grad to one value on all ranks'
            )

    def _check_meshes(self, tensor: TensorSpec, layouts: tuple[PlacementLayout, ...]) -> None:
        """Raise an error if a mesh has ranks outside of the process group, or if meshes place a rank differently."""
        for layout in layouts:
            if _OUTSIDE in layout.mesh.ranks and not self.is_partial:
                original = next(mesh for mesh, translated in self._meshes.items() if translated is layout.mesh)
                outside = min(rank for rank in original.ranks if rank not in self.group_rank_of)
                raise StateError(
                    f"{tensor.group} tensor {tensor.name!r} is sharded over rank {outside}, "
                    "which is not in the process group that saves or loads it"
                )
        coordinate_by_rank: dict[int, Coordinate] = {}
        shards = (item for layout in layouts for item in layout_types.ranks_by_coordinate(layout).items())
        for coordinate, rank in ((coordinate, rank) for coordinate, ranks in shards for rank in ranks):
            if rank != _OUTSIDE and coordinate_by_rank.setdefault(rank, coordinate) != coordinate:
                raise RankMismatchError(
                    f"ranks disagree about the mesh of {tensor.group} tensor {tensor.name!r}: they place rank "
                    f"{rank} in it differently; make meshes of the same ranks in the same order on all of them"
                )

    def tied_names(self) -> dict[str, dict[str, str]]:
        """Return ``{group: {tied name: stored name}}`` over all ranks.

        Raises ``RankMismatchError`` if a name is of a tied tensor on one rank, and of another tensor on another rank:
        nothing has compared these, and a file cannot have both.

        A save calls it on every rank when it plans its files (:mod:`rankless.engine.plan.save_plan`).
        """
        result: dict[str, dict[str, str]] = {}
        for spec in self.specs:
            for group, names in spec.tied.items():
                known = result.setdefault(group, {})
                for alias, name in names.items():
                    if known.setdefault(alias, name) != name:
                        raise _tied_elsewhere(group, alias, name, known[alias])
        stored = ((tensor.group, tensor.name) for spec in self.specs if result for tensor in spec.tensors)
        for group, name in stored:
            if name in result.get(group, ()):
                raise _tied_elsewhere(group, name, result[group][name], name)
        return result

    def known_names(self, kind: str) -> set[str]:
        """Return the other names of a kind that any rank knows."""
        return {name for spec in self.specs for name in spec.known_names.get(kind, ())}


def _tied_elsewhere(group: str, alias: str, name: str, other: str) -> RankMismatchError:
    elsewhere = "a tensor of its own" if other == alias else f"one tensor with {other!r}"
    return RankMismatchError(
        f"{group} tensor {alias!r} is one tensor with {name!r} on one rank, and {elsewhere} on another: tie the same "
        "names, registered in the same order, on all ranks, or give tensors that are not tied other names"
    )


def _check_shards(global_tensor: GlobalTensor) -> None:
    """Raise ``StateError`` if a shard has no holder."""
    for coordinate in global_tensor.iter_coordinates():
        if (
            not global_tensor.holder_ranks(coordinate)
            and local_shard(global_tensor.info, global_tensor.division, coordinate).nbytes
        ):
            ranks = sorted(
                rank
                for layout in global_tensor.layouts
                for rank in layout_types.ranks_by_coordinate(layout).get(coordinate, ())
            )
            name = f"{global_tensor.group} tensor {global_tensor.name!r}"
            raise StateError(
                f"a shard of {name} is missing: rank {ranks[0]} should hold it "
                "but did not pass the tensor; all ranks of a tensor's mesh must pass it"
            )


def _describe_value(field_name: str, value: object) -> object:
    return "it whole" if field_name in {"layout", "splits"} and value == () else value
