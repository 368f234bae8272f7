"""Models that a load gives memory: which may get it, what would be left without a value, and the doing of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from holdfast.ondisk.validation import strip_wrapper_prefixes
from holdfast.state.model import fsdp1
from holdfast.state.model import traversal as models
from holdfast.state.model.materialize import initializer, materialize, meta_tensors
from holdfast.state.tensors import local_tensor
from holdfast.state.training import TrainingObjects


class MetaModels:
    """The models of one load that may be on the meta device."""

    def __init__(self, training: TrainingObjects) -> None:
        self._training = training

    def may(self, slot: str) -> bool:
        """Whether loading may give a model memory: not where states were made for parameters without, nor in FSDP1."""
        parts = models.model_components(self._training.model)[slot]
        whole = all(isinstance(part, nn.Module) and not fsdp1.wrapped_modules(part) for part in parts)
        return whole and self._training.optimizer is None

    def problems(self, aimed: set[int]) -> Iterator[str]:
        """The tensors without memory that nothing fills, loading (``aimed``: ``id`` of local parts) or otherwise."""
        for module in self._modules():
            for one in meta_tensors(module):
                if id(local_tensor(one.tensor)) not in aimed and initializer(module, one.owner) is None:
                    yield (
                        f"{strip_wrapper_prefixes(one.name)}: on the meta device here, not in the checkpoint, and "
                        f"{type(one.owner).__qualname__} has no reset_parameters() that would make it"
                    )

    def materialise(self, filled: set[int]) -> dict[int, torch.Tensor]:
        """Give them memory, and what is not ``filled`` values: see :func:`holdfast.state.model.materialize.materialize`."""
        made: dict[int, torch.Tensor] = {}
        for module in self._modules():
            made |= materialize(module, filled)
        return made

    def _modules(self) -> Iterator[nn.Module]:
        for slot, parts in models.model_components(self._training.model).items():
            if self.may(slot):
                yield from parts
