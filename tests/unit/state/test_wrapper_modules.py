"""Tests that wrappers are known by their class: a child of a module may be called as the child of a wrapper."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

import rankless

NAMES = ["_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"]


class Named(nn.Module):
    """A module with a child of a given name, another child and a parameter."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(2, 2))
        self.other, self.scale = nn.Linear(2, 3), nn.Parameter(torch.randn(2))


@pytest.mark.parametrize("name", NAMES)
def test_a_child_called_as_a_wrapper_s_is_no_wrapper(tmp_path: Path, name: str) -> None:
    net, again = nn.Sequential(Named(name), Named(name)), nn.Sequential(Named(name), Named(name))
    for model, loaded in ((net, again), (net[0], again[0])):
        folder = tmp_path / type(model).__name__
        rankless.save_checkpoint(folder, "s", model=model, rng=False)
        stored = {key.removeprefix("model/") for key in rankless.open(folder)}
        assert stored == set(model.state_dict())
        assert rankless.restore(folder, model=loaded, rng=False).exact == ("model",)
        assert all(torch.equal(loaded.state_dict()[key], tensor) for key, tensor in model.state_dict().items())


WRAPS = {"compile": torch.compile, "checkpoint": checkpoint_wrapper, "offload": offload_wrapper, "none": lambda m: m}


@pytest.mark.parametrize("name", NAMES[:2])
def test_wrappers_add_nothing_to_names(tmp_path: Path, name: str) -> None:
    for number, (outer, inner) in enumerate(itertools.product(WRAPS.values(), repeat=2)):
        net = Named(name)
        expected = {f"model/{key}" for key in net.state_dict()}
        net.other = inner(net.other)
        model = outer(net)
        rankless.save_checkpoint(tmp_path, f"s{number}", model=model, rng=False)
        assert set(rankless.open(tmp_path / f"s{number}")) == expected
        assert rankless.restore(tmp_path, f"s{number}", model=model, rng=False).exact == ("model",)
