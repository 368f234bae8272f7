"""Tests tensors that ranks read together: each byte is read once if they exchange bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankless.engine.plan.layout_types import MeshShape, PlacementLayout, Replicated, Sharded
from tests.helpers.examples import examples
from tests.helpers.simulated_io import (
    SavedJob,
    SimulatedLoad,
    StoredTensors,
    assert_hashed,
    list_bytes,
    ranges_of_tensors,
    record_reads,
    small_sizes,
    store_in_pieces,
)
from tests.helpers.simulated_jobs import Job, Key, jobs, make_job, make_mesh, named_tensors
from tests.helpers.tensors import random_tensor, tensor_bytes
from tests.helpers.thread_ranks import ThreadP2P


@pytest.fixture(autouse=True)
def _small_sizes() -> Iterator[None]:
    with small_sizes():
        yield


@st.composite
def saves_and_loads(draw: st.DrawFn) -> tuple[Job, Job]:
    """A job that saves tensors, and one that loads some of them."""
    chosen = draw(named_tensors())
    kept = draw(st.lists(st.sampled_from(sorted(chosen)), min_size=1, unique=True))
    return draw(jobs(chosen)), draw(jobs({key: chosen[key] for key in kept}))


@given(saves_and_loads(), st.booleans(), st.booleans())
@settings(max_examples=examples(80))
def test_what_is_saved_in_any_layout_is_loaded_in_any_other(
    tmp_path_factory, case: tuple[Job, Job], exchange: bool, in_place: bool
) -> None:
    before, after = case
    saved = SavedJob.of(tmp_path_factory.mktemp("save"), before, limit=200)
    loading = SimulatedLoad(StoredTensors(saved.extents(), before.tensors), after, exchange, in_place)
    actual = loading.run_all()
    for rank in after.ranks:
        loading.assert_filled(rank)
    for key, tensor in after.tensors.items() if exchange else ():
        assert_hashed(actual[key], tensor)


@st.composite
def jobs_in_pieces(draw: st.DrawFn) -> tuple[Job, dict[Key, list[int]], list[int]]:
    """A job, the bytes at which each of its tensors is cut, and the file of each piece."""
    job = draw(jobs(draw(named_tensors())))
    cuts = {}
    for key, tensor in job.tensors.items():
        inside = draw(st.lists(st.integers(0, tensor.numel()), max_size=3))
        cuts[key] = [cut * tensor.element_size() for cut in sorted({0, *inside, tensor.numel()})]
    pieces = sum(len(edges) - 1 for edges in cuts.values())
    return job, cuts, draw(st.lists(st.integers(0, 3), min_size=pieces, max_size=pieces))


@given(jobs_in_pieces(), st.booleans())
@settings(max_examples=examples(80))
def test_with_exchange_each_byte_is_read_once_by_all_ranks_together(tmp_path_factory, case, in_place: bool) -> None:
    stored = store_in_pieces(tmp_path_factory.mktemp("load"), case)
    loading = SimulatedLoad(stored, case[0], exchange=True, in_place=in_place)
    with record_reads() as reads:
        actual = loading.run_all()
    assert list_bytes(reads) == list_bytes(ranges_of_tensors(stored, case[0]))
    for rank in loading.job.ranks:
        loading.assert_filled(rank)
    for key, tensor in loading.job.tensors.items():
        assert_hashed(actual[key], tensor)


@given(jobs_in_pieces(), st.booleans())
@settings(max_examples=examples(60))
def test_without_exchange_each_rank_reads_for_itself(tmp_path_factory, case, in_place: bool) -> None:
    """One after another: no rank sends anything."""
    loading = SimulatedLoad(
        store_in_pieces(tmp_path_factory.mktemp("load"), case), case[0], exchange=False, in_place=in_place
    )
    for rank in loading.job.ranks:
        loading.run(rank, ThreadP2P(rank, mock.Mock(spec=())))
        loading.assert_filled(rank)


def test_without_exchange_a_rank_reads_only_the_stripes_with_bytes_of_its_shard(tmp_path: Path) -> None:
    job = make_job(random_tensor((16, 8), torch.float32), 4, PlacementLayout(make_mesh(2, 2), (Sharded(0), Sharded(1))))
    stored = store_in_pieces(tmp_path, (job, {("model", "w"): [0, 512]}, [0]))
    with record_reads() as reads:
        SimulatedLoad(stored, job, exchange=False).run(2, ThreadP2P(2, mock.Mock(spec=())))
    assert [byte for _, byte in list_bytes(reads)] == list(range(256, 512))


def test_elements_are_cast_on_their_way_in(tmp_path: Path) -> None:
    tensor = torch.arange(64.0).view(8, 8)
    layout = PlacementLayout(make_mesh(2, 2), (Replicated(), Sharded(1)))
    stored = store_in_pieces(tmp_path, (make_job(tensor, 4, layout), {("model", "w"): [0, 256]}, [0]))
    for exchange in (True, False):
        loading = SimulatedLoad(stored, make_job(tensor, 4, layout), exchange)
        for targets in loading.targets:
            targets["model", "w"] = torch.zeros(8, 4, dtype=torch.bfloat16)
        loading.run_all()
        for rank, targets in enumerate(loading.targets):
            expected = tensor[:, 4 * (rank % 2) : 4 * (rank % 2) + 4].bfloat16()
            assert torch.equal(targets["model", "w"], expected)


def test_ranks_that_open_files_in_another_order_agree_on_who_reads_what(tmp_path: Path) -> None:
    """The second rank has nothing of the first tensor. So the first rank opens that tensor's file first."""
    job = Job([0, 1])
    for name, ranks in (("a", [0]), ("b", [0, 1]), ("c", [0, 1])):
        job.tensors["model", name] = random_tensor((64,), torch.uint8, seed=ord(name))
        job.held["model", name] = dict.fromkeys(ranks)
    stored = store_in_pieces(tmp_path, (job, {key: [0, 64] for key in job.tensors}, [1, 0, 1]))
    loading = SimulatedLoad(stored, job, exchange=True)
    with record_reads() as reads:
        loading.run_all()
    assert list_bytes(reads) == list_bytes(ranges_of_tensors(stored, job))
    for rank in job.ranks:
        loading.assert_filled(rank)


