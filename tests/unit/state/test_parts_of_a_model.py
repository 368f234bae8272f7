"""Tests of several parts of a model in one process, such as the first and the last stage of a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import rankless


class Part(nn.Module):
    """A part that keeps how many tokens it has seen, and has some layers."""

    def __init__(self, tokens: Any = 0, **layers: nn.Module) -> None:
        super().__init__()
        self.tokens = tokens
        for name, layer in layers.items():
            setattr(self, name, layer)

    def get_extra_state(self) -> Any:
        return self.tokens

    def set_extra_state(self, state: Any) -> None:
        self.tokens = state


def linear(weight: nn.Parameter | None = None) -> nn.Linear:
    layer = nn.Linear(3, 3, bias=False)
    if weight is not None:
        layer.weight = weight
    return layer


@pytest.mark.parametrize("tokens", [7, torch.arange(3), {"seen": [1, 2.5]}])
def test_each_part_gets_extra_state_of_one_name(tmp_path: Path, tokens: Any) -> None:
    rankless.save_checkpoint(tmp_path, "x", [Part(tokens, a=linear()), Part(tokens, b=linear())])
    parts = [Part(0, a=linear()), Part(0, b=linear())]
    assert "model" in rankless.restore(tmp_path, None, parts).exact
    assert [str(part.tokens) for part in parts] == [str(tokens)] * 2


@pytest.mark.parametrize(("one", "other"), [(1, 2), (0.0, -0.0), (1, True), (torch.ones(2), torch.zeros(2))])
def test_other_extra_state_under_one_name_is_refused(tmp_path: Path, one: Any, other: Any) -> None:
    with pytest.raises(rankless.StateError, match="two parts of the model hold different values of '_extra_state'"):
        rankless.save_checkpoint(tmp_path, "x", [Part(one, a=linear()), Part(other, b=linear())])
    assert rankless.list_checkpoints(tmp_path) == []


def tied_parts() -> tuple[list[Part], optim.Optimizer]:
    """The first and the last stage of a V schedule, which share a parameter."""
    embed = linear()
    parts = [Part(embed=embed), Part(mid=linear()), Part(head=linear(embed.weight))]
    return parts, optim.AdamW({id(p): p for part in parts for p in part.parameters()}.values())


def whole() -> tuple[list[Part], optim.Optimizer]:
    embed = linear()
    part = Part(embed=embed, mid=linear(), head=linear(embed.weight))
    return [part], optim.AdamW(part.parameters())


@pytest.mark.parametrize("saved", [tied_parts, whole])
@pytest.mark.parametrize("here", [tied_parts, whole])
def test_a_parameter_in_two_parts_is_stored_once(tmp_path: Path, saved: Any, here: Any) -> None:
    parts, optimizer = saved()
    for parameter in {p for part in parts for p in part.parameters()}:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    rankless.save_checkpoint(tmp_path, "x", parts, optimizer)
    stored = [*rankless.open(tmp_path)]
    assert "model/embed.weight" in stored
    assert sum("exp_avg_sq" in name for name in stored) == 2
    other, other_optimizer = here()
    assert {"model", "optimizer"} <= {*rankless.restore(tmp_path, None, other, other_optimizer).exact}
    assert torch.equal(other[-1].head.weight, parts[0].embed.weight)
    states = [state["exp_avg"] for state in other_optimizer.state.values()]
    assert all(torch.equal(one, two["exp_avg"]) for one, two in zip(states, optimizer.state.values(), strict=True))


def test_a_name_that_is_tied_in_one_part_and_separate_in_another(tmp_path: Path) -> None:
    """The file has it as a tensor of its own: it cannot be a further name of another tensor as well."""
    embed = linear()
    parts = [
        Part(embed=embed, head=linear(embed.weight)),
        Part(head=linear(nn.Parameter(embed.weight.detach().clone()))),
    ]
    rankless.save_checkpoint(tmp_path, "x", parts)
    expected = embed.weight.detach().clone()
    with torch.no_grad():
        for part in parts:
            part.head.weight.zero_()
    assert "model" in rankless.restore(tmp_path, None, parts).exact
    assert all(torch.equal(part.head.weight, expected) for part in parts)
    with torch.no_grad():
        parts[1].head.weight.add_(1)
    with pytest.raises(rankless.StateError, match=r"two parts of the model hold different values of 'head\.weight'"):
        rankless.save_checkpoint(tmp_path, "y", parts)
