"""Tests the order of ranks by the bytes that they write: the CRCs merge in buckets, and few reach rank 0."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankless.engine.integrity.crc_gather import bucket_of, bucket_size
from rankless.engine.io.fragments import FragmentTable, decode_fragments, merge_adjacent_fragments
from rankless.engine.io.fragments import encode_fragments as encode
from rankless.engine.io.requests import Fragments
from rankless.engine.plan import equal_shares, stripes, writer_cells
from rankless.engine.plan.global_spec import GlobalSpec
from rankless.engine.plan.layout_types import MeshShape, Placement, Replicated, Sharded
from rankless.engine.plan.save_plan import SavePlan, plan_save
from rankless.engine.plan.stripe_owners import OwnedStripe
from rankless.engine.plan.tensor_specs import LayoutSpec, Meshes, Spec, TensorSpec
from rankless.ondisk import block_crcs
from rankless.ondisk.block_crcs import Fragment, crc64
from tests.helpers.examples import examples
from tests.helpers.pairwise import each_value
from tests.helpers.simulated_jobs import Job, jobs
from tests.helpers.tensors import tensor_bytes


@pytest.fixture
def small() -> Iterator[None]:
    """Sizes that make cells, shares and stripes out of few bytes."""
    with (
        mock.patch.object(writer_cells, "CELL_BYTES", 32),
        mock.patch.object(writer_cells, "MAX_GROUPS", 2),
        mock.patch.object(equal_shares, "MIN_SHARE", 64),
        mock.patch.object(stripes, "STRIPE", 64),
        mock.patch.object(stripes, "NARROW", 40),
    ):
        yield


def hashed_ranges(plan: SavePlan) -> Iterator[tuple[int, int, int]]:
    """Return the tensor, start and stop of each range whose CRC a rank reports: its ranges, cut at blocks."""
    owned = (task for task in plan.stripe_tasks if isinstance(task, OwnedStripe))
    for item in itertools.chain(plan.file_ranges, *(task.file_ranges for task in owned)):
        first_edge = (item.start // block_crcs.BLOCK_BYTES + 1) * block_crcs.BLOCK_BYTES
        edges = [item.start, *range(first_edge, item.stop, block_crcs.BLOCK_BYTES), item.stop]
        yield from ((item.tensor, low, high) for low, high in itertools.pairwise(edges))


def merge_buckets(reports: Sequence[Fragments], rank_order: Sequence[int]) -> list[bytes]:
    """Return what the first rank of each bucket sends to rank 0."""
    merged = []
    for place in range(0, len(rank_order), bucket_size(len(rank_order))):
        bucket = bucket_of(rank_order[place], rank_order)
        merged.append(
            merge_adjacent_fragments(FragmentTable.from_bytes(encode(reports[rank]) for rank in bucket)).to_bytes()
        )
    return merged


@st.composite
def jobs_on_hosts(draw: st.DrawFn) -> tuple[Job, list[int]]:
    job = draw(jobs())
    hosts = draw(st.lists(st.integers(0, 3), min_size=len(job.ranks), max_size=len(job.ranks)))
    return job, hosts if draw(st.booleans()) else []


@given(jobs_on_hosts())
@settings(max_examples=examples(150), deadline=None)
def test_the_crcs_that_buckets_merge_are_those_of_the_bytes(small: None, job_on_hosts: tuple[Job, list[int]]) -> None:
    job, host_of = job_on_hosts
    spec = job.membership()
    plans = [plan_save(spec, rank, 2000, host_of) for rank in job.ranks]
    assert sorted(plans[0].rank_order) == list(job.ranks)
    assert all(plan.rank_order == plans[0].rank_order for plan in plans)
    data = [tensor_bytes(job.tensors[key]) for key in plans[0].tensors]
    reports: list[Fragments] = []
    for plan in plans:
        reports.append({})
        for tensor, start, stop in hashed_ranges(plan):
            reports[-1].setdefault(tensor, []).append(Fragment(start, stop, crc64(data[tensor][start:stop])))
    merged = decode_fragments(merge_buckets(reports, plans[0].rank_order))
    for tensor, raw in enumerate(data):
        assert block_crcs.assemble_crcs(merged.get(tensor, []), len(raw)) == ([crc64(raw)] if raw else [])


def build_spec(mesh: MeshShape, placements: tuple[Placement, ...], shapes: Sequence[tuple[int, ...]]) -> GlobalSpec:
    tensors = [TensorSpec("model", f"layers.{n:03}.weight", "F32", shape, 0) for n, shape in enumerate(shapes)]
    tensors += [TensorSpec("optimizer", f"layers.{n:03}/step", "F32", ()) for n in range(len(shapes))]
    spec = Spec((LayoutSpec(0, placements),), tuple(tensors))
    size = len(mesh.ranks)
    return GlobalSpec([spec], [Meshes((mesh,))], [0] * size, [0] * size, {rank: rank for rank in range(size)})


RANKS = 144

#: Hybrid sharding over 8 replicas of 18 shards and 36 of 4; replicas or shards have neighbouring ranks.
HYBRID = [
    ((8, 18), (Replicated(), Sharded(0))),
    ((18, 8), (Sharded(0), Replicated())),
    ((36, 4), (Replicated(), Sharded(0))),
    ((4, 36), (Sharded(0), Replicated())),
    ((2, 72), (Replicated(), Sharded(0))),
    ((72, 2), (Sharded(0), Replicated())),
]
OTHERS = [
    ((RANKS,), (Sharded(0),)),
    ((RANKS,), (Replicated(),)),
    ((18, 8), (Sharded(0, 8), Sharded(0))),
    ((3, 6, 8), (Replicated(), Sharded(0, 8), Sharded(0))),
]


@each_value({"shape, placements": HYBRID + OTHERS, "on_hosts": [False, True]})
def test_few_fragments_reach_rank_0(shape: tuple[int, ...], placements: tuple[Placement, ...], on_hosts: bool) -> None:
    """The order by numbers exceeds the bound for 8 neighbouring replicas on one host, and for 2-D sharding."""
    shapes = [(1440, 1024), (1000, 700), (145, 2048), (64, 3000)] * 12
    mesh = MeshShape(shape, tuple(range(math.prod(shape))))
    spec = build_spec(mesh, placements, shapes)
    host_of = [rank // 8 for rank in range(RANKS)] if on_hosts else []
    plans = [plan_save(spec, rank, 5 * 10**9, host_of) for rank in range(RANKS)]
    reports: list[Fragments] = [{} for _ in plans]
    for rank, plan in enumerate(plans):
        for tensor, start, stop in hashed_ranges(plan):
            reports[rank].setdefault(tensor, []).append(Fragment(start, stop, 0))
    reached = sum(len(raw) for raw in merge_buckets(reports, plans[0].rank_order)) // 28
    assert reached <= bound_fragments(spec, RANKS) + (2 * RANKS if on_hosts else 0)


def bound_fragments(spec: GlobalSpec, ranks: int) -> int:
    """Return the bound of the module for one host."""
    total = 0
    for tensor in spec.iter_tensors():
        shards = math.prod(count for count, _ in tensor.division)
        total += 2 + shards // bucket_size(ranks) + block_crcs.count_blocks(tensor.info.nbytes)
    return total