@pytest.mark.parametrize("before", range(1, 8))
def test_shared_bytes_are_not_cut_inside_an_element_wherever_they_are_in_the_file(tmp_path: Path, before: int) -> None:
    """Files of other systems need not be aligned to the tensors in them."""
    job = Job([0, 1, 2])
    for name, tensor in (("a", random_tensor((before,), torch.uint8)), ("b", random_tensor((50,), torch.float64))):
        job.tensors["model", name] = tensor
        job.held["model", name] = dict.fromkeys(job.ranks)
    stored = store_in_pieces(tmp_path, (job, {("model", "a"): [0, before], ("model", "b"): [0, 400]}, [0, 0]))
    loading = SimulatedLoad(stored, job, exchange=True, in_place=False)
    loading.run_all()
    for rank in job.ranks:
        loading.assert_filled(rank)


@pytest.mark.parametrize("exchange", [True, False])
def test_an_empty_tensor_is_loaded_on_several_ranks(tmp_path: Path, exchange: bool) -> None:
    job = make_job(torch.zeros(0, 3), 2)
    loading = SimulatedLoad(store_in_pieces(tmp_path, (job, {("model", "w"): [0]}, [])), job, exchange)
    assert loading.run_all() == {}


def test_more_stripes_than_can_be_in_flight_are_saved_and_loaded(tmp_path: Path) -> None:
    """Each rank owns a hundred stripes, and gives to three hundred."""
    job = make_job(
        random_tensor((1600, 16), torch.float32),
        4,
        PlacementLayout(MeshShape((2, 2), (3, 0, 2, 1)), (Sharded(1), Sharded(1))),
    )
    saved = SavedJob.of(tmp_path, job, limit=2**40)
    assert saved.bytes_of(("model", "w")) == tensor_bytes(job.tensors["model", "w"])
    loading = SimulatedLoad(StoredTensors(saved.extents(), job.tensors), job, exchange=True)
    with record_reads() as reads:
        loading.run_all()
    for rank in job.ranks:
        loading.assert_filled(rank)
    assert len(reads) == 1600


@pytest.mark.parametrize(
    ("layout", "alone"),
    [
        (None, False),
        (PlacementLayout(make_mesh(4), (Sharded(0),)), True),
        (PlacementLayout(make_mesh(4), (Replicated(),)), False),
    ],
)
def test_bytes_that_other_ranks_read_too_are_planned_apart(
    tmp_path: Path, layout: PlacementLayout | None, alone: bool
) -> None:
    """They go through the page cache; the others need not."""
    job = make_job(random_tensor((16, 8), torch.float32), 4, layout)
    loading = SimulatedLoad(store_in_pieces(tmp_path, (job, {("model", "w"): [0, 512]}, [0])), job, exchange=False)
    plans = [loading.plan(rank)[0] for rank in range(4)]
    assert all(bool(plan.file_ranges) == alone and bool(plan.host_shared) != alone for plan in plans)


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_holders_of_replicas_send_at_the_same_time(tmp_path: Path, ranks: int) -> None:
    """If the items of one rank followed each other, its link would carry all copies of them alone."""
    tensors = {("model", f"w{number}"): random_tensor((53 + number,), torch.float32) for number in range(40)}
    replicated = dict.fromkeys(range(ranks), PlacementLayout(make_mesh(ranks), (Replicated(),)))
    job = Job([*range(ranks)], tensors, dict.fromkeys(tensors, replicated))
    cuts = {key: [0, 4 * tensor.numel()] for key, tensor in tensors.items()}
    loading = SimulatedLoad(store_in_pieces(tmp_path, (job, cuts, [0] * len(tensors))), job, exchange=True)
    orders = [[(item.owner, item.chunk.offset) for item in loading.plan(rank)[0].exchanged] for rank in range(ranks)]
    assert all(order == orders[0] for order in orders)
    owners = [owner for owner, _ in orders[0]]
    assert len(owners) >= 16 * ranks
    windows = [owners[first : first + 4 * ranks] for first in range(len(owners) - 4 * ranks)]
    assert all(len({*window}) == ranks for window in windows)
