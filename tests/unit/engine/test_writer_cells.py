"""Tests plans for several hosts on simulated ranks: each cell of a file is written by the ranks of one host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rankless.engine.plan import equal_shares, stripes, writer_cells
from rankless.engine.plan.cell_transfers import CellTransfer, cut_out
from rankless.engine.plan.file_ranges import FileRange, count_bytes
from rankless.engine.plan.layout_types import MeshShape, PlacementLayout, Replicated, Sharded
from rankless.engine.plan.save_plan import SavePlan, plan_save
from rankless.engine.plan.stripe_owners import OwnedStripe
from tests.helpers.examples import examples
from tests.helpers.pairwise import first_of
from tests.helpers.simulated_jobs import Job, jobs
from tests.helpers.tensors import tensor_bytes as bytes_of

#: Sizes that make cells, shares and stripes out of few bytes.
CELL = 32


@pytest.fixture
def small_cells() -> Iterator[None]:
    with (
        mock.patch.object(writer_cells, "CELL_BYTES", CELL),
        mock.patch.object(writer_cells, "MAX_GROUPS", 3),
        mock.patch.object(equal_shares, "MIN_SHARE", 2 * CELL),
        mock.patch.object(stripes, "STRIPE", 64),
        mock.patch.object(stripes, "NARROW", 40),
    ):
        yield


def sharded(count: int, ranks: int, rows: int, columns: int) -> Job:
    """``count`` float32 tensors, each sharded by rows."""
    job = Job(list(range(ranks)))
    layout = PlacementLayout(MeshShape((ranks,), tuple(range(ranks))), (Sharded(0),))
    for number in range(count):
        job.tensors["model", f"t{number:05}"] = torch.zeros(rows, columns)
        job.held["model", f"t{number:05}"] = dict.fromkeys(range(ranks), layout)
    return job


@st.composite
def jobs_on_hosts(draw: st.DrawFn) -> tuple[Job, list[int]]:
    job = draw(jobs())
    return job, draw(st.lists(st.integers(0, 3), min_size=len(job.ranks), max_size=len(job.ranks)))


def reported_by_halves() -> Job:
    """Two tensors with equal layouts, each named by one of the two groups of ranks that hold its shards."""
    job = sharded(2, 16, 10, 1)  # a cell has bytes of both
    layout = PlacementLayout(MeshShape((2, 8), tuple(range(16))), (Replicated(), Sharded(0)))
    for key, ranks in zip(job.held, (range(8), range(8, 16)), strict=True):
        job.held[key] = dict.fromkeys(ranks, layout)
    return job


#: Small shards on two hosts: more groups of ranks than are placed one by one in a cell.
CROWDED = (sharded(3, 8, 8, 1), [0, 0, 1, 1] * 2)
CROWDED_IN_PART = (reported_by_halves(), [0, 0, 1, 1] * 4)


def plan_all(job: Job, host_of: Sequence[int]) -> list[SavePlan]:
    spec = job.membership()
    return [plan_save(spec, rank, 2000, host_of) for rank in job.ranks]


def ranges_in_memory(plan: SavePlan) -> list[FileRange]:
    owned = (task for task in plan.stripe_tasks if isinstance(task, OwnedStripe))
    ranges = [*plan.file_ranges, *(file_range for task in owned for file_range in task.file_ranges)]
    return sorted(ranges, key=lambda file_range: (file_range.file, file_range.offset))


def written_spans(plan: SavePlan) -> list[tuple[int, int, int]]:
    """Return (file, start, stop) of all bytes that a rank writes."""
    kept, _ = cut_out(ranges_in_memory(plan), plan.sent)
    spans = [(kept_range.file, kept_range.offset, kept_range.offset + count_bytes([kept_range])) for kept_range in kept]
    return spans + [(received.file, received.start, received.stop) for received in plan.received.to_transfers()]


def exchanged(plan: SavePlan) -> list[CellTransfer]:
    return [*plan.sent, *plan.received.to_transfers()]


def planned_bytes(plan: SavePlan) -> dict[int, set[int]]:
    return {
        number: {
            byte
            for entry in file.entries.values()
            for byte in range(file.data_start + entry.data_offsets[0], file.data_start + entry.data_offsets[1])
        }
        for number, file in enumerate(plan.files)
    }


@example(CROWDED)
@example(CROWDED_IN_PART)
@given(jobs_on_hosts())
@settings(max_examples=examples(200), deadline=None)
def test_each_byte_is_written_once_and_each_cell_by_one_host(
    small_cells: None, job_on_hosts: tuple[Job, list[int]]
) -> None:
    job, host_of = job_on_hosts
    plans = plan_all(job, host_of)
    written: dict[int, list[int]] = defaultdict(list)
    hosts_of_cell = defaultdict(set)
    for rank, plan in enumerate(plans):
        for file, start, stop in written_spans(plan):
            written[file] += range(start, stop)
            for cell in range(start // CELL, -(-stop // CELL)):
                hosts_of_cell[file, cell].add(host_of[rank])
    for number, expected in planned_bytes(plans[0]).items():
        assert sorted(written[number]) == sorted(expected)
        for cell in range(-(-plans[0].files[number].data_start // CELL)):  # rank 0 writes the header
            hosts_of_cell[number, cell].add(host_of[0])
    assert all(len(hosts) == 1 for hosts in hosts_of_cell.values())


def merge_adjacent(transfers: Sequence[CellTransfer]) -> list[CellTransfer]:
    """Merge transfers as they follow each other in the message to or from a rank, which has no other structure."""
    merged: dict[int, list[CellTransfer]] = defaultdict(list)
    for transfer in transfers:
        message = merged[transfer.rank]
        if message and (message[-1].file, message[-1].stop) == (transfer.file, transfer.start):
            message[-1] = message[-1]._replace(stop=transfer.stop)
        else:
            message.append(transfer)
    return [transfer for message in merged.values() for transfer in message]


@example(CROWDED)
@example(CROWDED_IN_PART)
@given(jobs_on_hosts())
@settings(max_examples=examples(100), deadline=None)
def test_each_transfer_is_sent_by_a_rank_that_has_its_bytes(
    small_cells: None, job_on_hosts: tuple[Job, list[int]]
) -> None:
    job, host_of = job_on_hosts
    plans = plan_all(job, host_of)
    sent = {(rank, transfer) for rank, plan in enumerate(plans) for transfer in merge_adjacent(plan.sent)}
    received = {
        (transfer.rank, transfer._replace(rank=rank))
        for rank, plan in enumerate(plans)
        for transfer in merge_adjacent(plan.received.to_transfers())
    }
    assert sent == received
    assert all(host_of[rank] != host_of[transfer.rank] for rank, transfer in sent)
    for plan in plans:
        _, cut = cut_out(ranges_in_memory(plan), plan.sent)
        assert [transfer for transfer, _ in cut] == list(plan.sent)
        assert all(count_bytes(ranges) == transfer.stop - transfer.start for transfer, ranges in cut)
        assert plan.needs_exchange or not (plan.sent or plan.received.to_transfers())


@given(jobs_on_hosts())
@settings(max_examples=examples(60), deadline=None)
def test_a_rank_holds_the_bytes_of_its_ranges(small_cells: None, job_on_hosts: tuple[Job, list[int]]) -> None:
    job, host_of = job_on_hosts
    for rank, plan in enumerate(plan_all(job, host_of)):
        for file_range in plan.file_ranges:
            key = plan.tensors[file_range.tensor]
            part, whole = bytes_of(job.part(key, rank)), bytes_of(job.tensors[key])
            size = count_bytes([file_range])
            assert part[file_range.local : file_range.local + size] == whole[file_range.start : file_range.stop]


@given(jobs_on_hosts())
@settings(max_examples=examples(60), deadline=None)
def test_the_files_do_not_depend_on_hosts(small_cells: None, job_on_hosts: tuple[Job, list[int]]) -> None:
    job, host_of = job_on_hosts
    for alone, on_hosts in zip(plan_all(job, ()), plan_all(job, host_of), strict=True):
        assert (on_hosts.files, on_hosts.tensors, on_hosts.groups) == (alone.files, alone.tensors, alone.groups)
        assert on_hosts.stripe_tasks == alone.stripe_tasks
        assert on_hosts.replicas == alone.replicas


def written_bytes(plan: SavePlan) -> int:
    return sum(stop - start for _, start, stop in written_spans(plan))


@first_of(1, "host_of", [(0, 0, 1, 1), (0, 1), (0, 1, 2, 3)])
def test_many_small_tensors_are_written_in_equal_shares(host_of: tuple[int, ...]) -> None:
    """Each cell has bytes of all ranks: they are dealt out in turn."""
    job = sharded(4000, len(host_of), 4, 256)
    spec = job.membership()
    written = [written_bytes(plan_save(spec, rank, 5 * 10**9, host_of)) for rank in job.ranks]
    assert max(written) <= 1.1 * sum(written) / len(written)


def test_fully_sharded_ranks_exchange_with_few_others() -> None:
    """A rank shares cells with its neighbours, and at the edges of tensors with the first and the last rank."""
    job = sharded(20, 64, 64, 20_000)
    spec, host_of = job.membership(), [rank // 8 for rank in range(64)]
    for rank in (0, 7, 8, 31, 63):
        plan = plan_save(spec, rank, 5 * 10**9, host_of)
        assert len({transfer.rank for transfer in exchanged(plan)}) <= 4
        moved = sum(transfer.stop - transfer.start for transfer in exchanged(plan))
        assert moved <= 20 * 4 * writer_cells.CELL_BYTES


def test_all_but_one_rank_exchange_with_few_others_if_shards_are_tiny() -> None:
    """The bytes of all ranks are in one cell: rank 0 receives them, whatever tensor they belong to."""
    job = sharded(20, 64, 64, 20_000)
    for number in range(30):
        job.tensors["model", f"t{number:05}.bias"] = torch.zeros(64 + number)
        job.held["model", f"t{number:05}.bias"] = job.held["model", "t00000"]
    spec, host_of = job.membership(), [rank // 8 for rank in range(64)]
    for rank in (7, 8, 31):
        plan = plan_save(spec, rank, 5 * 10**9, host_of)
        assert len({transfer.rank for transfer in exchanged(plan)}) <= 4


def test_replicas_need_no_message() -> None:
    job = Job(list(range(4)))
    layout = PlacementLayout(MeshShape((2, 2), (0, 1, 2, 3)), (Replicated(), Sharded(0)))
    for number in range(5):
        job.tensors["model", f"t{number}"] = torch.zeros(1001, 1001)
        job.held["model", f"t{number}"] = dict.fromkeys(range(4), layout)
    spec = job.membership()
    plans = [plan_save(spec, rank, 5 * 10**9, (0, 0, 1, 1)) for rank in range(4)]
    # Rank 0 receives the bytes next to a header from no one: its own host holds them, too.
    assert not any(exchanged(plan) for plan in plans)


def test_a_transfer_is_cut_out_of_the_ranges_that_it_overlaps() -> None:
    ranges = [FileRange(0, 0, 10, 0, 0, 100), FileRange(1, 0, 10, 5, 0, 110), FileRange(2, 0, 4, 0, 1, 0)]
    transfer = CellTransfer(0, 104, 113, 3)
    kept, cut = cut_out(ranges, [transfer])
    assert kept == [ranges[0].slice_bytes(0, 4), ranges[1].slice_bytes(3, 7), ranges[2]]
    assert cut == [(transfer, [ranges[0].slice_bytes(4, 6), ranges[1].slice_bytes(0, 3)])]
