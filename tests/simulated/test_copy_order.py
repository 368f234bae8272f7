"""Tests that copies come after what the caller has enqueued, and before what it enqueues next.

Each is run in several orders that a device may take. What a copy must contain is known from copies that the device
itself makes, on the caller's stream. For each wait in ``src`` one of these tests fails if it is taken out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import rankless
from rankless.dcp import FileSystemReader, FileSystemWriter
from rankless.engine.integrity.replica_comparison import digest_replicas
from rankless.engine.io.tensor_bytes import TensorBytes
from rankless.engine.plan.save_plan import ReplicatedShard
from tests.helpers.device_training import Training, find_differences, read_saved
from tests.helpers.fake_http import BUCKET
from tests.helpers.fake_s3 import FakeS3, store_at
from tests.helpers.pairwise import first_of
from tests.helpers.simulated.streams import (
    DEFAULT,
    SCHEDULER,
    Order,
    Stream,
    StreamContext,
    at_random,
    caller_first,
    copies_first,
    needed_first,
)
from tests.simulated.conftest import DeviceRanks

#: The first two are the most unlike: all copies too late, and all too early.
ORDERS = {
    "caller first": caller_first,
    "copies first": copies_first,
    "random 1": at_random(1),
    "needed first": needed_first,
    **{f"random {seed}": at_random(seed) for seed in (2, 3)},
}
in_every_order = first_of(2, "order", ORDERS.values(), ids=ORDERS)
#: Where a third stream has a part, or the caller is not on the default one.
in_every_order_of_three_streams = first_of(3, "order", ORDERS.values(), ids=ORDERS)


def change_on_another_stream(training: Training) -> None:
    """Change everything at once, on a stream that does not wait for the caller's."""
    with StreamContext(Stream()):
        training.change_all(-1)


def change_next(training: Training) -> None:
    training.change_all(-1)


def change_buffer_next(training: Training) -> None:
    """Change what no step changes."""
    training.net.statistics.fill_(-1)
    training.net.frozen.data.fill_(-1)


Change = Callable[[Training], None]


def save_and_change(path: str, order: Order, options: dict[str, str], change: Change) -> list[str]:
    """Save after changes that the device has not made yet, and go on at once."""
    training = Training("sim")
    SCHEDULER.run_all()
    SCHEDULER.order = order
    for number in range(3):
        training.change_all(number + 1)
        expected = training.copies()
        SCHEDULER.saves_go_on.clear()
        save = rankless.save_checkpoint(
            path, f"s{number}", training.net, training.optimizer, async_save=True, **options
        )
        change(training)
        SCHEDULER.saves_go_on.set()
        save.wait()
        if different := find_differences(read_saved(Path(path) / f"s{number}"), expected):
            return different
    return []


@in_every_order
def test_an_eager_save_has_what_was_enqueued_before_it(device_ranks: DeviceRanks, tmp_path: Path, order: Order) -> None:
    assert device_ranks(1, save_and_change, str(tmp_path), order, {"staging": "eager"}, change_next) == [[]]


@in_every_order_of_three_streams
def test_after_an_eager_save_any_stream_may_change_everything(
    device_ranks: DeviceRanks, tmp_path: Path, order: Order
) -> None:
    options = {"staging": "eager"}
    assert device_ranks(1, save_and_change, str(tmp_path), order, options, change_on_another_stream) == [[]]


@in_every_order
def test_a_step_follows_the_copies_of_an_overlapped_save(
    device_ranks: DeviceRanks, tmp_path: Path, order: Order
) -> None:
    assert device_ranks(1, save_and_change, str(tmp_path), order, {"staging": "overlapped"}, Training.step) == [[]]


@in_every_order
def test_what_no_step_changes_may_change_right_after_an_overlapped_save(
    device_ranks: DeviceRanks, tmp_path: Path, order: Order
) -> None:
    options = {"staging": "overlapped"}
    assert device_ranks(1, save_and_change, str(tmp_path), order, options, change_buffer_next) == [[]]


@in_every_order_of_three_streams
def test_with_a_full_check_any_stream_may_change_everything(
    device_ranks: DeviceRanks, tmp_path: Path, order: Order
) -> None:
    options = {"staging": "overlapped", "staging_check": "full"}
    assert device_ranks(1, save_and_change, str(tmp_path), order, options, change_on_another_stream) == [[]]


