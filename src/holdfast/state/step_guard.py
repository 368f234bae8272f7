"""Steps of optimizers wait for the copies of saves that are still reading what a step changes."""

from __future__ import annotations

from threading import Event
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


class StepGuard:
    """The copies that a process has under way. Steps of all its optimizers wait for them, and so do its loads."""

    def __init__(self) -> None:
        self._copying: list[Event] = []
        self._hook: RemovableHandle | None = None

    def add(self, copied: Event) -> None:
        """Let every step wait from now on until ``copied`` is set."""
        if copied.is_set():
            return
        self._copying.append(copied)
        if self._hook is None:
            # For all optimizers: several may share parameters, and some have others inside.
            # Compiled code must not go into it; importing the compiler is for those who need it.
            self._hook = register_optimizer_step_pre_hook(torch.compiler.disable(self._before_step))  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until no copy is under way."""
        for copied in list(self._copying):
            copied.wait()
            if copied in self._copying:
                self._copying.remove(copied)

    def remove_idle_hook(self) -> None:
        """Remove the hook if nothing is copied. Not during a step: torch walks through its hooks there."""
        self._copying = [copied for copied in self._copying if not copied.is_set()]
        if self._hook is not None and not self._copying:
            self._hook.remove()
            self._hook = None

    def forget_copies(self) -> None:
        """Wait for nothing any more: in a forked process, which has no threads that copy."""
        self._copying = []

    def _before_step(self, *_: Any) -> None:
        self.wait()
