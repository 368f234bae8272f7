"""A guard that makes optimizer steps wait for background copies of tensors that a step modifies.

If accelerators copy all of these, the step's kernels wait for that on the device, and the caller does not wait.

:mod:`rankless.save.background` has one for the process. The caller's thread adds a copy before the call of a save
returns, and its next step calls the hook; the background thread sets ``copied``. Loads and live copies wait here before
they change tensors.

The hook is one of all optimizers of torch, so the next step waits whichever it is: fused, foreach, compiled, ZeRO, in
the backward pass. It does not see writes to ``.data``, raw kernels, a CUDA graph that contains the step, or loads by
other libraries: :mod:`rankless.engine.io.torn_snapshot` looks for such changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from threading import Event
from typing import Any

import msgspec
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from rankless.observe.spans import span


class _StateCopy(msgspec.Struct, frozen=True, eq=False):
    """A copy in progress, until ``copied`` is set.

    ``order_step`` lets kernels that the calling thread enqueues next on accelerators follow it; ``None`` if the thread
    must wait.
    """

    copied: Event
    order_step: Callable[[], None] | None

    def precede_step(self) -> None:
        """Let the step that the calling thread begins follow the copy."""
        if self.order_step is None:
            self.copied.wait()
        elif not self.copied.is_set():
            self.order_step()


class StepGuard:
    """The copies in progress in this process. Steps of all its optimizers, and its loads, wait for them."""

    def __init__(self) -> None:
        self._copying: list[_StateCopy] = []
        self._hook: RemovableHandle | None = None
        #: Saves to different paths add their copies, and remove the hook, in different threads.
        self._lock = threading.Lock()

    def add_copy(self, copied: Event, order_step: Callable[[], None] | None = None) -> None:
        """Make every step from now on follow a copy that is done when ``copied`` is set.

        The thread that begins a step calls ``order_step``; if that is ``None``, it waits.

        The caller's thread calls it in the call of an asynchronous save, before it returns: a step may follow at once.
        """
        if copied.is_set():
            return
        with self._lock:
            self._copying.append(_StateCopy(copied, order_step))
            if self._hook is None:
                # For all optimizers: several may share parameters, and some contain other optimizers.
                # torch.compile must not trace the hook. The compiler is imported only if a hook is needed.
                hook = torch.compiler.disable(self._before_step)  # type: ignore[no-untyped-call]
                self._hook = register_optimizer_step_pre_hook(hook)

    def wait(self) -> None:
        """Wait until no copy is in progress.

        Loads and live copies call it in the thread of the caller, before they change anything.
        """
        copying = list(self._copying)
        with span("wait for copies", "wait") if copying else nullcontext():
            for copy in copying:
                copy.copied.wait()
                self._forget(copy)

    def remove_idle_hook(self) -> None:
        """Remove the hook if no copy is in progress.

        Must not be called during a step, because torch iterates over its hooks then.
        """
        with self._lock:
            self._copying = [copy for copy in self._copying if not copy.copied.is_set()]
            if self._hook is not None and not self._copying:
                self._hook.remove()
                self._hook = None

    def forget_copies(self) -> None:
        """Forget all copies. Called in a forked process, which does not have the threads that copy."""
        self._copying, self._lock = [], threading.Lock()  # another thread of the parent may have held the lock

    def _before_step(self, *_: Any) -> None:
        copying = list(self._copying)
        with span("wait for copies", "wait") if copying else nullcontext():
            for copy in copying:
                copy.precede_step()
                if copy.copied.is_set():
                    self._forget(copy)

    def _forget(self, copy: _StateCopy) -> None:
        with self._lock, suppress(ValueError):
            self._copying.remove(copy)
