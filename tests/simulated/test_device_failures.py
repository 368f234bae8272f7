"""Tests that a device which is lost during a copy fails the call on all ranks, and that nothing is published."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import rankless
from tests.helpers.device_training import Training
from tests.helpers.pairwise import each_value, first_of
from tests.helpers.simulated.streams import DEFAULT, SCHEDULER
from tests.simulated.conftest import DeviceRanks

OPTIONS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "eager": {"async_save": True, "staging": "eager"},
    "overlapped": {"async_save": True, "staging": "overlapped"},
}


def lose_device(path: str, options: dict[str, Any], entries: int) -> None:
    """Save while the device of rank 1 stops after a number of entries."""
    training = Training("sim")
    SCHEDULER.run_all()
    dist.barrier()
    if dist.get_rank() == 1:
        SCHEDULER.lost_after = entries
    try:
        rankless.save_checkpoint(path, "s", training.net, training.optimizer, timeout=20, **options).wait()
    finally:
        SCHEDULER.lost_after = None


@each_value({"entries": [0, 1, 5, 20], "kind": OPTIONS})
def test_a_device_lost_during_a_save_fails_it_on_all_ranks(
    device_ranks: DeviceRanks, tmp_path: Path, kind: str, entries: int
) -> None:
    for error in device_ranks.outcomes(2, lose_device, str(tmp_path), OPTIONS[kind], entries):
        assert isinstance(error, rankless.DeviceError), repr(error)
        assert "sim:0 failed while tensors were copied" in str(error)
    assert not list(tmp_path.glob("s"))


def lose_device_in_load(path: str, entries: int) -> None:
    training = Training("sim")
    rankless.save_checkpoint(path, "s", training.net, training.optimizer)
    SCHEDULER.run_all()
    dist.barrier()
    if dist.get_rank() == 1:
        SCHEDULER.lost_after = entries
    try:
        rankless.load_checkpoint(path, model=training.net, optimizer=training.optimizer, timeout=20)
    finally:
        SCHEDULER.lost_after = None


@first_of(2, "entries", [0, 5, 1, 20])
def test_a_device_lost_during_a_load_fails_it_on_all_ranks(
    device_ranks: DeviceRanks, tmp_path: Path, entries: int
) -> None:
    for error in device_ranks.outcomes(2, lose_device_in_load, str(tmp_path), entries):
        assert isinstance(error, rankless.DeviceError), repr(error)


def lose_device_in_exchange(path: str, call: str) -> None:
    """Lose the device of rank 1 while the ranks exchange bytes."""
    state = {"w": DTensor.from_local(torch.zeros(300, 50, device="sim"), DeviceMesh("sim", [0, 1]), [Shard(1)])}
    training = Training("sim")
    if call == "load":
        rankless.save_checkpoint(path, "s", state)
    SCHEDULER.run_all()
    dist.barrier()
    if dist.get_rank() == 1:
        SCHEDULER.lost_after = 0
    try:
        if call == "load":
            rankless.load_checkpoint(path, model=state, share_reads="always", timeout=20)
        elif call == "copy":
            rankless.copy_state(model=training.net, optimizer=training.optimizer, sources=[0], timeout=20)
        else:
            rankless.save_checkpoint(path, "s", state, timeout=20, **OPTIONS[call]).wait()
    finally:
        SCHEDULER.lost_after = None


@pytest.mark.parametrize("call", ["load", "copy", *OPTIONS])
def test_a_device_lost_while_ranks_exchange_bytes_fails_the_call_on_all_ranks(
    device_ranks: DeviceRanks, tmp_path: Path, call: str
) -> None:
    for error in device_ranks.outcomes(2, lose_device_in_exchange, str(tmp_path), call):
        assert isinstance(error, rankless.DeviceError), repr(error)


def count_copies_left() -> int:
    return sum(len(stream.queue) for stream in SCHEDULER.streams if stream is not DEFAULT)


def fail_elsewhere(path: str, options: dict[str, Any]) -> int:
    """Return how much the device still has to copy after a save that has failed on the other rank."""
    shard = torch.zeros(1000, device="sim")
    whole = DTensor.from_local(shard, DeviceMesh("sim", [0, 1]), [Shard(0)])
    SCHEDULER.run_all()
    shard.fill_(1)
    if dist.get_rank() == 1:
        SCHEDULER.lost_after = 0
    try:
        rankless.save_checkpoint(path, "s", {"w": whole}, timeout=20, **options).wait()
    except rankless.DeviceError:
        return count_copies_left()
    finally:
        SCHEDULER.lost_after = None
    raise AssertionError("the device was not lost")


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_save_that_fails_elsewhere_leaves_no_copies_behind(
    device_ranks: DeviceRanks, tmp_path: Path, kind: str
) -> None:
    """Otherwise they would come into memory that others use by then."""
    assert device_ranks(2, fail_elsewhere, str(tmp_path), OPTIONS[kind])[0] == 0


def interrupt_staging(path: str, where: str) -> int:
    training = Training("sim")
    SCHEDULER.run_all()
    training.change_all(1)
    with (
        mock.patch(where, side_effect=KeyboardInterrupt),
        suppress(KeyboardInterrupt),
    ):
        rankless.save_checkpoint(path, "s", training.net, training.optimizer, async_save=True, staging="overlapped")
    return count_copies_left()


@pytest.mark.parametrize("where", ["staging.sample_chunks", "copies_from_device.DeviceCopies.mark"])
def test_a_call_that_is_interrupted_leaves_no_copies_behind(
    device_ranks: DeviceRanks, tmp_path: Path, where: str
) -> None:
    assert device_ranks(1, interrupt_staging, str(tmp_path), f"rankless.engine.io.{where}") == [0]


def test_the_names_of_errors_are_public() -> None:
    assert issubclass(rankless.DeviceError, (rankless.RanklessError, RuntimeError))
