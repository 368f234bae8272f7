"""Tests that tensors in memory are not asked for their devices, and of waits for several devices.

Tensors on devices are tested in ``tests/simulated``, where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from rankless.engine.io.copies_from_device import DeviceCopies
from rankless.engine.io.device_read_buffers import DeviceReadBuffers
from rankless.engine.io.device_staging import DeviceStaging
from rankless.engine.io.device_streams import begin_copies, copy_stream_of, synchronize_devices
from rankless.errors import DeviceError

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")


def unasked() -> Iterator[torch.Tensor]:
    raise AssertionError("a tensor was asked for its device")
    yield


def test_without_an_accelerator_no_tensor_is_looked_at() -> None:
    if torch.accelerator.current_accelerator() is None:  # a build of torch for accelerators names one in any case
        assert begin_copies(unasked()) == []
        synchronize_devices(unasked())


@pytest.mark.parametrize("device", ["cpu", "meta", "xla:0"])
def test_devices_without_streams_have_none(device: str) -> None:
    assert copy_stream_of(torch.device(device)) is None


def lost_and_busy() -> tuple[Any, Any]:
    """Return the stream of a device that is lost, and that of one which still copies."""
    lost, busy = mock.Mock(), mock.Mock()
    lost.wait.side_effect = lost.record_event.side_effect = DeviceError("lost")
    return lost, busy


def test_if_one_device_is_lost_the_copies_of_the_others_are_waited_for() -> None:
    lost, busy = lost_and_busy()
    DeviceCopies([lost, busy]).abandon()
    DeviceStaging([lost, busy], mock.Mock()).abandon()
    assert busy.wait.call_count == 2


def test_a_load_waits_for_the_copies_of_all_devices_and_reports_a_lost_one() -> None:
    lost, busy = lost_and_busy()
    with (
        mock.patch("rankless.engine.io.device_read_buffers.pin_for", side_effect=lambda _, buffer: buffer),
        pytest.raises(DeviceError, match="lost"),
        DeviceReadBuffers(mock.Mock(), 2**20, 1, [lost, busy]),
    ):
        pass
    assert busy.wait.call_count == 1
