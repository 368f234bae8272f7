"""The objects of a training run, as the user passes them to a save or a load.

:class:`~rankless.run_directory.RunDirectory`, the components and live copies make one on each rank from the arguments
of a call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rankless.ondisk.data_files import ADAPTER, NO_ADAPTERS, ONLY_ADAPTERS
from rankless.state import scheduler as schedulers
from rankless.state.model import model_traversal as models
from rankless.state.optimizer import adapters


class TrainingObjects(msgspec.Struct, frozen=True):
    """The objects of a training run, as the user passed them. Objects that are ``None`` are not saved.

    ``naming_model`` is a model that is not saved or loaded: it only provides the names of the optimizer's parameters.
    Without ``state_dict_hooks`` a model's tensors are saved under the names that its modules have, whatever its hooks
    do. ``adapters`` is :data:`NO_ADAPTERS`, :data:`WITH_ADAPTERS` or :data:`ONLY_ADAPTERS`. ``frozen_apart``:
    parameters without gradients share no file with other tensors. ``files`` are stored as they are, from rank 0.
    ``dtype``: the dtype, by its name in safetensors files, that floating tensors of the model without a scale are
    cast to; by default none is.
    """

    model: Any = None
    optimizer: Any = None
    scheduler: Any = None
    user_content: Any = None
    per_rank_content: Any = None
    stateful: Any = None
    dataloader: Any = None
    rng: bool = True
    naming_model: Any = None
    state_dict_hooks: bool = True
    frozen_apart: bool = False
    adapters: str = NO_ADAPTERS
    files: Mapping[str, bytes] = msgspec.field(default_factory=dict)
    dtype: str | None = None

    def loader_settings(self) -> tuple[str, str]:
        """Return the ranks that share the data of the loader, and its settings that must be equal on them, as text."""
        members, settings = getattr(self.dataloader, "common_settings", ("", ""))
        return str(members), str(settings)

    def stateful_names(self) -> list[str]:
        """Return the slots of the objects that were passed as ``stateful``."""
        return [f"stateful/{name}" for name in self.stateful] if isinstance(self.stateful, Mapping) else []

    def component_names(self) -> list[str]:
        """Return the slots of the objects that were passed, without those that only one rank needs to pass."""
        model_names = models.model_components(self.model)
        return [
            *([ADAPTER] if model_names and self.adapters == ONLY_ADAPTERS else model_names),
            *adapters.optimizer_components(self.optimizer),
            *schedulers.scheduler_components(self.scheduler),
            *(name for name in ("stateful", "dataloader") if getattr(self, name) is not None),
        ]


def as_loader(dataloader: Any) -> Any:
    """Return the object that has the state of what was passed as ``dataloader``: a group of them, if it is a dict."""
    if not isinstance(dataloader, Mapping):
        return dataloader
    from rankless.state.loader_group import LoaderGroup  # noqa: PLC0415 - few trainings have several

    return LoaderGroup(dataloader)
