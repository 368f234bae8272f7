"""The request to save one component.

:mod:`rankless.components.component_calls` makes one on each rank, and the vote "looking at what to save" compares and
checks it. An argument that files or votes depend on must be in :meth:`ComponentRequest.describe_call`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from rankless.components.file_or_folder import Layout
from rankless.components.stored_component import MODEL, OPTIMIZER
from rankless.engine.comm.call_check import CallDescription
from rankless.errors import InvalidArgumentError
from rankless.ondisk.data_files import ADAPTER, ONLY_ADAPTERS
from rankless.state.model import model_traversal as models
from rankless.state.optimizer import adapters
from rankless.state.training import TrainingObjects


class SavedTo(Protocol):
    """The place that a component is saved to.

    It is a :class:`~rankless.components.destination.Destination`, or a directory of published weights.
    """

    @property
    def path(self) -> Path:
        """The path, which is equal on all ranks."""

    def check_replaceable(self) -> None:
        """Raise an error if nothing can be saved there. Rank 0 calls it in the vote "looking at what to save"."""


@dataclass(frozen=True)
class ComponentRequest:
    """The arguments of a save of one component.

    ``training`` has the component. ``layout`` lays it out in files, and ``format_text`` describes that layout.
    ``prefix`` is put before names. ``async_save``: the call returns when the component is copied.
    """

    destination: SavedTo
    training: TrainingObjects
    layout: Layout
    format_text: str
    prefix: str = ""
    async_save: bool = False

    @property
    def kind(self) -> str:
        """The kind of the component: ``"model"``, ``"optimizer"``, or ``"adapter"`` for the adapters of a model."""
        if self.training.model is None:
            return OPTIMIZER
        return ADAPTER if self.training.adapters == ONLY_ADAPTERS else MODEL

    def describe_call(self) -> CallDescription:
        """Return the arguments that must be equal on all ranks."""
        arguments = {
            "the path": repr(str(self.destination.path)),
            "the prefix": repr(self.prefix),
            "the format of the files": self.format_text,
            "state_dict_hooks": str(self.training.state_dict_hooks),
            "async_save": str(bool(self.async_save)),
            "the source of parameter names": "a model" if self.training.naming_model is not None else "nothing",
        }
        if self.kind == OPTIMIZER and self.training.naming_model is None:
            arguments["the optimizer's parameters, known by their positions without model="] = _shapes_by_position(
                self.training
            )
        subject = {MODEL: "a model", ADAPTER: "the adapters of a model", OPTIMIZER: "an optimizer"}[self.kind]
        return CallDescription(f"save of {subject}", arguments)

    def check_arguments(self) -> None:
        """Raise ``InvalidArgumentError`` if the training objects are not exactly one component.

        Each rank calls it in the vote "looking at what to save".
        """
        slots = models.model_components(self.training.model) or adapters.optimizer_components(self.training.optimizer)
        kind = OPTIMIZER if self.training.model is None else MODEL
        if list(slots) != [kind]:
            raise InvalidArgumentError(f"pass one {kind}, not a dict of several: they are saved one at a time")

    def check_destination(self) -> None:
        """Raise ``InvalidArgumentError`` if the destination exists and cannot be replaced.

        Rank 0 calls it in the vote "looking at what to save".
        """
        self.destination.check_replaceable()

    def packing_key(self) -> bytes:
        """Return all that determines, besides the tensors, which file holds which tensor."""
        return self.format_text.encode()


def _shapes_by_position(training: TrainingObjects) -> str:
    """Return the shapes of unnamed parameters: ranks must not mix different parameters that have one position."""
    return ", ".join(str(list(shape)) for shape in _unnamed_shapes(adapters.optimizer_components(training.optimizer)))


def _unnamed_shapes(slots: Mapping[str, Sequence[Any]]) -> Iterator[torch.Size]:
    optimizers = (item for items in slots.values() for item in items if isinstance(item, torch.optim.Optimizer))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if "param_names" not in group:
                yield from (parameter.shape for parameter in group["params"])
