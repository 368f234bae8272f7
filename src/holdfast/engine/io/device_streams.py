"""Order between copies of ours and what the caller has enqueued on accelerators.

Kernels run later than the calls that enqueue them, on streams of the caller's choice. Copies run in threads of ours,
and a thread that is new copies on a stream that waits for none of those. So whatever reads or fills tensors first lets
their devices finish, on all streams; and what has filled them does so again, as a copy into a tensor that is not
contiguous ends in a kernel, which the caller's streams would not wait for.

Events that the copying threads wait for would do with less waiting. They have yet to be tried on a device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch


class Accelerator(Protocol):
    """The part of ``torch.accelerator`` that is needed."""

    def current_accelerator(self) -> torch.device | None:
        """The kind of accelerator that torch was built for."""

    def synchronize(self, device: torch.device, /) -> None:
        """Wait until a device has done what is enqueued on any of its streams."""


class OnDevice(Protocol):
    """Something that lies on a device."""

    @property
    def device(self) -> torch.device:
        """Which."""


def synchronize_devices(tensors: Iterable[OnDevice], accelerator: Accelerator = torch.accelerator) -> None:
    """Wait until the accelerators that hold any of the tensors have done all that is enqueued on them."""
    known = accelerator.current_accelerator()
    if known is None:
        return
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        if device.type == known.type:  # others order their copies by themselves
            accelerator.synchronize(device)
