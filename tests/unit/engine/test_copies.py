"""Tests copies between running ranks by the engine alone, against torch's own chunking, in layouts drawn at random."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rankless.engine.io import copy_exchange, strided_bytes
from rankless.engine.io.copy_exchange import CopyExchange
from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.engine.plan import copy_plan
from rankless.engine.plan.copy_plan import CopyPlan, CopyRun, plan_copy, take_runs
from rankless.engine.plan.layout_types import PlacementLayout, Replicated, Sharded
from rankless.errors import RankFailedError, StateError
from rankless.storage.aligned_memory import Bytes
from tests.helpers.examples import examples
from tests.helpers.simulated_io import place_tensor
from tests.helpers.simulated_jobs import Job, Key, jobs, make_job, make_mesh, named_tensors
from tests.helpers.tensors import random_tensor, tensor_bytes
from tests.helpers.thread_ranks import ThreadP2P, Transfer, run_ranks, run_ranks_or_raise


@pytest.fixture
def small_messages() -> Iterator[None]:
    """Make many messages and shares out of few bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_plan, "CHUNK", 48)
        patch.setattr(copy_plan, "MIN_SHARE", 32)
        patch.setattr(strided_bytes, "_MOST_SPAN", 40)
        yield


@dataclass
class SimulatedCopy:
    """A copy from the ranks of one job into those of another; both have their ranks in one process group."""

    before: Job
    after: Job
    in_place: bool = True
    dtypes: dict[Key, torch.dtype] = field(default_factory=dict)
    targets: list[dict[Key, torch.Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.targets = [
            {
                key: place_tensor(self.after.part(key, rank, self._blank(key)), self.in_place)
                for key in self.after.tensors
                if self.after.holds(key, rank)
            }
            for rank in self.after.ranks
        ]

    def _blank(self, key: Key) -> torch.Tensor:
        tensor = self.after.tensors[key]
        blank = random_tensor(tensor.shape, tensor.dtype, seed=99)
        return blank.to(self.dtypes.get(key, tensor.dtype))

    @property
    def size(self) -> int:
        return max(len(self.before.ranks), len(self.after.ranks))

    def plan(self, rank: int) -> CopyPlan:
        held, requested = ({(t.group, t.name): t for t in job.membership().iter_tensors()} for job in self.jobs)
        return plan_copy(held, requested, rank)

    @property
    def jobs(self) -> tuple[Job, Job]:
        return self.before, self.after

    def run(self, rank: int, p2p: ThreadP2P) -> CopyPlan:
        plan = self.plan(rank)
        parts = {
            key: place_tensor(self.before.part(key, rank), self.in_place)
            for key in self.before.tensors
            if rank in self.before.ranks and self.before.holds(key, rank)
        }

        def source_of(number: int) -> TensorBytes:
            return TensorBytes(parts[plan.tensors[number]])

        def target_of(number: int) -> TensorBytes:
            key = plan.tensors[number]
            return TensorBytes(self.targets[rank][key], self.before.tensors[key].dtype)

        exchange = CopyExchange(plan, source_of, target_of, self.size)
        exchange.copy_local()
        exchange.exchange(p2p)
        return plan

    def run_all(self) -> list[CopyPlan]:
        return run_ranks_or_raise(self.size, self.run)

    def assert_filled(self) -> None:
        for rank in self.after.ranks:
            for key, target in self.targets[rank].items():
                expected = self.after.part(key, rank).to(target.dtype)
                assert tensor_bytes(target) == tensor_bytes(expected), key

    def bytes_to_move(self, rank: int) -> tuple[int, int]:
        """The bytes that a rank lacks, and those of buffers, which it may have to get although it has them."""
        lacking = buffers = 0
        for key in self.targets[rank] if rank in self.after.ranks else ():
            tensor = self.after.tensors[key]
            elements = torch.arange(tensor.numel()).view(tensor.shape)
            wanted = set(self.after.part(key, rank, elements).flatten().tolist())
            if key in self.before.buffers:
                buffers += len(wanted) * tensor.dtype.itemsize
            elif rank in self.before.ranks and self.before.holds(key, rank):
                own = set(self.before.part(key, rank, elements).flatten().tolist())
                lacking += len(wanted - own) * tensor.dtype.itemsize
            else:
                lacking += len(wanted) * tensor.dtype.itemsize
        return lacking, buffers


def shift_ranks(job: Job, count: int) -> Job:
    """The same job after ``count`` ranks that have nothing to do with it."""
    held = {key: {rank + count: layout for rank, layout in layouts.items()} for key, layouts in job.held.items()}
    return Job([*range(100, 100 + count), *job.global_ranks], job.tensors, held, job.buffers)


@st.composite
def copies(draw: st.DrawFn) -> tuple[Job, Job]:
    """A job, and another one over other, overlapping or the same ranks that gets some of its tensors."""
    chosen = draw(named_tensors())
    kept = draw(st.lists(st.sampled_from(sorted(chosen)), min_size=1, unique=True))
    after = draw(jobs({key: chosen[key] for key in kept}))
    return draw(jobs(chosen)), shift_ranks(after, draw(st.integers(0, 3)))


@pytest.mark.usefixtures("small_messages")
@given(copies(), st.booleans())
@settings(max_examples=examples(150))
def test_any_layout_is_copied_into_any_other_and_nothing_is_sent_twice(case: tuple[Job, Job], in_place: bool) -> None:
    copy = SimulatedCopy(*case, in_place)
    plans = copy.run_all()
    copy.assert_filled()
    for rank, plan in enumerate(plans):
        lacking, buffers = copy.bytes_to_move(rank)
        received = sum(run.nbytes for runs in plan.received.values() for run in runs)
        assert lacking <= received <= lacking + buffers
        assert all(len(holders) > 1 and rank in holders for holders in plan.replicas)
        for sender, runs in plan.received.items():
            assert runs == plans[sender].sent[rank]


@pytest.mark.usefixtures("small_messages")
@pytest.mark.parametrize("in_place", [True, False])
def test_values_are_cast_into_another_dtype(in_place: bool) -> None:
    tensor = torch.randn(12, 10, generator=torch.Generator().manual_seed(0))
    before, after = (
        make_job(tensor, 4, PlacementLayout(make_mesh(2, 2), chosen))
        for chosen in ((Sharded(0), Sharded(1)), (Sharded(1), Replicated()))
    )
    copy = SimulatedCopy(before, after, in_place, {("model", "w"): torch.bfloat16})
    copy.run_all()
    copy.assert_filled()


def test_holders_send_equal_shares_and_every_one_sends() -> None:
    before = make_job(random_tensor((1000, 1000), torch.float32), 3)
    after = shift_ranks(make_job(before.tensors["model", "w"], 2), 3)
    copy = SimulatedCopy(before, after)
    plans = copy.run_all()
    copy.assert_filled()
    for rank in (0, 1, 2):
        sent = {peer: sum(run.nbytes for run in runs) for peer, runs in plans[rank].sent.items()}
        assert sent.keys() == {3, 4}
        assert all(abs(nbytes - 4_000_000 / 3) < 32 for nbytes in sent.values())


def test_the_plan_of_narrow_shards_is_short() -> None:
    """A million short ranges are a few runs: a plan must not take more memory than the messages."""
    before, after = (
        make_job(torch.empty(2**17, 16, dtype=torch.uint8), 8, PlacementLayout(make_mesh(8), (Sharded(dim),)))
        for dim in (1, 0)
    )
    plan = SimulatedCopy(before, after).plan(0)
    assert {len(runs) for runs in (*plan.sent.values(), *plan.received.values(), plan.local)} == {1}
    assert sum(run.nbytes for runs in plan.received.values() for run in runs) == 2**18 * 7 // 8


def test_a_shard_that_no_source_holds_is_an_error_that_names_the_tensor_and_its_rank() -> None:
    layout = PlacementLayout(make_mesh(3), (Sharded(0),))
    before = make_job(torch.zeros(9), 3, layout)
    del before.held["model", "w"][1]
    after = make_job(torch.zeros(9), 3)
    held = {(t.group, t.name): t for t in replace(before.membership(), is_partial=True).iter_tensors()}
    requested = {(t.group, t.name): t for t in after.membership().iter_tensors()}
    with pytest.raises(StateError, match=r"rank 0 needs a shard of model tensor 'w' .*it was on rank 1"):
        plan_copy(held, requested, 0)


runs = st.builds(
    lambda size, number, gap: CopyRun(0, 0, 0, size, number, size + gap, size),
    st.integers(1, 90),
    st.integers(1, 9),
    st.integers(0, 9),
)


def bytes_of(taken: list[CopyRun]) -> list[tuple[int, int]]:
    """Every byte that runs move: where it is in the source, and in the target."""
    return [
        (run.source + piece * run.source_step + byte, run.target + piece * run.target_step + byte)
        for run in taken
        for piece in range(run.number)
        for byte in range(run.size)
    ]


@given(st.lists(runs, max_size=5), st.integers(16, 200))
def test_runs_are_cut_into_parts_that_have_all_their_bytes(given_runs: list[CopyRun], limit: int) -> None:
    pending, parts = deque(given_runs), []
    while pending:
        part = take_runs(pending, limit)
        assert 0 < sum(run.nbytes for run in part) <= limit
        parts += part
    assert bytes_of(parts) == bytes_of(given_runs)


class ChangingP2P(ThreadP2P):
    """A network that changes a bit of what rank 0 sends."""

    def send(self, data: Bytes, to: int) -> Transfer:
        if self.rank == 0 and len(data) > 16:
            data = data.copy()
            data[5] ^= 1
        return super().send(data, to)


def test_bytes_that_change_on_their_way_are_an_error_that_names_tensor_and_rank() -> None:
    before = make_job(random_tensor((64, 64), torch.float32), 1)
    copy = SimulatedCopy(before, shift_ranks(make_job(before.tensors["model", "w"], 1), 1))
    outcomes = run_ranks(2, lambda rank, p2p: copy.run(rank, ChangingP2P(rank, p2p._network)))
    assert outcomes[0].error is None
    assert isinstance(outcomes[1].error, RankFailedError)
    assert "model tensor 'w'" in str(outcomes[1].error)
    assert "rank 0 sent to rank 1" in str(outcomes[1].error)


def test_few_messages_are_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    before = make_job(random_tensor((2**20,), torch.float32), 1)
    copy = SimulatedCopy(before, shift_ranks(make_job(before.tensors["model", "w"], 1), 1), in_place=False)
    monkeypatch.setattr(copy_plan, "CHUNK", 2**12)
    largest = 0
    begin = CopyExchange._begin

    def counted(exchange: CopyExchange, *arguments: object) -> object:
        nonlocal largest
        begun = begin(exchange, *arguments)
        largest = max(largest, sum(len(message.data) for message in exchange._in_flight) + len(begun.data))
        return begun

    monkeypatch.setattr(CopyExchange, "_begin", counted)
    copy.run_all()
    copy.assert_filled()
    assert largest <= copy_exchange._IN_FLIGHT * 2**12
