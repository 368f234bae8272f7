"""Tests of the simulated device itself: it is as late, and as unforgiving, as a real one."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rankless.engine.io.device_streams import copy_stream_of, find_accelerators
from tests.helpers.device_training import Training, find_differences
from tests.helpers.simulated.streams import DEFAULT, SCHEDULER, Event, Stream, StreamContext, caller_first
from tests.simulated.conftest import DeviceRanks


def train(device: str) -> dict[str, torch.Tensor]:
    training = Training(device)
    training.step()
    return {name: tensor.cpu() for name, tensor in training.tensors().items()}


def train_on_both() -> list[str]:
    return find_differences(train("sim"), train("cpu"))


def test_it_computes_what_the_cpu_does(device_ranks: DeviceRanks) -> None:
    assert device_ranks(1, train_on_both) == [[]]


def copy_late() -> list[list[float]]:
    from rankless.storage.aligned_memory import aligned_buffer
    from tests.helpers.simulated.device import RUNTIME

    tensor = torch.zeros(3).to("sim")
    buffer = aligned_buffer(2**21)
    RUNTIME.cudaHostRegister(buffer.ctypes.data, 2**21, 1)
    pinned = torch.from_numpy(buffer[:12]).view(torch.float32)
    pageable = torch.zeros(3)
    tensor.fill_(5)
    pinned.copy_(tensor, non_blocking=True)
    before = pinned.tolist()
    DEFAULT.synchronize()
    after = pinned.tolist()
    tensor.fill_(6)
    pageable.copy_(tensor, non_blocking=True)
    RUNTIME.cudaHostUnregister(buffer.ctypes.data)
    return [before, after, pageable.tolist()]


def test_copies_into_pinned_memory_are_late_and_others_are_not(device_ranks: DeviceRanks) -> None:
    assert device_ranks(1, copy_late) == [[[0.0] * 3, [5.0] * 3, [6.0] * 3]]


def race(waits: bool) -> list[float]:
    SCHEDULER.order = caller_first
    tensor, other = torch.zeros(3).to("sim"), Stream()
    with StreamContext(other):
        copy = tensor.clone()
        copied = Event()
        copied.record()
    if waits:
        DEFAULT.wait_event(copied)
    tensor.fill_(9)
    with StreamContext(other):
        return copy.cpu().tolist()


def test_a_missing_wait_shows_as_wrong_values(device_ranks: DeviceRanks) -> None:
    assert device_ranks(1, race, True) == [[0.0] * 3]
    assert device_ranks(1, race, False) == [[9.0] * 3]


def find_devices() -> list[str]:
    devices = ["sim:1", "cpu", "sim:0", "sim:1", "meta", "xla:0"]
    tensors = [SimpleNamespace(device=torch.device(device)) for device in devices]
    return [*map(str, find_accelerators(tensors)), str(copy_stream_of(torch.device("xla:0")))]


def test_each_accelerator_that_holds_a_tensor_is_found_once(device_ranks: DeviceRanks) -> None:
    assert device_ranks(1, find_devices) == [["sim:1", "sim:0", "None"]]


def read_in_place() -> None:
    tensor = torch.zeros(3).to("sim")
    np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * 12).from_address(tensor.data_ptr())).sum()


def test_its_memory_cannot_be_read_in_place(device_ranks: DeviceRanks) -> None:
    with pytest.raises(EOFError):  # the process is killed
        device_ranks(1, read_in_place)
