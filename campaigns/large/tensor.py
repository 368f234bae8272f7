"""A tensor larger than one system call can write (2 GiB)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import rankless


def check_round_trip(folder: Path, nbytes: int) -> None:
    """Save and load it in both formats. Raises ``SystemExit`` if it differs."""
    numbers = torch.arange(nbytes // 4, dtype=torch.int32)
    for name in ("one.safetensors", "one.pt"):
        model = nn.Module()
        model.register_buffer("large", numbers)
        rankless.save_model(model, folder / name)
        with torch.device("meta"):
            other = nn.Module()
            other.register_buffer("large", torch.empty(len(numbers), dtype=torch.int32))
        rankless.load_model(other, folder / name)
        if not torch.equal(other.get_buffer("large"), numbers):
            raise SystemExit(f"{name} does not hold what was saved")
        (folder / name).unlink()
