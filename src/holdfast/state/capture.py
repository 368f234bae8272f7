"""Everything that one save takes from this rank: tensors with a spec of them, values, companion files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.engine.local import LocalPart
from holdfast.engine.runs import Layout
from holdfast.engine.spec import PER_RANK, Spec, TensorSpec
from holdfast.layout import values
from holdfast.layout.names import check_text
from holdfast.state import model as models
from holdfast.state import optimizer as optimizers
from holdfast.state import rng
from holdfast.state import scheduler as schedulers
from holdfast.state.arrays import ArraysOut
from holdfast.state.tensors import describe

#: Groups of tensors, and so the folders or files that they are in.
MODEL, OPTIMIZER, STATE = "model", "optimizer", "state"


@dataclass(frozen=True)
class Training:
    """The objects of a training run, as the user passed them; what is ``None`` is not saved."""

    model: Any = None
    optimizer: Any = None
    scheduler: Any = None
    user_content: Any = None
    rank_content: Any = None
    rng: bool = True

    def given(self) -> list[str]:
        """Which were passed, but for what only one rank needs to pass."""
        return [name for name in ("model", "optimizer", "scheduler") if getattr(self, name) is not None]


@dataclass
class Capture:
    """What one rank brings to a save. ``small`` are files of values that rank 0 writes, ``own`` this rank's values."""

    layouts: dict[Layout, int] = field(default_factory=dict)
    tensors: list[TensorSpec] = field(default_factory=list)
    tied: dict[str, dict[str, str]] = field(default_factory=dict)
    parts: dict[tuple[str, str], LocalPart] = field(default_factory=dict)
    small: dict[str, bytes] = field(default_factory=dict)
    own: bytes = b"{}"

    def spec(self) -> Spec:
        """The spec of the tensors."""
        return Spec(tuple(self.layouts), tuple(self.tensors), self.tied)

    def add(self, group: str, name: str, tensor: torch.Tensor, *, shared: bool = True) -> None:
        """Take in one tensor."""
        described = describe(tensor, f"{group} tensor {check_text(name, 'a name of a tensor')!r}")
        layout = None if described.layout is None else self.layouts.setdefault(described.layout, len(self.layouts))
        self.tensors.append(TensorSpec(group, name, described.dtype, described.shape, layout, shared))
        self.parts[group, name] = LocalPart(described.local)


def capture(training: Training, rank: int) -> Capture:
    """Look at the training objects. Changes nothing in them.

    Values and what is equal on all ranks are taken from rank 0. Raises ``UnstorableError``,
    ``UnsupportedTensorError``, ``StateError`` or ``InvalidArgumentError``.
    """
    captured = Capture()
    shared: dict[str, Any] = {}
    names = None
    if training.model is not None:
        view = models.view(training.model)
        names = view.name_of_parameters()
        _add_model(captured, view)
        shared["model"] = view.extra
        captured.small.update((f"{MODEL}/{name}", data) for name, data in models.companions(view.module).items())
    if training.optimizer is not None:
        optimizer = optimizers.view(training.optimizer, names)
        for name, tensor in optimizer.tensors().items():
            captured.add(OPTIMIZER, name, tensor)
        shared["optimizer"] = optimizer.values()
    if training.scheduler is not None:
        shared["scheduler"] = schedulers.values(training.scheduler)
    if training.user_content is not None:
        shared["user_content"] = training.user_content
    if rank == 0:
        captured.small[f"{STATE}.json"] = _add_values(captured, STATE, shared, "")
    captured.own = _add_values(captured, PER_RANK, _own(training), f"{rank}/")
    return captured


def _add_model(captured: Capture, view: models.ModelView) -> None:
    for name, tensor in view.tensors.items():
        captured.add(MODEL, name, tensor, shared=name not in view.buffers)
    if view.tied:
        captured.tied[MODEL] = view.tied


def _own(training: Training) -> dict[str, Any]:
    own: dict[str, Any] = {}
    if training.rng:
        own["rng"] = rng.capture()
    if training.rank_content is not None:
        own["content"] = training.rank_content
    return own


def _add_values(captured: Capture, group: str, tree: Mapping[str, Any], prefix: str) -> bytes:
    """Encode a tree; its tensors become tensors of ``group``, in the spec without the rank's ``prefix``."""
    arrays = ArraysOut()
    encoded = values.dumps(tree, arrays, prefix)
    for name, tensor in arrays.tensors.items():
        described = describe(tensor, f"{group} tensor {name!r}")
        captured.tensors.append(TensorSpec(group, name.removeprefix(prefix), described.dtype, described.shape))
        captured.parts[group, name] = LocalPart(tensor)
    return encoded
