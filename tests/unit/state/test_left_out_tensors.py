"""Tests models whose ``state_dict`` does not return all of their tensors: what lacks them is not called exact."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankless
from rankless.errors import StateError

LEFT_OUT = "0.weight"


class Overriding(nn.Sequential):
    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        state = nn.Module.state_dict(self, *args, **options)
        state.pop(LEFT_OUT)
        return state


class Sparing(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(f"{prefix}weight")


def _make_hooked() -> nn.Module:
    def drop(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        state.pop(prefix + LEFT_OUT)

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model._register_state_dict_hook(drop)
    return model


def _make_instance_with_its_own() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model.state_dict = partial(Overriding.state_dict, model)  # type: ignore[method-assign]
    return model


MODELS = {
    "method of the instance": _make_instance_with_its_own,
    "hook": _make_hooked,
    "override": lambda: Overriding(nn.Linear(3, 3), nn.Linear(3, 2)),
    "override of a submodule": lambda: nn.Sequential(Sparing(3, 3), nn.Linear(3, 2)),
}


@pytest.fixture(params=MODELS)
def make_model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]


def test_a_trained_parameter_that_is_left_out_is_named_and_the_model_is_not_exact(
    make_model: Any, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match=f"leaves out 1 trained parameter, such as '{LEFT_OUT}'"):
        rankless.save_checkpoint(tmp_path, "s", model=make_model())
    restored = rankless.restore(tmp_path, "s", model=make_model())
    assert "model" not in restored.exact
    assert "model" not in restored.reconstructed
    assert restored.missing == (LEFT_OUT,)


def test_a_frozen_parameter_may_be_left_out_but_is_missing(make_model: Any, tmp_path: Path) -> None:
    model = make_model()
    model[0].weight.requires_grad_(requires_grad=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rankless.save_checkpoint(tmp_path, "s", model=model)
    restored = rankless.restore(tmp_path, "s", model=make_model())
    assert "model" not in restored.exact
    assert restored.missing == (LEFT_OUT,)


def test_without_hooks_all_is_saved_and_comes_back(make_model: Any, tmp_path: Path) -> None:
    model, other = make_model(), make_model()
    rankless.save_checkpoint(tmp_path, "s", model=model, state_dict_hooks=False)
    restored = rankless.restore(tmp_path, "s", model=other)
    assert "model" in restored.exact
    assert all(torch.equal(mine, its) for mine, its in zip(model.parameters(), other.parameters(), strict=True))


def test_an_optimizer_of_a_parameter_that_is_left_out_is_refused_with_the_way_out(
    make_model: Any, tmp_path: Path
) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(StateError, match="state_dict_hooks=False"):
        rankless.save_checkpoint(tmp_path, "s", model=model, optimizer=optimizer)
    rankless.save_checkpoint(tmp_path, "s", model=model, optimizer=optimizer, state_dict_hooks=False)
    restored = rankless.restore(tmp_path, "s", model=model, optimizer=optimizer)
    assert {"model", "optimizer"} <= set(restored.exact)


def test_a_component_alone_tells_it_too(make_model: Any, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="leaves out 1 trained parameter"):
        rankless.save_model(make_model(), tmp_path / "m")


def test_another_name_of_what_is_saved_may_be_left_out(tmp_path: Path) -> None:
    def drop(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        state.pop(f"{prefix}view")

    def make() -> nn.Module:
        model = nn.Linear(3, 3)
        model.register_buffer("view", model.weight.detach())
        model._register_state_dict_hook(drop)
        return model

    rankless.save_checkpoint(tmp_path, "s", model=make())
    restored = rankless.restore(tmp_path, "s", model=make())
    assert "model" in restored.exact
    assert not restored.missing


def test_what_another_part_of_the_model_has_is_not_missing(make_model: Any, tmp_path: Path) -> None:
    def parts() -> list[nn.Module]:
        model, other = make_model(), nn.ModuleDict({"0": nn.Linear(3, 3)})
        other["0"].weight = model[0].weight
        other["0"].bias = model[0].bias
        return [model, other]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rankless.save_checkpoint(tmp_path, "s", model=parts())
    restored = rankless.restore(tmp_path, "s", model=parts())
    assert "model" in restored.exact
    assert not restored.missing
