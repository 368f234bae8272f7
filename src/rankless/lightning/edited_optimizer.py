"""An optimizer with the state that hooks have left in a checkpoint's dict, to be saved in its place.

:mod:`rankless.lightning.dumped_state` calls it on each rank, in the vote "looking at what hooks have changed". The
optimizers of the training must stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rankless.errors import InvalidArgumentError
from rankless.state.model.fsdp1 import uses_fsdp1


def edited_optimizers(
    optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]], model: nn.Module | None
) -> list[Optimizer]:
    """Return copies of optimizers, of the same parameters, with the states of other state dicts.

    Raises ``InvalidArgumentError`` if the state is divided among ranks, or does not fit to the optimizers.
    """
    is_divided = (model is not None and uses_fsdp1(model)) or any(map(_is_divided, optimizers))
    if is_divided or len(states) != len(optimizers):
        raise InvalidArgumentError(
            "a hook or callback has changed checkpoint['optimizer_states'], whose optimizers "
            + ("are divided among ranks" if is_divided else f"are {len(optimizers)}, not {len(states)}")
            + ": change the optimizers, or empty that list to save none, or use checkpoint_format='lightning'"
        )
    return [_with_state(optimizer, states[number], number) for number, optimizer in enumerate(optimizers)]


def _is_divided(optimizer: Optimizer) -> bool:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return hasattr(optimizer, "consolidate_state_dict") or any(isinstance(tensor, DTensor) for tensor in parameters)


def _with_state(optimizer: Optimizer, state: Mapping[str, Any], number: int) -> Optimizer:
    """Return a copy of an optimizer. Its own state and groups are left as they are."""
    edited: Optimizer = object.__new__(type(optimizer))
    edited.__dict__.update(optimizer.__dict__)
    try:
        with torch.no_grad():
            edited.load_state_dict(dict(state))
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(
            f"a hook or callback has changed checkpoint['optimizer_states'][{number}] so that "
            f"{type(optimizer).__name__} does not load it: {error}"
        ) from error
    return edited
