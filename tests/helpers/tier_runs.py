"""Saves and loads of one process with a local tier, whose state tells its step, and epochs of other jobs."""

from __future__ import annotations

from pathlib import Path

import torch

import rankless
from rankless.tier.epochs import begin_epoch, reserve_epoch


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3000,), float(step))}


def save_steps(directory: rankless.RunDirectory, *steps: int) -> None:
    for step in steps:
        directory.save(f"step_{step}", state_of(step), step=step)


def load_newest_step(directory: rankless.RunDirectory) -> float:
    """Load the newest checkpoint, wait until it is durable, and return its step, which its bytes must be of."""
    loaded = state_of(-1)
    step = directory.restore(None, loaded, resume=True).step
    directory.wait()
    assert torch.equal(loaded["w"], torch.full((3000,), float(step or 0)))
    return float(step or 0)


def claim_epoch(run: Path, start: int) -> int:
    """Continue the run as another job does: reserve an epoch, and begin it."""
    number = reserve_epoch(run)
    begin_epoch(run, number, start)
    return number
