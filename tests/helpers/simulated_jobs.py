"""Jobs of simulated ranks, drawn at random, and the tensors that they hold."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

from rankless.engine.comm.spec_directory import SpecDirectory, digest_specs
from rankless.engine.plan.file_ranges import FileRange
from rankless.engine.plan.global_spec import GlobalSpec
from rankless.engine.plan.layout_types import MeshShape, PlacementLayout, Replicated
from rankless.engine.plan.save_plan import SavePlan, plan_save
from rankless.engine.plan.tensor_specs import OWN, PER_RANK, LayoutSpec, Meshes, Spec, TensorSpec
from rankless.state.tensor_views import NAMES
from tests.helpers.placements import placements, torch_shard
from tests.helpers.tensors import random_tensor


def count_bytes(pieces: Sequence[FileRange]) -> int:
    return sum(piece.stop - piece.start for piece in pieces)


Key = tuple[str, str]


@dataclass
class Job:
    """A job of some ranks, by job-wide number, and the tensors they hold.

    ``held`` tells how each rank of the group describes a tensor: by a layout, as all ranks of its mesh do, or
    ``None`` for a plain tensor. Ranks that it does not have do not name the tensor.
    """

    global_ranks: list[int]
    tensors: dict[Key, torch.Tensor] = field(default_factory=dict)
    held: dict[Key, dict[int, PlacementLayout | None]] = field(default_factory=dict)
    buffers: set[Key] = field(default_factory=set)

    @property
    def ranks(self) -> range:
        return range(len(self.global_ranks))

    def told(self, rank: int) -> tuple[Spec, Meshes]:
        """What one rank says it holds, its own meshes numbered as it meets them."""
        mine = [(key, layouts[rank]) for key, layouts in self.held.items() if rank in layouts]
        meshes = list(dict.fromkeys(layout.mesh for _, layout in mine if layout))
        known = [LayoutSpec(meshes.index(layout.mesh), layout.placements) for _, layout in mine if layout]
        known = list(dict.fromkeys(known))
        described = [
            TensorSpec(
                OWN if key[0] == PER_RANK else key[0],
                key[1].removeprefix(f"{rank}/"),
                NAMES[self.tensors[key].dtype],
                tuple(self.tensors[key].shape),
                known.index(LayoutSpec(meshes.index(layout.mesh), layout.placements)) if layout else None,
                key not in self.buffers,
            )
            for key, layout in mine
        ]
        return Spec(tuple(known), tuple(described)), Meshes(tuple(meshes))

    def membership(self) -> GlobalSpec:
        """As ranks find it out: digests, and what is distinct told once."""
        said = [self.told(rank) for rank in self.ranks]
        census = SpecDirectory.from_digests([digest_specs(*mine) for mine in said])
        return census.build_global_spec(
            [census.encode_contribution(rank, *mine) for rank, mine in enumerate(said)], self.global_ranks
        )

    def holds(self, key: Key, rank: int) -> bool:
        """Whether it has a part of the tensor, be it empty."""
        if rank not in self.held[key]:
            return False
        layout = self.held[key][rank]
        return layout is None or self.global_ranks[rank] in layout.mesh.ranks

    def part(self, key: Key, rank: int, tensor: torch.Tensor | None = None) -> torch.Tensor:
        """What a rank holds of a tensor, or of another one that is divided as it is."""
        tensor, layout = self.tensors[key] if tensor is None else tensor, self.held[key][rank]
        return tensor if layout is None else torch_shard(tensor, layout, self.global_ranks[rank])

    def holders(self, key: Key) -> dict[tuple[int, ...], list[int]]:
        """The ranks, ascending, that hold the same elements, for each part that has any."""
        tensor, actual = self.tensors[key], defaultdict(list)
        elements = torch.arange(tensor.numel()).view(tensor.shape)
        for rank in self.ranks:
            if self.holds(key, rank):
                actual[tuple(self.part(key, rank, elements).flatten().tolist())].append(rank)
        return {part: ranks for part, ranks in actual.items() if part}

    def plans(self, limit: int = 2000) -> list[SavePlan]:
        members = self.membership()
        return [plan_save(members, rank, limit) for rank in self.ranks]


def sub_meshes(mesh: MeshShape, kept: Sequence[bool]) -> list[MeshShape]:
    """The sub-meshes of a mesh along the dimensions that are kept."""
    grid = torch.tensor(mesh.ranks).view(mesh.shape)
    result = []
    for at in itertools.product(*(range(1 if keep else size) for size, keep in zip(mesh.shape, kept, strict=True))):
        index = tuple(slice(None) if keep else i for i, keep in zip(at, kept, strict=True))
        result.append(MeshShape(tuple(grid[index].shape), tuple(grid[index].flatten().tolist())))
    return result


class Jobs:
    """Draws jobs: a mesh over some ranks, more ranks outside of it, and tensors held in every way there is."""

    MESHES = ((2,), (1,), (3,), (4,), (2, 2), (1, 3), (3, 2), (2, 1, 2), (2, 2, 2), (2, 3, 2))
    KINDS = ("whole", *["sharded"] * 4, *["on sub-meshes"] * 2, "buffer", "plain or replicated", "for itself")
    DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float64, torch.bool)

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw, shape = draw, draw(st.sampled_from(self.MESHES))
        size = math.prod(shape)
        self._mesh = MeshShape(shape, tuple(draw(st.permutations(range(3, 3 + size)))))
        outside = draw(st.sampled_from([(), (), (1,), (1, 40)]))
        self.job = Job(draw(st.permutations([*self._mesh.ranks, *outside])))
        self._members = [self.job.global_ranks.index(number) for number in self._mesh.ranks]

    def add(self, key: Key, tensor: torch.Tensor) -> None:
        """A tensor, held in some way."""
        self.job.tensors[key] = tensor
        kind = self._draw(st.sampled_from(self.KINDS))
        if kind == "buffer" or self._draw(st.integers(0, 3)) == 0:
            self.job.buffers.add(key)
        self.job.held[key] = self._held(kind, tuple(tensor.shape))
        if kind == "sharded" and self._draw(st.booleans()):
            self._forget(key)

    def _forget(self, key: Key) -> None:
        """Some ranks do not name the tensor; every part has others that do."""
        ranks, parts = self.job.held[key], self.job.holders(key).keys()
        for rank in self._draw(st.lists(st.sampled_from(sorted(ranks)), unique=True)):
            layout = ranks.pop(rank)
            if self.job.holders(key).keys() != parts or not ranks:
                ranks[rank] = layout

    def _held(self, kind: str, shape: tuple[int, ...]) -> dict[int, PlacementLayout | None]:
        ranks = list(self.job.ranks)
        if kind == "sharded":
            layout = PlacementLayout(self._mesh, self._draw(placements(shape, self._mesh.shape)))
            # A DTensor may be named by ranks that are not in its mesh and hold nothing of it.
            return dict.fromkeys(ranks if self._draw(st.booleans()) else self._members, layout)
        if kind == "on sub-meshes":
            kept = [self._draw(st.booleans()) for _ in self._mesh.shape]
            kept[self._draw(st.integers(0, len(kept) - 1))] = True
            meshes = sub_meshes(self._mesh, kept)
            chosen = self._draw(placements(shape, meshes[0].shape))
            return {
                self.job.global_ranks.index(rank): PlacementLayout(mesh, chosen)
                for mesh in meshes
                for rank in mesh.ranks
            }
        some = self._draw(st.lists(st.sampled_from(ranks), min_size=1, unique=True))
        if kind == "plain or replicated":
            replicated = PlacementLayout(self._mesh, (Replicated(),) * len(self._mesh.shape))
            return dict.fromkeys(some) | dict.fromkeys(self._members, replicated)
        if kind == "for itself":
            # A DTensor on one rank alone, on each of some ranks.
            return {
                rank: PlacementLayout(MeshShape((1,), (self.job.global_ranks[rank],)), (Replicated(),)) for rank in some
            }
        return dict.fromkeys(some)


#: Those of matrices and more, as a model has them, and any at all.
tensor_shapes = st.one_of(
    st.tuples(st.integers(4, 20), st.integers(2, 9)),
    st.tuples(st.integers(1, 6), st.integers(2, 6), st.integers(1, 6)),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
)


@st.composite
def named_tensors(draw: st.DrawFn) -> dict[Key, torch.Tensor]:
    result = {}
    for number in range(draw(st.integers(1, 6))):
        shape = draw(tensor_shapes)
        group = draw(st.sampled_from(["model", "optimizer", "state"]))
        result[group, f"t{number}"] = random_tensor(shape, draw(st.sampled_from(Jobs.DTYPES)), seed=number)
    return result


@st.composite
def jobs(draw: st.DrawFn, held: dict[Key, torch.Tensor] | None = None) -> Job:
    """A job that holds some tensors, and a few that each rank has of its own."""
    actual = Jobs(draw)
    for key, tensor in (draw(named_tensors()) if held is None else held).items():
        actual.add(key, tensor)
    job = actual.job
    for rank in draw(st.sets(st.sampled_from(list(job.ranks)), max_size=3)) if held is None else ():
        job.tensors[PER_RANK, f"{rank}/rng"] = random_tensor((rank + 1, 3), torch.uint8, seed=rank)
        job.held[PER_RANK, f"{rank}/rng"] = {rank: None}
    return job


def make_job(tensor: torch.Tensor, ranks: int, layout: PlacementLayout | None = None, *, buffer: bool = False) -> Job:
    key, every = ("model", "w"), range(ranks)
    return Job([*every], {key: tensor}, {key: dict.fromkeys(every, layout)}, {key} if buffer else set())


def make_mesh(*shape: int) -> MeshShape:
    return MeshShape(shape, tuple(range(math.prod(shape))))
