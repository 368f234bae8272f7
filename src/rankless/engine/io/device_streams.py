"""The streams that rankless uses for copies on accelerators, and their order with the caller's own kernels.

Kernels run later than the calls that enqueue them, on streams that the caller chooses. As in all of torch, a tensor
that is passed to a call is up to date on the *current stream* of the calling thread. Copies run on a stream of
rankless, one for each device, whichever thread enqueues them. So two orders must be made. First, the copies follow the
kernels that the caller has enqueued before. Second, kernels that the caller enqueues later follow the copies, or the
caller waits for the copies. The caller's thread makes both, because other threads have current streams of their own.

Streams and events come from the module of the device, such as ``torch.cuda`` (also for HIP) or ``torch.xpu``. torch
finds this module for any device, also for one that is written in Python.

Saves, loads, comparisons of replicas and live copies call :func:`begin_copies` on each rank before they copy, in the
thread of the caller.

Each kind of work follows the caller's current streams. It is followed by:

- copies of a save into staging memory, eager: the return of the call; overlapped: the next step of any optimizer, on
  the device;
- overlapped, copies of tensors that something other than a step may change, and the first samples: all that the caller
  enqueues after the call, on the device;
- reads of a synchronous save, of stripes, replicas and frozen tensors, and copies of a load: the return of the call.

The thread that writes files waits for the event of its copies, and a buffer of a load is read into again after the copy
out of it. Captured tensors are kept until they are copied, so torch's allocator needs no ``record_stream``.

The tests have a device that is written in Python (``tests/helpers/simulated``): the process cannot read its memory, and
work runs only when something waits for it, in an order that the test chooses. Each wait above was taken out, and a test
failed. Streams come from ``torch.get_device_module`` for its sake: it has no ``torch.Stream``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from rankless.errors import DeviceError, RanklessError, StateError
from rankless.observe.spans import span

#: The bytes of memory on a device where small and strided shards are gathered. It is kept.
SCRATCH_BYTES = 32 * 2**20


class HasDevice(Protocol):
    """An object on a device."""

    @property
    def device(self) -> torch.device:
        """The device."""


class DeviceEvent(Protocol):
    """A place in a stream."""

    def synchronize(self) -> None:
        """Wait until the device has reached it."""


class CopyStream:
    """The stream of this process for copies from and to a device."""

    def __init__(self, device: torch.device, module: Any) -> None:
        self.device = device
        self._module, self._stream = module, module.Stream(device=device)
        self._lock = threading.Lock()
        self._scratch: torch.Tensor | None = None

    def follow_caller(self) -> None:
        """Let later copies run after the kernels that the calling thread has enqueued on its current stream.

        Raises ``StateError`` if the thread captures a graph there: then nothing of that runs before the graph does.
        """
        with self._used():
            require_no_capture(self.device)
            self._stream.wait_event(self._module.current_stream(self.device).record_event())

    def precede_caller(self, event: DeviceEvent) -> None:
        """Let kernels that the calling thread enqueues later on its current stream run after ``event``.

        A step that is captured does not run now, and a wait for something outside would make its graph invalid.
        """
        with self._used():
            if not _is_capturing(self._module):
                self._module.current_stream(self.device).wait_event(event)

    @contextmanager
    def enqueue(self) -> Iterator[None]:
        """Enqueue on this stream inside the ``with`` block. Only one thread does so at a time: it has the scratch."""
        with self._lock, self._used(), self._module.stream(self._stream):
            yield

    def record_event(self) -> DeviceEvent:
        """Return an event after all copies that are enqueued."""
        with self._used():
            event: DeviceEvent = self._stream.record_event()
            return event

    def wait(self) -> None:
        """Wait until all copies that are enqueued are done."""
        self.wait_for(self.record_event())

    def wait_for(self, event: DeviceEvent) -> None:
        """Wait until the device has reached an event."""
        with self._used():
            event.synchronize()

    @contextmanager
    def _used(self) -> Iterator[None]:
        """Call the device's runtime inside the ``with`` block. Raises ``DeviceError``."""
        with translate_device_errors(self.device), select_device(self.device):
            yield

    @property
    def scratch(self) -> torch.Tensor:
        """Memory on the device, for the thread that enqueues. Copies that are enqueued later may use it again."""
        if self._scratch is None:
            with torch.inference_mode(mode=False):  # or no later save could write to it
                self._scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=self.device)
        return self._scratch


