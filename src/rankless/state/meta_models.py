"""Models on the meta device that a load gives memory.

:mod:`rankless.state.restore` has one for each load, on each rank: the check is in the vote "matching …", the memory
comes in the vote "reading", after the last check.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from rankless.state.model import fsdp1
from rankless.state.model import model_traversal as models
from rankless.state.model.materialize import MetaTensor, find_held, materialize, meta_tensors
from rankless.state.model.wrapper_modules import NameCleaner
from rankless.state.tensor_views import local_tensor
from rankless.state.training import TrainingObjects


class MetaModels:
    """The models of one load that may be on the meta device."""

    def __init__(self, training: TrainingObjects) -> None:
        self._training = training
        self._set_outside: list[MetaTensor] = []

    def can_materialize(self, slot: str) -> bool:
        """Return whether loading may give a model memory.

        It may not under FSDP1, and not if an optimizer is loaded too: its states were made for parameters without
        memory.
        """
        parts = models.model_components(self._training.model)[slot]
        are_modules = all(isinstance(part, nn.Module) and not fsdp1.uses_fsdp1(part) for part in parts)
        return are_modules and self._training.optimizer is None

    def find_uninitialized(self, targeted: set[int]) -> Iterator[str]:
        """Yield a message for each tensor without memory that would have no value, or cannot get memory.

        ``targeted`` are the ``id`` of the local shards that are loaded. Other tensors need an initializer.
        """
        for module in self._iterate_modules():
            tensors = meta_tensors(module)
            yield from (_explain_held(module, meta) for meta in (find_held(tensors) if tensors else ()))
            unloaded = [meta for meta in tensors if id(local_tensor(meta.tensor)) not in targeted]
            if not unloaded:
                continue
            from rankless.state.model.initializer_probe import probe_initializers  # noqa: PLC0415 - rarely needed

            probe = probe_initializers(module, unloaded)
            self._set_outside += probe.set_outside
            for name, reason in probe.reasons.items():
                yield f"{NameCleaner(module)(name)}: on the meta device here, not in the checkpoint, and {reason}"

    def materialize_models(self, filled: set[int]) -> dict[int, torch.Tensor]:
        """Give the models memory, and initialize tensors that are not ``filled``. Called after `find_uninitialized`.

        See :func:`rankless.state.model.materialize.materialize`.
        """
        materialized: dict[int, torch.Tensor] = {}
        for module in self._iterate_modules():
            materialized |= materialize(module, filled, self._set_outside)
        return materialized

    def _iterate_modules(self) -> Iterator[nn.Module]:
        for slot, parts in models.model_components(self._training.model).items():
            if self.can_materialize(slot):
                yield from parts


def _explain_held(module: nn.Module, meta: MetaTensor) -> str:
    return (
        f"{NameCleaner(module)(meta.name)}: on the meta device here, and another tensor is a view of it or code refers "
        "to it, so that it cannot get memory in place: make the model on another device, or the views after the load"
    )
