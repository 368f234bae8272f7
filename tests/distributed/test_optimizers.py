"""Tests every optimizer in every layout: saved, and loaded into one that has not stepped yet."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import rankless
from rankless.errors import UnsupportedTensorError
from tests.helpers.optimizer_runs import (
    KINDS,
    LAYOUTS,
    Tensors,
    assert_equal_runs,
    check_optimizer,
    gather_tensors,
    layouts_of,
)
from tests.helpers.pairwise import first_of
from tests.helpers.pool import Ranks


@first_of(2, "writer", ["fsdp_tp", "plain", "ddp", "fsdp", "tp"])
def test_states_of_adamw_go_from_any_layout_to_any(ranks: Ranks, tmp_path: Path, writer: str) -> None:
    check_optimizer(ranks, tmp_path, "adamw foreach", writer, LAYOUTS)


def list_rings() -> Iterator[Any]:
    """Yield each kind with each layout and the next one: by day each kind once, and each layout with some kind."""
    for number, kind in enumerate(kind for kind in KINDS if kind != "adamw foreach"):
        ring = layouts_of(kind)
        for place, (writer, reader) in enumerate(zip(ring, (*ring[1:], ring[0]), strict=True)):
            marks = () if place == number % len(ring) else pytest.mark.full
            yield pytest.param(kind, writer, reader, marks=marks)


@pytest.mark.parametrize(("kind", "writer", "reader"), list(list_rings()))
def test_states_of_the_others_go_round_a_ring_of_layouts(
    ranks: Ranks, tmp_path: Path, kind: str, writer: str, reader: str
) -> None:
    """Each layout writes once and reads once what another has written: ``python -m campaigns.optimizers`` does all."""
    check_optimizer(ranks, tmp_path, kind, writer, [reader])


class MasterWeights(optim.Optimizer):
    """As mixed-precision optimizers do: float32 weights and moments beside bfloat16 parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["master"] = p.detach().float()
                    state["momentum"] = torch.zeros_like(p, dtype=torch.float32)
                    state["count"] = 0
                state["momentum"].mul_(0.9).add_(p.grad.float())
                state["master"].add_(state["momentum"], alpha=-group["lr"] / 3)
                state["count"] += 1
                p.copy_(state["master"])


def masters(path: str, fresh: bool) -> Tensors:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(8, 6, dtype=torch.bfloat16), mp_policy=MixedPrecisionPolicy())
    optimizer = MasterWeights(model.parameters())
    if fresh:
        rankless.load_checkpoint(path, model=model, optimizer=optimizer)
        assert all(state["count"] == 2 for state in optimizer.state.values())
        return gather_tensors(model, optimizer)
    for _ in range(2):
        model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    rankless.save_checkpoint(path, "s", model, optimizer)
    return gather_tensors(model, optimizer)


def test_float32_masters_and_moments_of_bfloat16_parameters_keep_every_bit(ranks: Ranks, tmp_path: Path) -> None:
    """``Optimizer.load_state_dict`` would cast them to bfloat16."""
    expected = ranks(2, masters, str(tmp_path), False)[0]
    assert {t.dtype for t in expected.values()} == {torch.float32}
    assert any(not torch.equal(t, t.bfloat16().float()) for t in expected.values())
    for n in (1, 3):
        for result in ranks(n, masters, str(tmp_path), True):
            assert_equal_runs(result, expected)


def quantised(path: str) -> str:
    model = fully_shard(nn.Linear(8, 6))
    optimizer = optim.SGD(model.parameters(), lr=1)
    optimizer.state[model.weight] = {"absmax": torch.rand(12)}  # one value for each block of the local part
    with pytest.raises(UnsupportedTensorError, match=r"'weight/absmax'.*unknown which part"):
        rankless.save_checkpoint(path, "s", model, optimizer)
    return "refused"


def test_states_of_which_the_layout_is_not_known_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, quantised, str(tmp_path)) == ["refused"] * 2
