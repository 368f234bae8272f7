"""Who writes what, on simulated ranks: every byte once, the same files for all, in shares of a fair size."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from holdfast.engine import plan as planning
from holdfast.engine.local import LocalPart
from holdfast.engine.plan import SavePlan, plan_save, split_evenly
from holdfast.engine.runs import Layout, Placement, Run
from holdfast.engine.spec import PER_RANK, Membership, Spec, TensorSpec
from holdfast.engine.transfer import Piece
from holdfast.engine.write import write_pieces
from holdfast.errors import DisagreementError, StateError, UnsupportedTensorError
from holdfast.layout import blocks
from holdfast.state.tensors import DTYPES
from tests.test_local import bytes_of, noise
from tests.test_runs import layouts, local_part

#: Sizes that make shares out of few bytes.
SMALLEST, SECTOR = 64, 8


@pytest.fixture
def small():
    with mock.patch.object(planning, "SMALLEST", SMALLEST), mock.patch.object(planning, "SECTOR", SECTOR, create=True):
        yield


@st.composite
def items(draw: st.DrawFn, sizes: st.SearchStrategy[int]) -> list[planning._Item]:
    """Runs one after another in a file, some with gaps between them."""
    found, offset = [], 4096
    for tensor, size in enumerate(draw(st.lists(sizes, min_size=1, max_size=8))):
        offset += draw(st.sampled_from([0, 0, 8, 808]))
        start, local = draw(st.integers(0, 100)) * 8, draw(st.integers(0, 100)) * 8
        found.append(planning._Item(Piece(tensor, start, start + size, local, 0, offset), size))
        offset += size
    return found


some_items = items(st.one_of(st.integers(0, 40), st.integers(0, 600)).map(lambda n: 8 * n))
large_items = items(st.integers(40 * SMALLEST, 400 * SMALLEST).map(lambda n: 8 * n))
parts_of = st.integers(1, 9)


def shares(whole: list[planning._Item], parts: int) -> list[list[Piece]]:
    return [split_evenly(whole, part, parts) for part in range(parts)]


def joined(pieces: list[Piece]) -> list[Piece]:
    """Pieces that go on where the one before ends, as one; empty ones left out."""
    found: list[Piece] = []
    for piece in pieces:
        if piece.start == piece.stop:
            continue
        last = found[-1] if found else None
        if last and (last.tensor, last.stop) == (piece.tensor, piece.start):
            size = last.stop - last.start
            assert (piece.local, piece.offset) == (last.local + size, last.offset + size)
            found[-1] = last._replace(stop=piece.stop)
        else:
            found.append(piece)
    return found


@given(some_items, parts_of)
@settings(max_examples=200)
def test_shares_are_all_of_the_runs_in_order_and_nothing_twice(small, whole: list, parts: int) -> None:
    every = [piece for share in shares(whole, parts) for piece in share]
    assert joined(every) == joined([item.piece for item in whole])


@given(some_items, parts_of)
@settings(max_examples=200)
def test_no_share_has_a_crumb_of_a_run(small, whole: list, parts: int) -> None:
    """A run is cut on sectors of the file into pieces that are worth a write, or not at all."""
    sizes = {item.piece.tensor: item.size for item in whole}
    ends = {(item.piece.tensor, edge) for item in whole for edge in (item.piece.offset, item.piece.offset + item.size)}
    for piece in itertools.chain(*shares(whole, parts)):
        size = piece.stop - piece.start
        assert size in {0, sizes[piece.tensor]} or size >= SMALLEST
        for edge in (piece.offset, piece.offset + size):
            assert (piece.tensor, edge) in ends or edge % SECTOR == 0


@given(some_items, parts_of)
def test_shares_are_equal_but_for_what_cannot_be_cut(small, whole: list, parts: int) -> None:
    total = sum(item.size for item in whole)
    for share in shares(whole, parts):
        assert abs(sum(piece.stop - piece.start for piece in share) - total / parts) <= 4 * SMALLEST


@given(large_items, parts_of)
def test_shares_of_large_runs_are_about_equal(small, whole: list, parts: int) -> None:
    sizes = [sum(piece.stop - piece.start for piece in share) for share in shares(whole, parts)]
    assert max(sizes) <= 1.2 * min(sizes)


def test_pieces_under_a_mebibyte_have_one_writer() -> None:
    whole = [planning._Item(Piece(0, 0, 4 * 2**20, 0, 0, 4096), 4 * 2**20)]
    sizes = [piece.stop - piece.start for share in shares(whole, 16) for piece in share]
    assert sum(sizes) == 4 * 2**20
    assert min(size for size in sizes if size) >= 2**20


@dataclass
class Job:
    """A job of some ranks and the tensors they hold: whole, laid out over all or some, or each its own."""

    global_ranks: list[int]
    tensors: dict[tuple[str, str], torch.Tensor]
    layouts: dict[tuple[str, str], Layout]
    holders: dict[tuple[str, str], list[int]]
    buffers: set[tuple[str, str]]

    def spec(self, rank: int) -> Spec:
        """What one rank holds; ranks that hold the same say the same."""
        known = tuple(dict.fromkeys(self.layouts.values()))
        described = [
            TensorSpec(
                group,
                name.removeprefix(f"{rank}/"),
                next(code for code, dtype in DTYPES.items() if dtype == tensor.dtype),
                tuple(tensor.shape),
                known.index(self.layouts[group, name]) if (group, name) in self.layouts else None,
                (group, name) not in self.buffers,
            )
            for (group, name), tensor in self.tensors.items()
            if rank in self.holders[group, name]
        ]
        return Spec(known, tuple(described), {})

    def membership(self) -> Membership:
        told = [self.spec(rank) for rank in range(len(self.global_ranks))]
        distinct = [one for rank, one in enumerate(told) if told.index(one) == rank]
        return Membership(distinct, [distinct.index(one) for one in told])

    def part(self, key: tuple[str, str], rank: int) -> torch.Tensor:
        """What a rank holds of a tensor."""
        tensor = self.tensors[key]
        return local_part(tensor, self.layouts[key], self.global_ranks[rank]) if key in self.layouts else tensor

    def plans(self, limit: int = 2000) -> list[SavePlan]:
        members = self.membership()
        return [plan_save(members, rank, self.global_ranks, limit) for rank in range(len(self.global_ranks))]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    job = Job([], {}, {}, {}, set())
    mesh_shape = draw(st.lists(st.integers(1, 3), max_size=4).map(tuple))
    first = draw(layouts(mesh_shape))
    job.global_ranks = sorted({*first.ranks, *draw(st.sets(st.integers(20, 22), max_size=2))})
    size = len(job.global_ranks)
    for number in range(draw(st.integers(1, 5))):
        key = (draw(st.sampled_from(["model", "optimizer", "state"])), f"t{number}")
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.float64, torch.bool]))
        kind = draw(st.sampled_from(["sharded", "sharded", "whole", "buffer"]))
        if kind == "sharded":
            shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
            placements = st.builds(Placement) | st.builds(Placement, st.integers(0, len(shape) - 1), st.integers(1, 2))
            chosen = [draw(placements) for _ in first.mesh]
            job.layouts[key] = Layout(first.mesh, first.ranks, tuple(chosen))
            job.holders[key] = list(range(size))
        else:
            shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
            job.holders[key] = draw(st.lists(st.integers(0, size - 1), min_size=1, unique=True))
            job.buffers |= {key} if kind == "buffer" else set()
        job.tensors[key] = noise(shape, dtype, seed=number)
    for rank in draw(st.sets(st.integers(0, size - 1))):
        job.tensors[PER_RANK, f"{rank}/rng"] = noise((rank + 1, 3), torch.uint8, seed=rank)
        job.holders[PER_RANK, f"{rank}/rng"] = [rank]
    return job


@given(jobs())
@settings(max_examples=60)
def test_every_rank_plans_the_same_files(small, job: Job) -> None:
    first, *others = job.plans()
    for other in others:
        assert list(other.files) == list(first.files)
        assert list(other.tensors) == list(first.tensors)
        assert other.groups == first.groups
    assert set(first.tensors) == set(job.tensors)


@given(jobs())
@settings(max_examples=100)
def test_the_pieces_of_all_ranks_are_every_byte_of_every_tensor_once(small, job: Job) -> None:
    plans = job.plans()
    every = sorted((piece for plan in plans for piece in plan.pieces), key=lambda piece: (piece.tensor, piece.start))
    assert all(piece.start < piece.stop for piece in every)
    places = [
        (number, file.data_start + entry.data_offsets[0], entry.nbytes)
        for number, file in enumerate(plans[0].files)
        for entry in file.entries.values()
    ]
    for tensor, (file, offset, nbytes) in enumerate(places):
        reached = 0
        for piece in (piece for piece in every if piece.tensor == tensor):
            assert (piece.start, piece.file, piece.offset) == (reached, file, offset + reached)
            reached = piece.stop
        assert reached == nbytes


@given(jobs())
@settings(max_examples=60)
def test_a_rank_writes_in_the_order_of_the_files_and_only_what_it_holds(small, job: Job) -> None:
    for rank, plan in enumerate(job.plans()):
        places = [(piece.file, piece.offset) for piece in plan.pieces]
        assert places == sorted(places)
        for piece in plan.pieces:
            key = plan.tensors[piece.tensor]
            part = bytes_of(job.part(key, rank))
            whole = bytes_of(job.tensors[key])
            assert rank in job.holders[key]
            size = piece.stop - piece.start
            assert part[piece.local : piece.local + size] == whole[piece.start : piece.stop]


@given(jobs())
@settings(max_examples=60)
def test_what_several_ranks_hold_and_share_is_to_be_proven_equal_by_all_of_them(small, job: Job) -> None:
    for rank, plan in enumerate(job.plans()):
        for holders, replicas in plan.replicas.items():
            assert rank in holders
            assert len(holders) > 1
            for replica in replicas:
                key = plan.tensors[replica.tensor]
                assert key not in job.buffers
                pieces = {bytes_of(job.part(key, holder)) for holder in holders}
                assert len(pieces) == 1


@given(jobs())
@settings(max_examples=40)
def test_what_the_ranks_write_together_is_read_by_the_safetensors_library(small, tmp_path_factory, job: Job) -> None:
    folder: Path = tmp_path_factory.mktemp("plan")
    plans = job.plans()
    paths = [folder / str(number) for number in range(len(plans[0].files))]
    for path, file in zip(paths, plans[0].files, strict=True):
        path.write_bytes(bytes(file.size))
    fragments: dict[int, list] = {}
    for rank, plan in enumerate(plans):
        parts = {number: LocalPart(job.part(plan.tensors[number], rank)) for number in {p.tensor for p in plan.pieces}}
        for tensor, found in write_pieces(paths, plan.pieces, parts.__getitem__).items():
            fragments.setdefault(tensor, []).extend(found)
    number = itertools.count()
    for path, file in zip(paths, plans[0].files, strict=True):
        crcs = [blocks.assemble(fragments.get(next(number), []), entry.nbytes) for entry in file.entries.values()]
        raw = file.header(itertools.chain(*crcs)) + path.read_bytes()[file.data_start :]
        path.write_bytes(raw)
    loaded = {}
    for path, file in zip(paths, plans[0].files, strict=True):
        group = next(group for group, files in plans[0].groups.items() if file in files)
        loaded |= {(group, name): tensor for name, tensor in load_file(path).items()}
    assert loaded.keys() == job.tensors.keys()
    for key, tensor in job.tensors.items():
        assert loaded[key].dtype == tensor.dtype
        assert loaded[key].shape == tensor.shape
        assert bytes_of(loaded[key]) == bytes_of(tensor)


@given(jobs(), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_files_do_not_depend_on_who_holds_what(small, job: Job, random) -> None:
    """One rank with everything whole plans the files of all ranks together."""
    alone = Job([7], dict(sorted(job.tensors.items(), key=lambda _: random.random())), {}, {}, set())
    alone.tensors = {key: tensor for key, tensor in alone.tensors.items() if key[0] != PER_RANK}
    alone.holders = {key: [0] for key in alone.tensors}
    mine = {group: files for group, files in job.plans()[0].groups.items() if group != PER_RANK}
    assert alone.plans()[0].groups == mine


def job_of(tensor: torch.Tensor, ranks: int, layout: Layout | None = None, *, buffer: bool = False) -> Job:
    key = ("model", "w")
    known = {} if layout is None else {key: layout}
    return Job(list(range(ranks)), {key: tensor}, known, {key: list(range(ranks))}, {key} if buffer else set())


def test_what_every_rank_holds_is_written_by_all_in_equal_shares() -> None:
    plans = job_of(torch.zeros(8 * 2**20, dtype=torch.uint8), 4).plans(2**40)
    written = [sum(piece.stop - piece.start for piece in plan.pieces) for plan in plans]
    assert sum(written) == 8 * 2**20
    assert all(abs(size - 2 * 2**20) < 2**20 for size in written)
    assert all(list(plan.replicas) == [(0, 1, 2, 3)] for plan in plans)


def test_a_buffer_is_written_by_its_lowest_holder_and_never_proven() -> None:
    plans = job_of(torch.zeros(8 * 2**20, dtype=torch.uint8), 4, buffer=True).plans(2**40)
    assert [sum(piece.stop - piece.start for piece in plan.pieces) for plan in plans] == [8 * 2**20, 0, 0, 0]
    assert all(not plan.replicas for plan in plans)


def test_a_sharded_buffer_is_written_by_the_lowest_holder_of_each_part() -> None:
    layout = Layout((2, 2), (0, 1, 2, 3), (Placement(), Placement(0)))
    plans = job_of(torch.zeros(6), 4, layout, buffer=True).plans(2**40)
    assert [[(piece.start, piece.stop) for piece in plan.pieces] for plan in plans] == [[(0, 12)], [(12, 24)], [], []]


def test_a_shard_is_written_by_the_rank_that_holds_it_as_it_lies() -> None:
    layout = Layout((3,), (0, 1, 2), (Placement(0),))
    plans = job_of(torch.zeros(7, 2), 3, layout).plans(2**40)
    assert [[(piece.start, piece.stop) for piece in plan.pieces] for plan in plans] == [
        [(0, 24)],
        [(24, 48)],
        [(48, 56)],
    ]
    assert all(not plan.replicas for plan in plans)


def test_replicas_of_a_shard_are_the_runs_of_its_holders() -> None:
    layout = Layout((2, 2), (0, 1, 2, 3), (Placement(), Placement(1)))
    plans = job_of(torch.zeros(2, 4), 4, layout).plans(2**40)
    assert {holders: [replica.run for replica in found] for holders, found in plans[3].replicas.items()} == {
        (1, 3): [Run(8, 16), Run(24, 32)]
    }


def test_a_tensor_over_a_rank_that_does_not_save_is_an_error_naming_both() -> None:
    layout = Layout((3,), (0, 1, 5), (Placement(0),))
    with pytest.raises(StateError, match=r"'w'.*rank 5"):
        job_of(torch.zeros(6), 2, layout).plans()


@pytest.mark.parametrize(
    ("what", "other"),
    [
        ("dtype", TensorSpec("model", "w", "BF16", (4,))),
        ("shape", TensorSpec("model", "w", "F32", (5,))),
        ("layout", TensorSpec("model", "w", "F32", (4,), 0)),
    ],
)
def test_ranks_that_describe_one_tensor_otherwise_are_named(what: str, other: TensorSpec) -> None:
    layout = Layout((1,), (2,), (Placement(0),))
    specs = [Spec((), (TensorSpec("model", "w", "F32", (4,)),), {}), Spec((layout,), (other,), {})]
    with pytest.raises(DisagreementError, match=rf"{what}.*'w'.*rank 0.*rank 2"):
        plan_save(Membership(specs, [0, 0, 1]), 0, [0, 1, 2], 100)


def test_a_tensor_whose_name_no_file_can_hold_is_an_error_on_every_rank() -> None:
    spec = Spec((), (TensorSpec("model", "__metadata__", "F32", (4,)),), {})
    for rank in range(2):
        with pytest.raises(UnsupportedTensorError, match="__metadata__"):
            plan_save(Membership([spec], [0, 0]), rank, [0, 1], 100)


def test_thousands_of_ranks_are_planned_in_seconds() -> None:
    """Planning asks nothing of other ranks but their specs, of which there are a few."""
    ranks = 2048
    layout = Layout((64, 32), tuple(range(ranks)), (Placement(), Placement(0)))
    tensors = tuple(TensorSpec("model", f"layers.{i}.w", "F32", (4096, 64), 0) for i in range(300))
    members = Membership([Spec((layout,), tensors, {})], [0] * ranks)
    plan = plan_save(members, 1234, range(ranks), 5 * 10**9)
    held = math.prod((4096, 64)) * 4 * 300 // 32
    (((holders, replicas)),) = plan.replicas.items()
    assert len(holders) == 64
    assert sum(replica.run.stop - replica.run.start for replica in replicas) == held
    assert abs(sum(piece.stop - piece.start for piece in plan.pieces) - held / 64) < 2**20
