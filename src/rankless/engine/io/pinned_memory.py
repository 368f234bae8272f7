"""Pinned host memory: an accelerator copies from and to it by itself, at the full rate of its connection.

Buffers keep their large pages: memory that exists is registered with the accelerator's runtime. It is registered once,
and until it is freed.

Staging, windows, and the buffers of writes and of loads are pinned through :func:`pin_for`, on each rank for its own
devices. Without an accelerator nothing is done. Memory must be unregistered before it is freed.

If memory cannot be pinned, a warning says how much, and the call of a save waits for copies into pageable memory.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from rankless.engine.io.device_streams import CopyStream, select_device
from rankless.observe.units import format_size
from rankless.observe.warning import warn_caller
from rankless.storage.aligned_memory import Bytes

#: CUDA's ``cudaHostRegisterPortable``: the memory is pinned for all devices of the process.
_PORTABLE = 1


class PinnedMemory:
    """The registered memory of this process.

    It has no lock: memory may be freed, and then forgotten, by the garbage collector at any point of any thread. Two
    threads never have the same buffer.
    """

    def __init__(self) -> None:
        #: By address, whether the memory is registered.
        self._known: dict[int, bool] = {}
        self._has_warned = False

    def pin(self, buffer: Bytes, device: torch.device) -> None:
        """Register the memory that a buffer is a part of. If that fails, warn once: copies are slower then."""
        memory = _whole_memory(buffer)
        address, nbytes = memory.ctypes.data, memory.nbytes
        if not nbytes or address in self._known:
            return
        runtime = _find_runtime(device)
        self._known[address] = runtime is not None  # until it is known: an interrupt may follow the registration
        # The memory is mapped until after this call: the array refers to its mapping.
        weakref.finalize(memory, partial(self._forget, address, runtime, device, os.getpid())).atexit = False
        with select_device(device):
            is_pinned = self._known[address] = runtime is not None and _register(runtime, address, nbytes, device)
        if is_pinned or self._has_warned:
            return
        self._has_warned = True
        reason = "memory, or on a few systems the limit of locked memory (ulimit -l), may be too small"
        if runtime is None:
            reason = f"memory cannot be registered for {device.type}"
        warn_caller(
            f"{format_size(nbytes)} of memory ({nbytes:,} bytes) could not be pinned, so copies from and to {device} "
            f"are slower, and the call waits for them: {reason}"
        )

    def _forget(self, address: int, runtime: Any, device: torch.device, process: int) -> None:
        # A forked process has the memory, but not the device.
        if os.getpid() == process and self._known.pop(address, False):
            with suppress(RuntimeError), select_device(device):  # the device is lost
                runtime.cudaHostUnregister(address)


def _whole_memory(buffer: Bytes) -> Bytes:
    """Return the array that a buffer is a view of."""
    memory = buffer
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    return memory


def _find_runtime(device: torch.device) -> Any:
    """Return the runtime that can register memory for a device: the CUDA or HIP runtime; otherwise ``None``."""
    module = torch.get_device_module(device)
    return module.cudart() if hasattr(module, "cudart") else None


def _register(runtime: Any, address: int, nbytes: int, device: torch.device) -> bool:
    if int(runtime.cudaHostRegister(address, nbytes, _PORTABLE)) == int(runtime.cudaError.success):
        return True
    with suppress(RuntimeError):  # CUDA reports the failure to the next kernel, too: this one
        torch.empty(1, dtype=torch.uint8, device=device).zero_()
    return False


_memory = PinnedMemory()


def pin_for(streams: Sequence[CopyStream], buffer: Bytes) -> Bytes:
    """Pin a buffer if bytes are copied from or to accelerators, and return it."""
    if streams:
        _memory.pin(buffer, streams[0].device)
    return buffer
