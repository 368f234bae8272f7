"""Synchronization of copies with the work that the caller has enqueued on accelerators.

Kernels run later than the calls that enqueue them, on streams that the caller chooses. Copies run in holdfast's own
threads, and a new thread copies on a stream that waits for none of these. So code that reads or fills tensors first
waits until their devices are done, on all streams. Code that has filled them waits again: a copy into a tensor that is
not contiguous ends in a kernel, for which the caller's streams would not wait.

Events for which the copying threads wait would need less waiting. They have not been tried on a device yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from holdfast.observe.spans import span


class Accelerator(Protocol):
    """The part of ``torch.accelerator`` that is needed."""

    def current_accelerator(self) -> torch.device | None:
        """Return the kind of accelerator that torch was built for."""

    def synchronize(self, device: torch.device, /) -> None:
        """Wait until a device has finished the work on all its streams."""


class HasDevice(Protocol):
    """An object on a device."""

    @property
    def device(self) -> torch.device:
        """The device."""


def synchronize_devices(tensors: Iterable[HasDevice], accelerator: Accelerator = torch.accelerator) -> None:
    """Wait until the accelerators that hold any of the tensors have finished all enqueued work."""
    current = accelerator.current_accelerator()
    if current is None:
        return
    with span("wait for the device", "wait"):
        for device in dict.fromkeys(tensor.device for tensor in tensors):
            if device.type == current.type:  # other devices order their copies by themselves
                accelerator.synchronize(device)
