"""Tests that a resumed training continues as if it had not been interrupted."""

from pathlib import Path

import torch
from torch import nn

import rankless
from tests.helpers.pairwise import each_value
from tests.helpers.pool import Ranks
from tests.helpers.training import Run, assert_equal, gather_run, start_run


def train(layout: str, optimizer: str, path: str | None, steps: tuple[int, int]) -> tuple[list[float], dict]:
    """Losses and state of a run over steps [0, a + b); with a path it is saved, thrown away and loaded at a."""
    run = start_run(layout, optimizer)
    first, last = steps
    losses = [run.step(n) for n in range(first)]
    if path is not None:
        run = interrupt(run, path, layout, optimizer)
    losses += [run.step(n) for n in range(first, first + last)]
    return losses, gather_run(run)


def interrupt(run: Run, path: str, layout: str, optimizer: str) -> Run:
    rankless.save_checkpoint(path, "s", run.model, run.optimizer, run.scheduler)
    torch.manual_seed(99)
    other = start_run(layout, optimizer, seed=7)
    rankless.load_checkpoint(path, model=other.model, optimizer=other.optimizer, scheduler=other.scheduler)
    return other


@each_value({"layout, n": [("plain", 1), ("ddp", 2), ("fsdp", 2), ("fsdp", 3)], "optimizer": ["adamw", "momentum"]})
def test_a_resumed_run_is_bitwise_the_run_without_a_break(
    ranks: Ranks, tmp_path: Path, layout: str, n: int, optimizer: str
) -> None:
    unbroken = ranks(n, train, layout, optimizer, None, (3, 3))
    resumed = ranks(n, train, layout, optimizer, str(tmp_path), (3, 3))
    for (expected, state), (losses, other) in zip(unbroken, resumed, strict=True):
        assert losses == expected
        assert_equal(other, state)


def test_state_loaded_in_inference_mode_can_be_trained(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    rankless.save_checkpoint(tmp_path, "s", model, optimizer)
    model, optimizer = make()
    with torch.inference_mode():
        rankless.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