def tear(path: str, after: float) -> None:
    """Change everything on another stream when a part is made of the copies that follow the first samples."""
    model = torch.nn.Linear(30, 30).to("sim")
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    SCHEDULER.run_all()
    other = Stream()
    SCHEDULER.saves_go_on.clear()
    save = rankless.save_checkpoint(path, "s", model, optimizer, async_save=True, staging="overlapped")
    with StreamContext(other):
        for parameter in model.parameters():
            parameter.data.fill_(-1)
    (copies,) = (stream for stream in SCHEDULER.streams if stream.queue and stream not in {other, DEFAULT})
    first, last = (number for number, entry in enumerate(copies.queue) if entry.mark is not None)
    assert (last - first - 1) % 2 == 0
    left = len(copies.queue) - first - 1 - round(after * (last - first - 1))

    def change_in_between(ready: Sequence[Stream]) -> Stream:
        chosen = other if len(copies.queue) <= left else copies
        return chosen if chosen in ready else ready[0]

    SCHEDULER.order = change_in_between
    SCHEDULER.saves_go_on.set()
    save.wait()


@pytest.mark.parametrize("after", [0, 1 / 2], ids=["before the copies", "after the copies"])
def test_a_change_on_another_stream_while_copies_are_made_is_noticed(
    device_ranks: DeviceRanks, tmp_path: Path, after: float
) -> None:
    (error,) = device_ranks.outcomes(1, tear, str(tmp_path), after)
    assert isinstance(error, rankless.TornSnapshotError)
    assert "changed while it was copied" in str(error)
    assert not list(tmp_path.glob("s"))


def change_without_step(path: str) -> None:
    """Change everything right after the call on the caller's stream, but not in a step, as a graph may."""
    training = Training("sim")
    SCHEDULER.run_all()
    SCHEDULER.order = caller_first
    SCHEDULER.saves_go_on.clear()
    save = rankless.save_checkpoint(path, "s", training.net, training.optimizer, async_save=True, staging="overlapped")
    training.change_all(-1)
    SCHEDULER.saves_go_on.set()
    save.wait()


def test_a_change_by_the_caller_before_the_copies_are_made_is_noticed(
    device_ranks: DeviceRanks, tmp_path: Path
) -> None:
    (error,) = device_ranks.outcomes(1, change_without_step, str(tmp_path))
    assert isinstance(error, rankless.TornSnapshotError)


def save_at_once(path: str, order: Order) -> list[str]:
    training = Training("sim")
    SCHEDULER.run_all()
    SCHEDULER.order = order
    training.change_all(1)
    expected = training.copies()
    rankless.save_checkpoint(path, "s", training.net, training.optimizer)
    return find_differences(read_saved(Path(path) / "s"), expected)


@in_every_order
def test_a_synchronous_save_has_what_was_enqueued_before_it(
    device_ranks: DeviceRanks, tmp_path: Path, order: Order
) -> None:
    assert device_ranks(1, save_at_once, str(tmp_path), order) == [[]]


def save_on_own_stream(path: str, order: Order) -> list[str]:
    """The current stream of the caller is not the default one."""
    with StreamContext(Stream()):
        return save_and_change(path, order, {"staging": "overlapped"}, Training.step)


@in_every_order_of_three_streams
def test_the_caller_may_use_a_stream_of_its_own(device_ranks: DeviceRanks, tmp_path: Path, order: Order) -> None:
    assert device_ranks(1, save_on_own_stream, str(tmp_path), order) == [[]]


def save_into_tier(path: str, order: Order) -> list[str]:
    """The devices copy into the memory of a local tier."""
    training = Training("sim")
    SCHEDULER.run_all()
    SCHEDULER.order = order
    tier = rankless.LocalTier(f"{path}/tier", drain_every=1)
    with rankless.RunDirectory(f"{path}/run", local=tier, async_save=True, staging="overlapped") as directory:
        for number in range(3):
            training.change_all(number + 1)
            expected = training.copies()
            SCHEDULER.saves_go_on.clear()
            save = directory.save(f"s{number}", training.net, training.optimizer)
            training.step()
            SCHEDULER.saves_go_on.set()
            save.wait()
            if different := find_differences(read_saved(Path(path) / f"run/s{number}"), expected):
                return different
    return []


