"""Tests that tensors of every dtype are saved from an accelerator, and loaded to it, however they lie in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rankless
from rankless.state.tensor_views import DTYPES
from tests.helpers.equality import equal_bits
from tests.helpers.simulated.streams import SCHEDULER, Stream, StreamContext, at_random
from tests.simulated.conftest import DeviceRanks

OPTIONS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "eager": {"async_save": True, "staging": "eager"},
    "overlapped": {"async_save": True, "staging": "overlapped"},
}


def make_random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return random bits; for truth values, zeros and ones."""
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.uint8).bool()
    return torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype).reshape(shape)


def make_tensors(device: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, dtype in DTYPES.items():
        if name == "F4":  # two values share a byte: no scalars and no views of some of them
            continue
        layouts = {
            "whole": make_random(dtype, 33, 7).to(device),
            "scalar": make_random(dtype, 1).reshape(()).to(device),
            "empty": torch.empty(0, 3, dtype=dtype, device=device),
            "offset": make_random(dtype, 70, 5).to(device).view(-1)[13:113],
            "transposed": make_random(dtype, 31, 27).to(device).t(),
            "steps": make_random(dtype, 30, 30).to(device)[::3, 1::2],
            "permuted": make_random(dtype, 3, 4, 5).to(device).permute(2, 0, 1),
            "expanded": make_random(dtype, 1, 9).to(device).expand(11, 9),
        }
        tensors |= {f"{name}/{layout}": tensor for layout, tensor in layouts.items()}
    return tensors


def save_and_load(path: str, kind: str) -> list[str]:
    """Return the names of the tensors that are different in the file, or after a load to the device."""
    tensors, expected = make_tensors("sim"), make_tensors("cpu")
    SCHEDULER.order = at_random(3)
    save = rankless.save_checkpoint(path, "s", tensors, **OPTIONS[kind])
    if kind == "eager":
        with StreamContext(Stream()):
            for name, tensor in tensors.items():
                if not name.endswith("/expanded"):
                    tensor.zero_()
    save.wait()
    saved = {
        name: tensor for file in (Path(path) / "s").glob("*/*.safetensors") for name, tensor in load_file(file).items()
    }
    different = [name for name, tensor in expected.items() if not equal_bits(saved[name], tensor)]
    targets = {name: torch.zeros_like(tensor) for name, tensor in make_tensors("sim").items()}
    rankless.load_checkpoint(path, model=targets)
    return different + [name for name, tensor in targets.items() if not equal_bits(tensor.cpu(), expected[name])]


@pytest.mark.parametrize("kind", OPTIONS)
def test_every_dtype_and_layout_is_kept(device_ranks: DeviceRanks, tmp_path: Path, kind: str) -> None:
    assert device_ranks(1, save_and_load, str(tmp_path), kind) == [[]]
