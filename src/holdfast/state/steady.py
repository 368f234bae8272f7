"""What only a step of an optimizer changes: its parameters and their states. Copying them may take until then."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from holdfast.state import sources
from holdfast.state.capture import Capture
from holdfast.state.tensors import local_tensor


def steady(captured: Capture, optimizer: object) -> frozenset[tuple[str, str]]:
    """The tensors of a capture in the memory of parameters and states of the ``optimizer`` that was passed.

    Buffers are not among them, nor what a state dict names: nobody can tell what changes that.
    """
    memory = {_memory(tensor) for tensor in _owned(optimizer)} - {0}
    buffers = {(tensor.group, tensor.name) for tensor in captured.inventory.spec().tensors if not tensor.shared}
    return frozenset(key for key, part in captured.parts.items() if part.memory in memory and key not in buffers)


def _owned(optimizer: object) -> Iterator[torch.Tensor]:
    every = (sources.source(part) for parts in sources.slots(optimizer).values() for part in parts)
    for live in (one.optimizer for one in every if isinstance(one, sources.Live)):
        for parameter in (parameter for group in live.param_groups for parameter in group["params"]):
            yield parameter
            yield from (state for state in live.state.get(parameter, {}).values() if isinstance(state, torch.Tensor))


def _memory(tensor: torch.Tensor) -> int:
    return local_tensor(tensor).untyped_storage().data_ptr()


class StepGuard:
    """Makes the next step of any optimizer wait until a copy has ended."""

    def __init__(self) -> None:
        self._copied: Event | None = None
        self._hook: RemovableHandle | None = None

    def arm(self, copied: Event) -> None:
        """Steps wait for this event from now on."""
        self._copied = copied
        if self._hook is None:
            # For all optimizers: several may share parameters, and some have others inside.
            # Compiled code must not go into it; importing the compiler is for those who need it.
            self._hook = register_optimizer_step_pre_hook(torch.compiler.disable(self._before_step))  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait as a step would."""
        if self._copied is not None:
            self._copied.wait()

    def disarm(self) -> None:
        """Steps wait no more. To be called in the thread that steps: torch walks through its hooks there."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._copied = None

    def _before_step(self, *_: Any) -> None:
        self.wait()
