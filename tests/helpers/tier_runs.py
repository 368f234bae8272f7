"""Saves and loads of one process with a local tier, whose state tells its step, and claims of other jobs."""

from __future__ import annotations

import secrets
from pathlib import Path

import torch

import rankless
from rankless.run.claims import JobHistory, LoadedBase, announce, claim
from rankless.run.stored_history import read_history


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


def go_on(directory: rankless.RunDirectory) -> None:
    """Let the next save continue the newest run of a directory, as if its latest checkpoint had been loaded."""
    directory.history.runs |= {info.run for info in rankless.list_checkpoints(directory.path)}


def continue_from(run: Path, sequence: int) -> int:
    """Continue the newest run of a directory as another job does, which uses a tier. Return its incarnation.

    It goes on from the checkpoint with a sequence number; 0 is before all of them.
    """
    announce(run, 0)
    history = read_history(run)
    if not history.runs:
        return claim(run, JobHistory(), [])[0].incarnation
    newest, branch = list(history.runs.items())[-1]
    base = LoadedBase(
        id="0" * 16,
        run=newest,
        incarnation=branch.incarnation,
        sequence=sequence,
        tag="another",
        newest=None,
        token=secrets.token_hex(8),
    )
    return claim(run, JobHistory(base=base), [])[0].incarnation
