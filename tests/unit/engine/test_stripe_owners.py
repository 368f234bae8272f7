"""Tests which rank owns a stripe: all that plan a save or a load must name the same one."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
from hypothesis import given, settings

from rankless.engine.plan import stripes
from rankless.engine.plan.file_ranges import FileRange
from rankless.engine.plan.global_spec import GlobalTensor
from rankless.engine.plan.layout_types import MeshShape, PlacementLayout, Sharded
from rankless.engine.plan.stripe_owners import RemoteStripe, StripeRoutes, is_striped
from rankless.engine.plan.tensor_writers import ShardWriters
from rankless.ondisk.data_files import TensorInfo
from tests.helpers.simulated_jobs import Job, jobs

Range = tuple[int, int]


@pytest.fixture
def small_stripes() -> Iterator[None]:
    with mock.patch.object(stripes, "STRIPE", 64), mock.patch.object(stripes, "NARROW", 40):
        yield


def stripe_owners(tensors: list[GlobalTensor], ranks: int) -> list[dict[Range, int]]:
    """Return the owner of each stripe of each tensor, on which the plans of all ranks must agree."""
    owners: list[dict[Range, int]] = [{} for _ in tensors]
    for rank in range(ranks):
        routes = StripeRoutes(rank)
        for number, tensor in enumerate(tensors):
            tasks = routes.route_tensor(tensor, lambda start, stop: [FileRange(0, start, stop, 0, 0, 0)])
            for task in tasks:
                (file_range,) = task.file_ranges
                owner = task.owner if isinstance(task, RemoteStripe) else rank
                assert owners[number].setdefault((file_range.start, file_range.stop), owner) == owner
    return owners


@given(jobs())
@settings(max_examples=200, deadline=None)
def test_writers_of_a_stripe_are_its_owner_in_the_plans_of_all_ranks(small_stripes: None, job: Job) -> None:
    striped = {(tensor.group, tensor.name): tensor for tensor in job.membership().iter_tensors() if is_striped(tensor)}
    writers = ShardWriters(striped, lambda *_: ())
    for (key, tensor), owners in zip(striped.items(), stripe_owners([*striped.values()], len(job.ranks)), strict=True):
        expected = [(element_range, (owner,)) for element_range, owner in sorted(owners.items())]
        assert list(writers.iter_writers(key, 0, tensor.info.nbytes)) == expected


def make_columns(name: str, ranks: tuple[int, ...]) -> GlobalTensor:
    """Return a tensor of four stripes of 48 bytes, divided by columns."""
    layout = PlacementLayout(MeshShape((len(ranks),), ranks), (Sharded(1),))
    info = TensorInfo("F32", (8, 6))
    return GlobalTensor("model", name, info, True, ranks, layouts=(layout,), division=layout.division)


def test_ranks_own_stripes_in_turn_over_all_tensors_that_they_hold(small_stripes: None) -> None:
    tensors = [make_columns("a", (0, 1, 2)), make_columns("b", (0, 2)), make_columns("c", (0, 1, 2))]
    owners = [[owner for _, owner in sorted(of_tensor.items())] for of_tensor in stripe_owners(tensors, 3)]
    assert owners == [[0, 1, 2, 0], [0, 2, 0, 2], [1, 2, 0, 1]]
