"""The state of an engine as rankless saves and loads it.

:mod:`rankless.deepspeed.engine_calls` has one on each rank during a save or load. At its end the engine must be as it
was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import torch
from torch.optim import Optimizer

from rankless.errors import StateError
from rankless.state.model.flat_model import FlatModel


def _do_nothing() -> None:
    pass


@dataclass(frozen=True)
class WeightCopy:
    """The master weights of a parameter on this rank, and the same elements of the weights that the model uses."""

    name: str
    master: torch.Tensor
    weight: torch.Tensor

    def is_equal(self) -> bool:
        """Return whether the weights are the rounded master weights; NaNs count as equal."""
        rounded = self.master.to(self.weight.device, self.weight.dtype)
        return bool(((rounded == self.weight) | (rounded.isnan() & self.weight.isnan())).all())


@dataclass(frozen=True)
class EngineState:
    """The state of an engine. As a context manager it puts the engine back into the state for training at its end.

    Attributes:
        model: The model with the master weights.
        optimizer: The optimizer of torch inside of DeepSpeed's.
        copies: The weights that are computed from the master weights.
        update_weights: Computes these weights again, after the master weights were loaded.
        begin: Prepares the optimizer for a save or a load.
        end: Reverts that.
    """

    model: FlatModel
    optimizer: Optimizer
    copies: Sequence[WeightCopy] = ()
    update_weights: Callable[[], None] = field(default=_do_nothing)
    begin: Callable[[], None] = field(default=_do_nothing)
    end: Callable[[], None] = field(default=_do_nothing)

    def check_weights(self) -> None:
        """Raise ``StateError`` naming a parameter with weights that do not follow from its master weights.

        A save calls it on each rank, in the vote "reading the engine's state".
        """
        for copy in self.copies:
            if not copy.is_equal():
                raise StateError(
                    f"the weights of {copy.name!r} were changed, but not its master weights, with which the optimizer "
                    "would overwrite them: call engine.optimizer.refresh_fp32_params() after changing weights"
                )

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
