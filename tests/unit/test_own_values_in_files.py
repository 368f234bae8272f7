"""What an optimizer keeps in its ``state_dict()`` besides states and settings, in files of ``torch.save``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rankless
from tests.helpers.drawn_modules import LARGE
from tests.helpers.drawn_objects import Averaging


def make(value: float, size: int = 3) -> tuple[torch.nn.Module, Averaging]:
    model = torch.nn.Linear(2, 2)
    optimizer = Averaging(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.average = torch.full((size,), value)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    return model, optimizer


def read_optimizer(to: str, path: Path) -> Any:
    tree = torch.load(path)
    return tree["optimizer"] if to == "torch" else tree["optimizer_states"][0]


@pytest.mark.parametrize("size", [3, LARGE])
@pytest.mark.parametrize("to", ["torch", "lightning"])
def test_a_converted_file_has_what_the_optimizer_itself_would_save(tmp_path: Path, to: str, size: int) -> None:
    model, optimizer = make(5, size)
    rankless.save_checkpoint(tmp_path / "run", "a", model, optimizer)
    rankless.convert(tmp_path / "run", tmp_path / "file.ckpt", to=to)
    _, other = make(1, size)
    other.load_state_dict(read_optimizer(to, tmp_path / "file.ckpt"))
    assert torch.equal(other.average, optimizer.average)
    buffers, expected = ([s["momentum_buffer"] for s in o.state.values()] for o in (other, optimizer))
    assert all(map(torch.equal, buffers, expected))


@pytest.mark.parametrize("to", ["dcp", "lightning-folder", "deepspeed-universal"])
def test_a_format_without_a_place_for_it_warns(tmp_path: Path, to: str) -> None:
    model, optimizer = make(5)
    rankless.save_checkpoint(tmp_path / "run", "a", model, optimizer)
    with pytest.warns(UserWarning, match=f"keeps values in its state_dict.*'{to}' has no place"):
        rankless.convert(tmp_path / "run", tmp_path / "out", to=to)


def test_renamed_parameters_keep_it(tmp_path: Path) -> None:
    model, optimizer = make(5)
    rankless.save_checkpoint(tmp_path / "run", "a", model, optimizer)
    rankless.convert(tmp_path / "run", tmp_path / "out", to="native", rename=lambda name: f"inner.{name}")
    inner, other = make(1)
    rankless.restore(tmp_path / "out", model=torch.nn.ModuleDict({"inner": inner}), optimizer=other, rng=False)
    assert torch.equal(other.average, optimizer.average)


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("name", ["optimizer.pt", "optimizer.safetensors"])
def test_a_file_of_one_optimizer_gives_it_back(tmp_path: Path, name: str, is_named: bool) -> None:
    model, optimizer = make(5)
    rankless.save_optimizer(optimizer, tmp_path / name, model=model if is_named else None)
    model, other = make(1)
    restored = rankless.load_optimizer(other, tmp_path / name, model=model if is_named else None)
    assert torch.equal(other.average, optimizer.average)
    assert (restored.exact, restored.user_content) == (("optimizer",), None)
