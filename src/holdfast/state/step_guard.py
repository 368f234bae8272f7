"""A guard that makes optimizer steps wait for background copies of tensors that a step modifies."""

from __future__ import annotations

from contextlib import nullcontext
from threading import Event
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from holdfast.observe.spans import span


class StepGuard:
    """The copies in progress in this process. Steps of all its optimizers, and its loads, wait for them."""

    def __init__(self) -> None:
        self._copying: list[Event] = []
        self._hook: RemovableHandle | None = None

    def add_copy(self, copied: Event) -> None:
        """Make every step from now on wait until ``copied`` is set."""
        if copied.is_set():
            return
        self._copying.append(copied)
        if self._hook is None:
            # For all optimizers: several may share parameters, and some contain other optimizers.
            # torch.compile must not trace the hook. The compiler is imported only if a hook is needed.
            self._hook = register_optimizer_step_pre_hook(torch.compiler.disable(self._before_step))  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until no copy is in progress."""
        copying = list(self._copying)
        with span("wait for copies", "wait") if copying else nullcontext():
            for copied in copying:
                copied.wait()
                if copied in self._copying:
                    self._copying.remove(copied)

    def remove_idle_hook(self) -> None:
        """Remove the hook if no copy is in progress.

        Must not be called during a step, because torch iterates over its hooks then.
        """
        self._copying = [copied for copied in self._copying if not copied.is_set()]
        if self._hook is not None and not self._copying:
            self._hook.remove()
            self._hook = None

    def forget_copies(self) -> None:
        """Forget all copies. Called in a forked process, which does not have the threads that copy."""
        self._copying = []

    def _before_step(self, *_: Any) -> None:
        self.wait()
