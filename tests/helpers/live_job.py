"""A job under torchrun whose training moves to other ranks midway: ``live_job.py BEFORE AFTER FOLDER``.

``BEFORE`` and ``AFTER`` are the ranks that train, such as ``0,1``. Only the lowest of them contributes to the loss, so
that sums over any number of ranks round alike. The last state is written into ``FOLDER``, by the standard library.
"""

from __future__ import annotations

import pickle
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import rankless

MOVE, STEPS = 4, 9


def make_training(ranks: list[int] | None) -> dict[str, Any]:
    """Model, optimizer and scheduler; over some ranks, or in one process."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5))
    if ranks is not None:
        mesh = DeviceMesh("cpu", ranks)
        if dist.get_rank() not in ranks:
            return {}
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def take_step(training: dict[str, Any], step: int, *, counts: bool) -> None:
    batch = torch.randn(6, 7, generator=torch.Generator().manual_seed(step))
    loss = training["model"](batch).square().sum()
    (loss if counts else loss * 0.0).backward()
    training["optimizer"].step()
    training["optimizer"].zero_grad()
    training["scheduler"].step()


def gather_state(training: dict[str, Any]) -> dict[str, Any]:
    """All tensors, whole, and the values next to them."""
    model, optimizer = training["model"], training["optimizer"]
    state = {name: whole(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        state |= {f"{name}/{key}": whole(value) for key, value in optimizer.state[parameter].items()}
    return {**state, "lr": optimizer.param_groups[0]["lr"], "scheduler": training["scheduler"].state_dict()}


def whole(tensor: torch.Tensor) -> list[float]:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()).flatten().tolist()


def train_alone() -> dict[str, Any]:
    """The state after all steps of an uninterrupted run in one process."""
    training = make_training(None)
    for step in range(STEPS):
        take_step(training, step, counts=True)
    return gather_state(training)


def train_and_move(before: list[int], after: list[int], folder: Path) -> None:
    """Train on some ranks, and then on others. All ranks of the process group call it."""
    rank, step = dist.get_rank(), 0
    training = make_training(before)
    while training and step < MOVE:
        take_step(training, step, counts=rank == before[0])
        step += 1
    moved = make_training(after)
    # The generators of a rank that has not trained are of no use to it: the model draws no random numbers.
    copied = rankless.copy_state(**moved, source=training or None, user_content={"step": step}, rng=False, timeout=60)
    if moved:
        assert copied.user_content == {"step": MOVE}
        for number in range(copied.user_content["step"], STEPS):
            take_step(moved, number, counts=rank == after[0])
        state = gather_state(moved)
        if rank == after[0]:
            (folder / "state").write_bytes(pickle.dumps(state))
    wait_for_all()


def wait_for_all() -> None:
    """Wait for all ranks in the store.

    Twice in some twenty runs on a busy host, a rank never left a barrier of gloo that others had entered long before
    it, while it trained over another group (torch 2.13).
    """
    store = dist.distributed_c10d._get_default_store()
    store.add("moved", 1)
    while store.add("moved", 0) < dist.get_world_size():
        time.sleep(0.01)


def main(before: list[int], after: list[int], folder: Path) -> None:
    dist.init_process_group("gloo")
    train_and_move(before, after, folder)
    dist.destroy_process_group()


def parse_ranks(text: str) -> list[int]:
    return [int(rank) for rank in text.split(",")]


if __name__ == "__main__":
    main(parse_ranks(sys.argv[1]), parse_ranks(sys.argv[2]), Path(sys.argv[3]))
