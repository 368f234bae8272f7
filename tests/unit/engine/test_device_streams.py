"""Tests that tensors in memory are not asked for their devices. Those on devices are tested in ``tests/simulated``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from holdfast.engine.io.device_streams import begin_copies, copy_stream_of, synchronize_devices

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