@in_every_order
def test_a_step_follows_the_copies_into_a_local_tier(device_ranks: DeviceRanks, tmp_path: Path, order: Order) -> None:
    assert device_ranks(1, save_into_tier, str(tmp_path), order) == [[]]


def load_and_compute(path: str, order: Order) -> list[str]:
    """Load over changes that the device has not made yet, and compute with what was loaded at once."""
    saved, training = Training("cpu"), Training("sim")
    saved.change_all(4)
    rankless.save_checkpoint(path, "s", saved.net, saved.optimizer)
    SCHEDULER.run_all()
    SCHEDULER.order = order
    training.change_all(-1)
    rankless.load_checkpoint(path, model=training.net, optimizer=training.optimizer)
    seen = training.copies()
    return find_differences(seen, saved.tensors()) + find_differences(training.tensors(), saved.tensors())


@in_every_order
def test_a_load_comes_after_what_was_enqueued_before_and_before_what_follows(
    device_ranks: DeviceRanks, tmp_path: Path, order: Order
) -> None:
    assert device_ranks(1, load_and_compute, str(tmp_path), order) == [[]]


def load_much(path: str, order: Order) -> bool:
    """More than all buffers hold, so each is used several times."""
    values = {f"t{number}": torch.randn(3, 2**20) for number in range(12)}
    rankless.save_checkpoint(path, "s", values)
    targets = {name: torch.zeros(3, 2**20, device="sim") for name in values}
    SCHEDULER.order = order
    rankless.load_checkpoint(path, model=targets)
    return all(torch.equal(targets[name].cpu(), values[name]) for name in values)


@pytest.mark.parametrize("order", [needed_first, at_random(1)], ids=["needed first", "random"])
def test_buffers_are_read_into_again_when_they_are_copied(
    device_ranks: DeviceRanks, tmp_path: Path, order: Order
) -> None:
    assert device_ranks(1, load_much, str(tmp_path), order) == [True]


def save_stripes(path: str, order: Order, options: dict[str, str]) -> list[str]:
    """A tensor that is divided by columns, which the ranks exchange during the call."""
    rank = torch.distributed.get_rank()
    shard = torch.zeros(300, 5, device="sim")
    SCHEDULER.run_all()
    SCHEDULER.order = order
    shard.fill_(rank + 1)
    whole = DTensor.from_local(shard, DeviceMesh("sim", [0, 1]), [Shard(1)])
    save = rankless.save_checkpoint(path, "s", {"w": whole}, **options)
    shard.fill_(-1)
    save.wait()
    expected = torch.cat([torch.full((300, 5), 1.0), torch.full((300, 5), 2.0)], 1)
    return find_differences(read_saved(Path(path) / "s"), {"model/w": expected})


@in_every_order
@pytest.mark.parametrize("options", [{}, {"async_save": True}], ids=["synchronous", "eager"])
def test_stripes_have_what_was_enqueued_before_the_save(
    device_ranks: DeviceRanks, tmp_path: Path, order: Order, options: dict[str, str]
) -> None:
    assert device_ranks(2, save_stripes, str(tmp_path), order, options) == [[], []]


def compare_replicas(path: str, order: Order) -> list[str]:
    """Replicas become equal in kernels that have not run when the save begins."""
    training = Training("sim")
    training.change_all(torch.distributed.get_rank())
    SCHEDULER.run_all()
    SCHEDULER.order = order
    for number in range(2):
        training.change_all(7 + number)
        rankless.save_checkpoint(path, f"s{number}", training.net, training.optimizer, async_save=True).wait()
    return find_differences(read_saved(Path(path) / "s1"), training.tensors())


@in_every_order
def test_replicas_are_compared_after_what_was_enqueued(device_ranks: DeviceRanks, tmp_path: Path, order: Order) -> None:
    assert device_ranks(2, compare_replicas, str(tmp_path), order) == [[], []]


def save_diverged(path: str) -> None:
    training = Training("sim")
    training.net.large.data.fill_(torch.distributed.get_rank())
    rankless.save_checkpoint(path, "s", training.net, training.optimizer)


def test_replicas_that_have_diverged_are_named(device_ranks: DeviceRanks, tmp_path: Path) -> None:
    for error in device_ranks.outcomes(2, save_diverged, str(tmp_path)):
        assert isinstance(error, rankless.ReplicaMismatchError)
        assert "'large'" in str(error)


