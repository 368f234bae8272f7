"""The number that the device meshes of a training have for this process.

A process group that replaces another one may number its ranks differently. Meshes keep the numbers that they were made
with.

A live copy asks it on each rank before it builds specs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rankless.errors import StateError
from rankless.state.model import model_traversal as models
from rankless.state.optimizer import adapters
from rankless.state.training import TrainingObjects


def find_mesh_rank(training: TrainingObjects) -> int | None:
    """Return the number of this rank in the meshes of its DTensors; ``None`` if there are no DTensors.

    Raises ``StateError`` if meshes have different numbers for it.
    """
    numbers: dict[int, None] = {}
    meshes = {id(tensor.device_mesh): tensor.device_mesh for tensor in _iterate_tensors(training)}
    for mesh in meshes.values():
        coordinate = mesh.get_coordinate()
        if coordinate is not None:
            numbers[int(mesh.mesh[tuple(coordinate)])] = None
    if len(numbers) > 1:
        raise StateError(
            f"device meshes of the objects passed have different numbers for this rank, {', '.join(map(str, numbers))}:"
            " pass objects that were made over one process group"
        )
    return next(iter(numbers), None)


def _iterate_tensors(training: TrainingObjects) -> Iterator[DTensor]:
    """Yield the DTensors among the parameters of the models and the optimizers."""
    for parts in models.model_components(training.model).values():
        for part in parts:
            tensors = part.parameters() if isinstance(part, nn.Module) else part.values()
            yield from (tensor for tensor in tensors if isinstance(tensor, DTensor))
    for parts in adapters.optimizer_components(training.optimizer).values():
        for part in parts:
            if isinstance(part, torch.optim.Optimizer):
                params = (parameter for group in part.param_groups for parameter in group["params"])
                yield from (parameter for parameter in params if isinstance(parameter, DTensor))
