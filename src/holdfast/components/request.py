"""What a save of one part is asked to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.components.content import MODEL, OPTIMIZER
from holdfast.components.destination import Destination
from holdfast.components.file_layouts import Layout
from holdfast.engine.comm.call_check import CallDescription
from holdfast.errors import InvalidArgumentError
from holdfast.state.model import traversal as models
from holdfast.state.optimizer import adapters
from holdfast.state.training import TrainingObjects


@dataclass(frozen=True)
class ComponentRequest:
    """Where to save, and how it lies there.

    ``training`` has the one part; ``layout`` lays it out in files and ``form`` says how, in words; ``prefix`` goes
    before names.
    """

    place: Destination
    training: TrainingObjects
    layout: Layout
    form: str
    prefix: str = ""

    @property
    def kind(self) -> str:
        """Which part it is."""
        return MODEL if self.training.model is not None else OPTIMIZER

    def asked(self) -> CallDescription:
        """What all ranks must be asked for alike."""
        about = {
            "the path": repr(str(self.place.path)),
            "the prefix": repr(self.prefix),
            "the form of the files": self.form,
            "state_dict_hooks": str(self.training.state_dict_hooks),
            "what names the optimizer's parameters": "a model" if self.training.named_by is not None else "nothing",
        }
        if self.kind == OPTIMIZER and self.training.named_by is None:
            about["the optimizer's parameters, known by their places without model="] = _places(self.training)
        return CallDescription(f"save of {'a model' if self.kind == MODEL else 'an optimizer'}", about)

    def check(self) -> None:
        """Raise ``InvalidArgumentError`` for what is not one part."""
        slots = models.model_components(self.training.model) or adapters.optimizer_components(self.training.optimizer)
        if list(slots) != [self.kind]:
            raise InvalidArgumentError(f"one {self.kind} is saved at a time, not a dict of several")

    def check_place(self) -> None:
        """Raise ``InvalidArgumentError`` where there is something of another kind."""
        self.place.check()

    def packing(self) -> bytes:
        """All that decides, beside the tensors, what lies in which file."""
        return self.form.encode()


def _places(training: TrainingObjects) -> str:
    """The shapes of parameters without names: ranks that hold different ones in one place must not mix them."""
    return ", ".join(str(list(shape)) for shape in _unnamed(adapters.optimizer_components(training.optimizer)))


def _unnamed(slots: Mapping[str, Sequence[Any]]) -> Iterator[torch.Size]:
    for part in (one for parts in slots.values() for one in parts if isinstance(one, torch.optim.Optimizer)):
        for group in part.param_groups:
            if "param_names" not in group:
                yield from (one.shape for one in group["params"])