def save_frozen(path: str, order: Order) -> list[str]:
    """A frozen parameter gets its old value back in a kernel that has not run when the save begins."""
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.ones(20_000), requires_grad=False)}).to("sim")
    shared = []
    SCHEDULER.order = order
    for number in range(3):
        model["w"].data.fill_(5)
        rankless.save_checkpoint(path, f"s{number}", model)
        inode = (Path(path) / f"s{number}" / "model" / "model.safetensors").stat().st_ino
        shared.append(inode)
        SCHEDULER.run_all()
        model["w"].data.fill_(6)
        SCHEDULER.run_all()
    return [] if len(set(shared)) == 1 else ["the file was not shared"]


@in_every_order
def test_frozen_parameters_are_compared_after_what_was_enqueued(
    device_ranks: DeviceRanks, tmp_path: Path, order: Order
) -> None:
    assert device_ranks(1, save_frozen, str(tmp_path), order) == [[]]


def copy_between_ranks(order: Order) -> list[str]:
    training = Training("sim")
    SCHEDULER.run_all()
    SCHEDULER.order = order
    is_source = torch.distributed.get_rank() == 0
    training.change_all(3 if is_source else -1)
    expected = training.copies()
    state = {"model": training.net, "optimizer": training.optimizer}
    rankless.copy_state(**state, sources=[0])
    seen = training.copies()
    wanted = {name: torch.full_like(tensor.cpu(), 3) for name, tensor in expected.items()}
    return find_differences(seen, wanted)


@in_every_order
def test_a_copy_between_ranks_comes_after_what_was_enqueued_and_before_what_follows(
    device_ranks: DeviceRanks, order: Order
) -> None:
    assert device_ranks(2, copy_between_ranks, order) == [[], []]


def save_into_store(url: str, order: Order) -> list[str]:
    run = store_at(url, retry_seconds=20.0).path(f"{BUCKET}/run")
    training = Training("sim")
    training.change_all(-1)
    SCHEDULER.run_all()
    SCHEDULER.order = order
    training.change_all(3)
    expected = training.copies()
    rankless.save_checkpoint(run, "s", training.net, training.optimizer)
    blank = Training("sim")
    rankless.load_checkpoint(run, model=blank.net, optimizer=blank.optimizer)
    return find_differences(blank.tensors(), expected)


@in_every_order
def test_a_save_into_an_object_store_has_what_was_enqueued_before_it(device_ranks: DeviceRanks, order: Order) -> None:
    with FakeS3().served() as url:
        assert device_ranks(1, save_into_store, url, order) == [[]]


def save_with_dcp(path: str, order: Order) -> bool:
    """torch writes in threads, of which the current stream is the default one."""
    state = {name: torch.zeros(1000, device="sim") for name in "ab"}
    SCHEDULER.run_all()
    SCHEDULER.order = order
    with StreamContext(Stream()):
        for tensor in state.values():
            tensor.fill_(3)
        writer = FileSystemWriter(path, thread_count=2, single_file_per_rank=False, per_thread_copy_ahead=0)
        dcp.save(state, storage_writer=writer)
    target = {name: torch.zeros(1000) for name in "ab"}
    dcp.load(target, storage_reader=FileSystemReader(path))
    return all(torch.equal(tensor, torch.full((1000,), 3.0)) for tensor in target.values())


@in_every_order
def test_a_save_of_dcp_has_what_was_enqueued_before_it(device_ranks: DeviceRanks, tmp_path: Path, order: Order) -> None:
    assert device_ranks(1, save_with_dcp, str(tmp_path / "dcp"), order) == [True]


def digest_on(device: str) -> bytes:
    """Hash replicas of several sizes, on the CPU or, but for every third, on a device."""
    torch.manual_seed(0)
    sizes = [1, 16, 5000, 3 * 2**20, 7, 9 * 2**20, *range(10, 40)]
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    parts = [TensorBytes(tensor.to(device) if n % 3 else tensor) for n, tensor in enumerate(tensors)]
    replicas = {(0, 1): [ReplicatedShard(number, size) for number, size in enumerate(sizes)]}
    return digest_replicas(SimpleNamespace(tensors=(), replicas=replicas), parts.__getitem__, 0)


def compare_digests() -> bool:
    return digest_on("cpu") == digest_on("sim")


def test_replicas_are_hashed_alike_wherever_they_are(device_ranks: DeviceRanks) -> None:
    assert device_ranks(1, compare_digests) == [True]
