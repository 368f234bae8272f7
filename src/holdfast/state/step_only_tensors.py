"""What only a step of an optimizer changes: its parameters and their states. Copying them may take until then."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from holdfast.state.capture import Capture
from holdfast.state.optimizer import adapters
from holdfast.state.tensors import local_tensor


def step_only_tensors(captured: Capture, optimizer: object) -> frozenset[tuple[str, str]]:
    """The tensors of a capture in the memory of parameters and states of the ``optimizer`` that was passed.

    Buffers are not among them, nor what a state dict names: nobody can tell what changes that.
    """
    memory = {_memory(tensor) for tensor in _owned(optimizer)} - {0}
    buffers = {(tensor.group, tensor.name) for tensor in captured.inventory.spec().tensors if not tensor.shared}
    return frozenset(key for key, part in captured.parts.items() if part.memory in memory and key not in buffers)


def _owned(optimizer: object) -> Iterator[torch.Tensor]:
    every = (
        adapters.adapt_optimizer(part) for parts in adapters.optimizer_components(optimizer).values() for part in parts
    )
    for live in (one.optimizer for one in every if isinstance(one, adapters.TorchOptimizer)):
        for parameter in (parameter for group in live.param_groups for parameter in group["params"]):
            yield parameter
            yield from (state for state in live.state.get(parameter, {}).values() if isinstance(state, torch.Tensor))


def _memory(tensor: torch.Tensor) -> int:
    return local_tensor(tensor).untyped_storage().data_ptr()
