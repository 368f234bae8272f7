"""A tiny model and its steps: gradients are elementwise, so they have the same bits on any number of ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from campaigns.optimizers.catalog import Recipe

Run = tuple[nn.Module, Any]


def start_run(recipe: Recipe, *, is_sharded: bool, seed: int) -> Run:
    """Return a model, under FSDP2 over all ranks or whole, and its optimizer.

    Only the first matrix is large enough for states of 8 bits, on up to three ranks.
    """
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(64, 192, bias=False), nn.LayerNorm(192), nn.Linear(192, 8))
    if is_sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[2]):  # type: ignore[index]
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = recipe.make(model)
    if hasattr(optimizer, "train"):
        optimizer.train()
    return model, optimizer


def take_steps(recipe: Recipe, run: Run, first: int, end: int) -> None:
    """Take the steps from ``first`` to ``end``, eagerly: torchao would compile each for a minute.

    Their random numbers depend on the number of the step only.
    """
    with torch.compiler.set_stance("force_eager"):
        for number in range(first, end):
            torch.manual_seed(100 + number)
            _STEPPINGS[recipe.stepping](*run, number)


def _loss_of(model: nn.Module, number: int) -> Any:
    """Return a sum over all elements of all parameters."""
    losses = []
    for place, parameter in enumerate(model.parameters()):
        values = torch.arange(parameter.numel(), dtype=torch.float32)
        target = (values.reshape(parameter.shape) * 0.37 + place + number).sin() * 0.1
        if isinstance(parameter, DTensor):
            target = distribute_tensor(target, parameter.device_mesh, parameter.placements)
        loss = ((parameter - target).square() + 0.1 * parameter**4).sum()
        losses.append(loss.full_tensor() if isinstance(loss, DTensor) else loss)
    return torch.stack(losses).sum()


def _step(model: nn.Module, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    _loss_of(model, number).backward()
    optimizer.step()


def _step_with_closure(model: nn.Module, optimizer: Any, number: int) -> None:
    def compute() -> Any:
        model.zero_grad()
        loss = _loss_of(model, number)
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(compute)


def _step_twice(model: nn.Module, optimizer: Any, number: int) -> None:
    """Compute gradients, and let the optimizer compute others, at parameters that it moves before."""
    model.zero_grad()
    _loss_of(model, number).backward()
    _step_with_closure(model, optimizer, number)


def _step_with_value(model: nn.Module, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    loss = _loss_of(model, number)
    loss.backward()
    optimizer.step(lambda: float(loss))


def _step_with_graph(model: nn.Module, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    _loss_of(model, number).backward(create_graph=True)
    optimizer.step()


def _step_inside_backward(model: nn.Module, optimizer: Any, number: int) -> None:
    optimizer.fused_backward(_loss_of(model, number), lr=0.01)


def _step_sparse(model: nn.Module, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    _loss_of(model, number).backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad.to_sparse()  # type: ignore[union-attr]
    optimizer.step()


_STEPPINGS = {
    "step": _step,
    "closure": _step_with_closure,
    "twice": _step_twice,
    "value": _step_with_value,
    "graph": _step_with_graph,
    "fused": _step_inside_backward,
    "sparse": _step_sparse,
}
