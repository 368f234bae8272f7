"""The objects of a training run, as the user passes them to a save or a load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.state import scheduler as schedulers
from holdfast.state.model import traversal as models
from holdfast.state.optimizer import adapters


@dataclass(frozen=True)
class TrainingObjects:
    """The objects of a training run, as the user passed them; what is ``None`` is not saved.

    ``named_by`` is a model that is not saved or loaded, and tells the names of the optimizer's parameters. Without
    ``state_dict_hooks`` a model is saved as it is, whatever its hooks would make of it.
    """

    model: Any = None
    optimizer: Any = None
    scheduler: Any = None
    user_content: Any = None
    per_rank_content: Any = None
    stateful: Any = None
    dataloader: Any = None
    rng: bool = True
    named_by: Any = None
    state_dict_hooks: bool = True

    def given(self) -> list[str]:
        """Which were passed, by slot, but for what only one rank needs to pass."""
        return [
            *models.model_components(self.model),
            *adapters.optimizer_components(self.optimizer),
            *schedulers.scheduler_components(self.scheduler),
            *(name for name in ("stateful", "dataloader") if getattr(self, name) is not None),
        ]
