"""A counter of the steps of optimizers, which tells whether a state has changed since it was complete."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer

from rankless.state.optimizer.adapters import optimizer_components


class OptimizerStepCounter:
    """Counts the steps of all optimizers that were passed to a save, by hooks that are removed with the counter."""

    def __init__(self, optimizer: Any) -> None:
        self.steps = 0
        counter = weakref.ref(self)

        def count_step(*_: Any) -> None:
            if (living := counter()) is not None:
                living.steps += 1

        parts = [part for group in optimizer_components(optimizer).values() for part in group]
        handles = [part.register_step_post_hook(count_step) for part in parts if isinstance(part, Optimizer)]
        for handle in handles:
            weakref.finalize(self, handle.remove)
