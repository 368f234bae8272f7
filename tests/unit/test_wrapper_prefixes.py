"""Names in files: what a wrapper has added, and what is a module of the user that only has such a name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import rankless
from rankless.ondisk.wrapper_prefixes import wrapper_cleaner


class Named(nn.Module):
    """A module with a child of the name that ``torch.compile`` gives to the module it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = nn.Linear(2, 2)
        self.other = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("names", "cleaned"),
    [
        (["_orig_mod.w", "_orig_mod.b"], ["w", "b"]),
        (["a._orig_mod.w", "a._orig_mod.b", "c"], ["a.w", "a.b", "c"]),
        (["_orig_mod.w", "other.w"], ["_orig_mod.w", "other.w"]),
        (["a._orig_mod.w", "a.scale"], ["a._orig_mod.w", "a.scale"]),
        (["_orig_mod.a._orig_mod.w", "_orig_mod.a.scale"], ["a._orig_mod.w", "a.scale"]),
        (["a._checkpoint_wrapped_module.w", "b.w"], ["a.w", "b.w"]),
        (["_fsdp_wrapped_module.w", "_flat_param"], ["w", "_flat_param"]),
    ],
)
def test_a_wrapper_has_one_child_and_nothing_else(names: list[str], cleaned: list[str]) -> None:
    assert [wrapper_cleaner(names)(name) for name in names] == cleaned


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_child_of_such_a_name_comes_back_from_a_file_with_its_optimizer(tmp_path: Path, is_compiled: bool) -> None:
    torch.manual_seed(0)
    model, loaded = Named(), Named()
    saved = torch.compile(model, backend="eager") if is_compiled else model
    optimizer = torch.optim.SGD(model.named_parameters(), momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.save({"model": saved.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    other = torch.optim.SGD(loaded.named_parameters(), momentum=0.9)
    restored = rankless.restore(tmp_path / "a.pt", model=loaded, optimizer=other, rng=False)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    assert set(restored.exact) == {"model", "optimizer"}
    assert [state["momentum_buffer"].shape for state in other.state.values()] == [p.shape for p in loaded.parameters()]
