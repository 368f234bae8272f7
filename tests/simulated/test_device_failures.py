"""Tests that a device which is lost during a copy fails the call on all ranks, and that nothing is published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import holdfast
from tests.helpers.device_training import Training
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
        holdfast.save_checkpoint(path, "s", training.net, training.optimizer, timeout=20, **options).wait()
    finally:
        SCHEDULER.lost_after = None


@pytest.mark.parametrize("entries", [0, 1, 5, 20])
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_device_lost_during_a_save_fails_it_on_all_ranks(
    device_ranks: DeviceRanks, tmp_path: Path, kind: str, entries: int
) -> None:
    for error in device_ranks.outcomes(2, lose_device, str(tmp_path), OPTIONS[kind], entries):
        assert isinstance(error, holdfast.DeviceError), repr(error)
        assert "sim:0 failed while tensors were copied" in str(error)
    assert not list(tmp_path.glob("s"))


def lose_device_in_load(path: str, entries: int) -> None:
    training = Training("sim")
    holdfast.save_checkpoint(path, "s", training.net, training.optimizer)
    SCHEDULER.run_all()
    dist.barrier()
    if dist.get_rank() == 1:
        SCHEDULER.lost_after = entries
    try:
        holdfast.load_checkpoint(path, model=training.net, optimizer=training.optimizer, timeout=20)
    finally:
        SCHEDULER.lost_after = None


@pytest.mark.parametrize("entries", [0, 1, 5, 20])
def test_a_device_lost_during_a_load_fails_it_on_all_ranks(
    device_ranks: DeviceRanks, tmp_path: Path, entries: int
) -> None:
    for error in device_ranks.outcomes(2, lose_device_in_load, str(tmp_path), entries):
        assert isinstance(error, holdfast.DeviceError), repr(error)


def fail_elsewhere(path: str, options: dict[str, Any]) -> int:
    """Return how much the device still has to copy after a save that has failed on the other rank."""
    training = Training("sim")
    training.change_all(1)
    if dist.get_rank() == 1:
        SCHEDULER.lost_after = 0
    try:
        holdfast.save_checkpoint(
            path, "s", training.net, training.optimizer, timeout=20, **options
        ).wait()
    except holdfast.DeviceError:
        return sum(len(stream.queue) for stream in SCHEDULER.streams if stream is not DEFAULT)
    finally:
        SCHEDULER.lost_after = None
    raise AssertionError("the device was not lost")


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_save_that_fails_elsewhere_leaves_no_copies_behind(
    device_ranks: DeviceRanks, tmp_path: Path, kind: str
) -> None:
    """Otherwise they would come into memory that others use by then."""
    assert device_ranks(2, fail_elsewhere, str(tmp_path), OPTIONS[kind])[0] == 0


def test_the_names_of_errors_are_public() -> None:
    assert issubclass(holdfast.DeviceError, (holdfast.HoldfastError, RuntimeError))