_streams: dict[torch.device, CopyStream | None] = {}
_lock = threading.Lock()


def copy_stream_of(device: torch.device) -> CopyStream | None:
    """Return the stream for copies from and to a device.

    ``None`` if the device has no streams, or torch does not know them: such a device orders its copies by itself.
    """
    with _lock:
        if device not in _streams:
            module = None if device.type == "cpu" else getattr(torch, device.type, None)
            _streams[device] = CopyStream(device, module) if hasattr(module, "Stream") else None
        return _streams[device]


def find_accelerators(tensors: Iterable[HasDevice]) -> Sequence[torch.device]:
    """Return the accelerators that hold any of the tensors."""
    current = torch.accelerator.current_accelerator()
    if current is None:
        return ()
    return [device for device in dict.fromkeys(tensor.device for tensor in tensors) if device.type == current.type]


def find_copy_streams(tensors: Iterable[HasDevice]) -> list[CopyStream]:
    """Return the streams for copies from and to the accelerators that hold any of the tensors."""
    streams = (copy_stream_of(device) for device in find_accelerators(tensors))
    return [stream for stream in streams if stream is not None]


def begin_copies(tensors: Iterable[HasDevice]) -> list[CopyStream]:
    """Let copies from and to tensors follow the caller's kernels so far, and return the streams of these copies.

    Accelerators without streams run everything in one order.
    """
    streams = find_copy_streams(tensors)
    for stream in streams:
        stream.follow_caller()
    return streams


def wait_for_copies(streams: Iterable[CopyStream]) -> None:
    """Wait until no device copies any more, also if some are lost. Raises the first ``DeviceError``."""
    errors = []
    for stream in streams:
        try:
            stream.wait()
        except DeviceError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def synchronize_devices(tensors: Iterable[HasDevice]) -> None:
    """Wait until the tensors are up to date: for the caller's current streams of the accelerators that hold them."""
    for device in find_accelerators(tensors):
        with span("wait for the device", "wait"), translate_device_errors(device):
            if copy_stream_of(device) is None:
                torch.accelerator.synchronize(device)
            else:
                torch.get_device_module(device).current_stream(device).synchronize()


def select_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one of the calling thread inside the ``with`` block.

    The current device of a new thread is the first one. Almost any call would make a context there: half a gigabyte on
    a GPU that belongs to another rank.
    """
    module = torch.get_device_module(device)
    return module.device(device) if hasattr(module, "device") else nullcontext()


def require_no_capture(device: torch.device | str) -> None:
    """Raise ``StateError`` if the calling thread captures a graph on its current stream of the current device."""
    if _is_capturing(torch.get_device_module(device)):
        raise StateError(
            f"the current stream of {device} captures a graph, and what is captured has not run: save and load outside "
            "of the capture"
        )


def _is_capturing(module: Any) -> bool:
    return hasattr(module, "is_current_stream_capturing") and module.is_current_stream_capturing()


@contextmanager
def translate_device_errors(device: torch.device) -> Iterator[None]:
    """Raise ``DeviceError`` if torch reports an error of a device inside the ``with`` block."""
    try:
        yield
    except RanklessError:
        raise
    except RuntimeError as error:
        raise DeviceError(
            f"{device} failed while tensors were copied from or to it, or a kernel before that did: {error}. "
            "If it cannot be used any more, start this process again"
        ) from error
