"""A checkpoint to convert, and the memory that its conversion takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import rankless
from tests.helpers.training import train_run


def save_training(folder: Path, scale: float = 1.0) -> Path:
    """A checkpoint of ours: tied weights, buffers, AdamW in two groups, a scheduler, values with tensors in them."""
    run = train_run("plain")
    for parameter in run.model.parameters():
        parameter.data *= scale
    content = {"step": 3, "table": torch.arange(40_000.0), "nested": [{"array": np.arange(5)}, (1, "two")]}
    rankless.save_checkpoint(
        folder / "run",
        "s",
        run.model,
        run.optimizer,
        run.scheduler,
        content,
        step=3,
        per_rank_content={"own": 1},
        overwrite=True,
    )
    return folder / "run/s"


def tensors_to_lists(value: Any) -> Any:
    """Lists in the place of tensors, for which == is no answer."""
    if isinstance(value, dict):
        return {name: tensors_to_lists(item) for name, item in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


MEASURE_CONVERSION = """
import sys, threading, time, torch, rankless
rankless.convert(sys.argv[1] + "/small", sys.argv[1] + "/warm.pt", to=sys.argv[2])
def resident():
    with open("/proc/self/status") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(("RssAnon", "RssShmem"))) * 1024
before, peak, running = resident(), 0, True
def watch():
    global peak
    while running:
        peak = max(peak, resident())
        time.sleep(0.002)
thread = threading.Thread(target=watch)
thread.start()
rankless.convert(sys.argv[1] + "/big", sys.argv[1] + "/out", to=sys.argv[2])
running = False
thread.join()
print(peak - before)
"""
