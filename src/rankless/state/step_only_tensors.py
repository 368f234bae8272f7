"""Tensors that only ``optimizer.step()`` modifies: parameters and optimizer states.

A save can copy them in the background until the next step.

:mod:`rankless.save.training_content` asks it on each rank in the call of an overlapped save. A tensor that is wrongly
in the result would be copied while it changes.

Parameters and states of the optimizers of torch that were passed are recognised by their memory. All else may change at
any time: buffers, frozen parameters, averages of weights, values.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.optim import Optimizer

from rankless.state.capture import Capture
from rankless.state.optimizer import adapters
from rankless.state.tensor_subclasses import is_wrapper, iter_inner
from rankless.state.tensor_views import local_tensor


def step_only_tensors(captured: Capture, optimizer: object) -> frozenset[tuple[str, str]]:
    """Return the keys of captured tensors that share memory with parameters and states of the ``optimizer``.

    Buffers and tensors of state dicts are not included: it is unknown when they change.
    """
    addresses = {_storage_address(plain) for tensor in _iterate_tensors(optimizer) for plain in _plain_tensors(tensor)}
    addresses.discard(0)
    buffers = {(tensor.group, tensor.name) for tensor in captured.inventory.build_spec().tensors if not tensor.shared}
    return frozenset(
        key for key, shard in captured.tensors.items() if shard.storage_address in addresses and key not in buffers
    )


def _iterate_tensors(optimizer: object) -> Iterator[torch.Tensor]:
    adapted = (
        adapters.adapt_optimizer(part) for parts in adapters.optimizer_components(optimizer).values() for part in parts
    )
    for live in (adapter.optimizer for adapter in adapted if isinstance(adapter, adapters.TorchOptimizer)):
        if not isinstance(live, Optimizer):
            continue  # no hook tells when a wrapper of another class steps
        for parameter in (parameter for group in live.param_groups for parameter in group["params"]):
            yield parameter
            states = getattr(live, "state", {}).get(parameter, {})
            yield from (state for state in states.values() if isinstance(state, torch.Tensor))


def _plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [inner for _, inner in iter_inner(local_tensor(tensor))] if is_wrapper(tensor) else [tensor]


def _storage_address(tensor: torch.Tensor) -> int:
    return local_tensor(tensor).untyped_storage().data_ptr()
