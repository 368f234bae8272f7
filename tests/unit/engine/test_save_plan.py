"""Tests save plans on simulated ranks: every byte once, the same files for all, and balanced work."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankless.engine.plan import equal_shares as sharing
from rankless.engine.plan import stripes as striping
from rankless.engine.plan.file_ranges import FileRange
from rankless.engine.plan.global_spec import GlobalSpec
from rankless.engine.plan.layout_types import FlatSharded, MeshShape, PlacementLayout, Replicated, Sharded
from rankless.engine.plan.save_plan import SavePlan, plan_save
from rankless.engine.plan.stripe_owners import OwnedStripe, RemoteStripe
from rankless.engine.plan.tensor_specs import PER_RANK, LayoutSpec, Meshes, Spec, TensorSpec
from rankless.errors import RankMismatchError, StateError, UnsupportedTensorError
from tests.helpers.examples import examples
from tests.helpers.simulated_jobs import Job, count_bytes, jobs, make_job, make_mesh
from tests.helpers.tensors import tensor_bytes

#: Sizes that make shares and stripes out of few bytes.
SMALLEST, STRIPE, NARROW = 64, 64, 40


@pytest.fixture
def small() -> Iterator[None]:
    with (
        mock.patch.object(sharing, "MIN_SHARE", SMALLEST),
        mock.patch.object(striping, "STRIPE", STRIPE),
        mock.patch.object(striping, "NARROW", NARROW),
    ):
        yield


def owned(plan: SavePlan) -> list[OwnedStripe]:
    return [crossing for crossing in plan.stripe_tasks if isinstance(crossing, OwnedStripe)]


def passed(plan: SavePlan) -> list[RemoteStripe]:
    return [crossing for crossing in plan.stripe_tasks if isinstance(crossing, RemoteStripe)]


def planned(plan: SavePlan) -> list[FileRange]:
    """All that a rank writes."""
    return [*plan.file_ranges, *(piece for crossing in owned(plan) for piece in crossing.file_ranges)]


@given(jobs())
@settings(max_examples=examples(60))
def test_every_rank_plans_the_same_files(small: None, job: Job) -> None:
    first, *others = job.plans()
    for other in others:
        assert list(other.files) == list(first.files)
        assert list(other.tensors) == list(first.tensors)
        assert other.groups == first.groups
        assert other.needs_exchange == first.needs_exchange
    assert set(first.tensors) == set(job.tensors)


@given(jobs())
@settings(max_examples=examples(150))
def test_what_all_ranks_write_is_every_byte_of_every_tensor_once(small: None, job: Job) -> None:
    plans = job.plans()
    every = sorted((piece for plan in plans for piece in planned(plan)), key=lambda piece: (piece.tensor, piece.start))
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
@settings(max_examples=examples(60))
def test_a_rank_writes_in_the_order_of_the_files_and_only_what_it_holds(small: None, job: Job) -> None:
    for rank, plan in enumerate(job.plans()):
        places = [(piece.file, piece.offset) for piece in plan.file_ranges]
        assert places == sorted(places)
        for piece in plan.file_ranges:
            key = plan.tensors[piece.tensor]
            assert job.holds(key, rank)
            part, whole = tensor_bytes(job.part(key, rank)), tensor_bytes(job.tensors[key])
            size = piece.stop - piece.start
            assert part[piece.local : piece.local + size] == whole[piece.start : piece.stop]


@given(jobs())
@settings(max_examples=examples(100))
def test_stripes_are_put_together_from_cuts_of_their_holders(small: None, job: Job) -> None:
    for owner, plan in enumerate(job.plans()):
        for crossing in owned(plan):
            (piece,) = crossing.file_ranges
            key = plan.tensors[piece.tensor]
            assert job.holds(key, owner)
            stripe = np.zeros(piece.stop - piece.start, np.uint8)
            for cut, share in crossing.contributions:
                data = np.frombuffer(tensor_bytes(job.part(key, cut.sender)), np.uint8)
                share.copy_in(data[cut.local : cut.local + cut.size], stripe)
            assert stripe.tobytes() == tensor_bytes(job.tensors[key])[piece.start : piece.stop]
            assert sum(cut.size for cut, _ in crossing.contributions) == len(stripe)


@given(jobs())
@settings(max_examples=examples(100))
def test_what_a_rank_receives_is_what_others_pass_to_it_in_the_same_order(small: None, job: Job) -> None:
    assert_sent_as_awaited(job.plans())


def assert_sent_as_awaited(plans: Sequence[SavePlan]) -> None:
    """Between two ranks sends and receives meet in the order in which both make them."""
    awaited, sent = defaultdict(list), defaultdict(list)
    for rank, plan in enumerate(plans):
        for crossing in owned(plan):
            (piece,) = crossing.file_ranges
            for cut, _ in crossing.contributions:
                if cut.sender != rank:
                    awaited[cut.sender, rank].append((piece.tensor, piece.start, cut.local, cut.size))
        for crossing in passed(plan):
            cut = crossing.contribution
            assert crossing.owner != rank
            assert cut.sender == rank
            sent[rank, crossing.owner].append((crossing.tensor, crossing.start, cut.local, cut.size))
    assert awaited == sent


@given(jobs())
@settings(max_examples=examples(60))
def test_all_ranks_go_through_stripes_in_one_order(small: None, job: Job) -> None:
    """So the oldest stripe in flight never waits for a younger one."""
    for plan in job.plans():
        places = [
            (item.file_ranges[0].tensor, item.file_ranges[0].start)
            if isinstance(item, OwnedStripe)
            else (item.tensor, item.start)
            for item in plan.stripe_tasks
        ]
        assert places == sorted(set(places))
        assert plan.needs_exchange or not places


@given(jobs())
@settings(max_examples=examples(60))
def test_what_several_ranks_hold_and_share_is_to_be_proven_equal_by_all_of_them(small: None, job: Job) -> None:
    plans = job.plans()
    numbers = {key: number for number, key in enumerate(plans[0].tensors)}
    for rank, plan in enumerate(plans):
        actual = {
            (holders, replica.tensor, replica.nbytes)
            for holders, replicas in plan.replicas.items()
            for replica in replicas
        }
        assert actual == {
            (tuple(ranks), numbers[key], len(part) * job.tensors[key].element_size())
            for key in job.tensors.keys() - job.buffers
            for part, ranks in job.holders(key).items()
            if rank in ranks and len(ranks) > 1
        }
        for replicas in plan.replicas.values():
            assert list(replicas) == sorted(replicas, key=lambda replica: replica.tensor)


@given(jobs())
@settings(max_examples=examples(60))
def test_of_a_buffer_the_lowest_holder_of_each_part_speaks(small: None, job: Job) -> None:
    for rank, plan in enumerate(job.plans()):
        speakers = {key: [min(ranks) for ranks in job.holders(key).values()] for key in job.buffers}
        for piece in plan.file_ranges:
            key = plan.tensors[piece.tensor]
            assert key not in job.buffers or rank in speakers[key]
        for crossing in owned(plan):
            key = plan.tensors[crossing.file_ranges[0].tensor]
            assert key not in job.buffers or {cut.sender for cut, _ in crossing.contributions} <= {*speakers[key]}


@given(jobs(), st.randoms(use_true_random=False))
@settings(max_examples=examples(40))
def test_files_do_not_depend_on_who_holds_what(small: None, job: Job, random) -> None:
    """One rank with everything whole plans the files of all ranks together."""
    alone = Job([7], {key: tensor for key, tensor in job.tensors.items() if key[0] != PER_RANK})
    alone.held = {key: {0: None} for key in sorted(alone.tensors, key=lambda _: random.random())}
    mine = {group: files for group, files in job.plans()[0].groups.items() if group != PER_RANK}
    assert alone.plans()[0].groups == mine


def test_what_every_rank_holds_is_written_by_all_in_equal_shares() -> None:
    plans = make_job(torch.zeros(8 * 2**20, dtype=torch.uint8), 4).plans(2**40)
    written = [count_bytes(plan.file_ranges) for plan in plans]
    assert sum(written) == 8 * 2**20
    assert all(abs(size - 2 * 2**20) < 2**20 for size in written)
    assert all(list(plan.replicas) == [(0, 1, 2, 3)] for plan in plans)


def test_a_buffer_is_written_by_its_lowest_holder_and_never_proven() -> None:
    plans = make_job(torch.zeros(8 * 2**20, dtype=torch.uint8), 4, buffer=True).plans(2**40)
    assert [count_bytes(plan.file_ranges) for plan in plans] == [8 * 2**20, 0, 0, 0]
    assert all(not plan.replicas for plan in plans)


def test_a_sharded_buffer_is_written_by_the_lowest_holder_of_each_part() -> None:
    layout = PlacementLayout(make_mesh(2, 2), (Replicated(), Sharded(0)))
    plans = make_job(torch.zeros(6), 4, layout, buffer=True).plans(2**40)
    assert [[(piece.start, piece.stop) for piece in plan.file_ranges] for plan in plans] == [
        [(0, 12)],
        [(12, 24)],
        [],
        [],
    ]


def test_a_buffer_in_small_runs_is_passed_on_by_the_lowest_holder_of_each_part(small: None) -> None:
    layout = PlacementLayout(make_mesh(2, 2), (Replicated(), Sharded(1)))
    plans = make_job(torch.zeros(16, 4), 4, layout, buffer=True).plans(2**40)
    sources = [[cut.sender for cut, _ in crossing.contributions] for plan in plans for crossing in owned(plan)]
    assert sources == [[0, 1]] * 4
    assert_sent_as_awaited(plans)


def test_a_shard_is_written_by_the_rank_that_holds_it_as_it_lies() -> None:
    plans = make_job(torch.zeros(7, 2), 3, PlacementLayout(make_mesh(3), (Sharded(0),))).plans(2**40)
    assert [[(piece.start, piece.stop) for piece in plan.file_ranges] for plan in plans] == [
        [(0, 24)],
        [(24, 48)],
        [(48, 56)],
    ]
    assert not any(plan.replicas or plan.needs_exchange for plan in plans)


def test_a_flat_shard_is_written_by_the_rank_that_holds_it_as_it_lies() -> None:
    plans = make_job(torch.zeros(3, 4), 3, PlacementLayout(make_mesh(3), (FlatSharded(2, 5),))).plans(2**40)
    assert [[(piece.start, piece.stop) for piece in plan.file_ranges] for plan in plans] == [
        [(0, 12)],
        [(12, 32)],
        [(32, 48)],
    ]


def test_columns_are_put_together_in_large_stripes_by_all_their_holders_in_turn(small: None) -> None:
    plans = make_job(torch.zeros(16, 8), 4, PlacementLayout(make_mesh(4), (Sharded(1),))).plans(2**40)
    assert all(plan.needs_exchange and not plan.file_ranges for plan in plans)
    stripes = sorted((item.file_ranges[0].start, item.file_ranges[0].stop) for plan in plans for item in owned(plan))
    assert stripes == [(start, start + 64) for start in range(0, 512, 64)]
    assert [len(owned(plan)) for plan in plans] == [2, 2, 2, 2]
    for item in itertools.chain(*map(owned, plans)):
        assert [cut.holders for cut, _ in item.contributions] == [(0,), (1,), (2,), (3,)]


@pytest.mark.parametrize("kept", [1, 3, 4])
def test_tensors_of_few_stripes_are_shared_out_over_all_their_holders_too(small: None, kept: int) -> None:
    """Were each to begin at the lowest rank, that one would write them all. Every ``kept``-th lies in small runs."""
    layout = PlacementLayout(make_mesh(4), (Sharded(1),))
    wide = PlacementLayout(make_mesh(4), (Sharded(0),))
    job = Job(list(range(4)))
    for number in range(40 * kept):
        key = ("model", f"w{number:03}")
        job.tensors[key] = torch.zeros(4, 4, dtype=torch.float32)
        job.held[key] = dict.fromkeys(range(4), wide if number % kept else layout)
    written = [count_bytes([piece for item in owned(plan) for piece in item.file_ranges]) for plan in job.plans(2**40)]
    assert sum(written) == 40 * 64
    assert max(written) <= 1.5 * min(written)


def test_of_several_holders_the_nearest_to_the_owner_of_a_stripe_gives_it(small: None) -> None:
    layout = PlacementLayout(make_mesh(4, 2), (Replicated(), Sharded(1)))
    plans = make_job(torch.zeros(16, 8), 8, layout).plans(2**40)
    for owner, plan in enumerate(plans):
        (stripe,) = owned(plan)
        sources = [cut.sender for cut, _ in stripe.contributions]
        assert [source % 2 for source in sources] == [0, 1]
        assert max(abs(source - owner) for source in sources) == 1


def test_replicas_of_a_shard_are_proven_by_its_holders() -> None:
    layout = PlacementLayout(make_mesh(2, 2), (Replicated(), Sharded(1)))
    plans = make_job(torch.zeros(2, 4), 4, layout).plans(2**40)
    assert {holders: [replica.nbytes for replica in actual] for holders, actual in plans[3].replicas.items()} == {
        (1, 3): [16]
    }


def test_a_tensor_on_sub_meshes_is_one_whose_parts_all_of_them_hold() -> None:
    """As the weights of norms under tensor parallelism, which live on each of the data-parallel sub-meshes."""
    key = ("model", "norm")
    job = Job(list(range(4)), {key: torch.zeros(6)})
    job.held[key] = {
        rank: PlacementLayout(MeshShape((2,), (rank % 2, rank % 2 + 2)), (Sharded(0),)) for rank in range(4)
    }
    plans = job.plans()
    assert [[*plan.replicas] for plan in plans] == [[(0, 1)], [(0, 1)], [(2, 3)], [(2, 3)]]
    assert sum(count_bytes(plan.file_ranges) for plan in plans) == 24


def test_a_tensor_over_a_rank_that_does_not_save_is_an_error_naming_both() -> None:
    layout = PlacementLayout(MeshShape((3,), (0, 1, 5)), (Sharded(0),))
    with pytest.raises(StateError, match=r"'w'.*rank 5"):
        make_job(torch.zeros(6), 2, layout).plans()


def test_a_part_that_nobody_brings_is_an_error_naming_who_should() -> None:
    job = make_job(torch.zeros(6), 3, PlacementLayout(make_mesh(3), (Sharded(0),)))
    del job.held["model", "w"][1]
    with pytest.raises(StateError, match=r"'w'.*rank 1"):
        job.plans()


def test_a_rank_of_the_mesh_need_not_name_a_part_that_others_bring_or_that_is_empty() -> None:
    job = make_job(torch.zeros(4), 6, PlacementLayout(make_mesh(2, 3), (Replicated(), Sharded(0))))
    for rank in (1, 2, 5):
        del job.held["model", "w"][rank]
    plans = job.plans()
    assert [rank for rank, plan in enumerate(plans) if plan.file_ranges] in ([0, 4], [3, 4])
    assert sorted((piece.start, piece.stop) for plan in plans for piece in plan.file_ranges) == [(0, 8), (8, 16)]
    assert [[*plan.replicas] for plan in plans] == [[(0, 3)], [], [], [(0, 3)], [], []]


def said_by_two(first: TensorSpec, second: TensorSpec, *layouts: LayoutSpec) -> GlobalSpec:
    """Ranks 0 and 1 say one thing of a tensor, rank 2 another."""
    specs, table = [Spec(layouts, (first,)), Spec(layouts, (second,))], [Meshes((make_mesh(3),))]
    return GlobalSpec(specs, table, [0, 0, 1], [0, 0, 0], {rank: rank for rank in range(3)})


@pytest.mark.parametrize(
    ("what", "other"),
    [
        ("dtype", TensorSpec("model", "w", "BF16", (4,))),
        ("shape", TensorSpec("model", "w", "F32", (5,))),
        ("layout", TensorSpec("model", "w", "F32", (4,), 0)),
    ],
)
def test_ranks_that_describe_one_tensor_otherwise_are_named(what: str, other: TensorSpec) -> None:
    for pair in ((TensorSpec("model", "w", "F32", (4,)), other), (other, TensorSpec("model", "w", "F32", (4,)))):
        with pytest.raises(RankMismatchError, match=rf"the {what} of model tensor 'w'") as error:
            plan_save(said_by_two(*pair, LayoutSpec(0, (Sharded(0),))), 0, 100)
        assert "rank 0 has" in str(error.value)
        assert "rank 2 has" in str(error.value)


def test_ranks_that_divide_one_tensor_otherwise_are_named() -> None:
    rows, columns = TensorSpec("model", "w", "F32", (4, 4), 0), TensorSpec("model", "w", "F32", (4, 4), 1)
    members = said_by_two(rows, columns, LayoutSpec(0, (Sharded(0),)), LayoutSpec(0, (Sharded(1),)))
    with pytest.raises(RankMismatchError, match=r"layout.*'w'.*rank 0.*rank 2"):
        plan_save(members, 0, 100)


def test_a_shape_is_told_as_it_is() -> None:
    members = said_by_two(TensorSpec("model", "w", "F32", ()), TensorSpec("model", "w", "F32", (1,)))
    with pytest.raises(RankMismatchError, match=r"shape.*rank 0 has \(\), rank 2 has \(1,\)"):
        plan_save(members, 0, 100)


def test_meshes_that_place_one_rank_otherwise_are_an_error() -> None:
    """Each of two ranks says that it holds the first part: nobody would bring the second."""
    job = make_job(torch.zeros(4), 2)
    job.held["model", "w"] = {
        rank: PlacementLayout(MeshShape((2,), (rank, 1 - rank)), (Sharded(0),)) for rank in range(2)
    }
    with pytest.raises(RankMismatchError, match="'w'"):
        job.plans()


def test_a_tensor_whose_name_no_file_can_hold_is_an_error_on_every_rank() -> None:
    job = Job([0, 1], {("model", "__metadata__"): torch.zeros(4)}, {("model", "__metadata__"): {0: None, 1: None}})
    members = job.membership()
    for rank in job.ranks:
        with pytest.raises(UnsupportedTensorError, match="__metadata__"):
            plan_save(members, rank, 100)


STAGES, DP, TP, PARAMETERS = 16, 32, 8, 2000

#: A weight cut in columns, in rows, and that of a norm, with the layout of each: as FSDP2 over tensor parallelism.
WEIGHTS = [((8192, 8192), 0), ((8192, 8192), 1), ((8192,), 2)]


def stage_spec(stage: int) -> Spec:
    """The model of a pipeline stage, with the two moments and the step of AdamW for every parameter."""
    layouts = (
        LayoutSpec(0, (Sharded(0, TP), Sharded(0))),
        LayoutSpec(0, (Sharded(0), Sharded(1))),
        LayoutSpec(1, (Sharded(0),)),
    )
    tensors = []
    for number in range(PARAMETERS // STAGES):
        name, (shape, layout) = f"stages.{stage}.{number}.weight", WEIGHTS[(0, 1, 0, 1, 2)[number % 5]]
        moments = [TensorSpec("optimizer", f"{name}.{moment}", "F32", shape, layout) for moment in ("m", "v")]
        step = TensorSpec("optimizer", f"{name}.step", "F32", ())
        tensors += [TensorSpec("model", name, "BF16", shape, layout), *moments, step]
    return Spec(layouts, tuple(tensors))


def stage_meshes(stage: int, column: int) -> Meshes:
    """The mesh of a stage, and the data-parallel one of one column of it."""
    grid = torch.arange(STAGES * DP * TP).view(STAGES, DP, TP)[stage]
    return Meshes(
        (MeshShape((DP, TP), tuple(grid.flatten().tolist())), MeshShape((DP,), tuple(grid[:, column].tolist())))
    )


def test_four_thousand_ranks_are_planned_in_equal_shares() -> None:
    """Planning asks nothing of other ranks but their specs and meshes, of which there are a few."""
    ranks = STAGES * DP * TP
    members = GlobalSpec(
        [stage_spec(stage) for stage in range(STAGES)],
        [stage_meshes(stage, column) for stage in range(STAGES) for column in range(TP)],
        [rank // (DP * TP) for rank in range(ranks)],
        [rank // (DP * TP) * TP + rank % TP for rank in range(ranks)],
        {rank: rank for rank in range(ranks)},
    )
    first, last = (plan_save(members, rank, 5 * 10**9) for rank in (0, ranks - 1))
    assert list(first.files) == list(last.files)
    assert len(first.tensors) == 4 * PARAMETERS
    total = sum(entry.nbytes for file in first.files for entry in file.entries.values())
    of_stage = 4 * PARAMETERS // STAGES
    for plan in (first, last):
        assert abs(count_bytes(planned(plan)) * ranks - total) < 0.1 * total
        assert len(plan.file_ranges) + len(plan.stripe_tasks) < of_stage
        assert len(plan.replicas) == 2
        assert sum(map(len, plan.replicas.values())) == of_stage * 2 // 5
