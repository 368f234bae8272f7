"""Tests ``ZeroRedundancyOptimizer``: per-rank states without consolidation, to any world size and order."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import rankless
from rankless.errors import StateError
from tests.helpers.file_contents import read_state_files
from tests.helpers.pool import Ranks


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 1))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    # The same data on every rank, so that any world size takes the same steps.
    data = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
    model(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def build(kind: str, *, backwards: bool = False) -> tuple[nn.Module, Any]:
    model = net()
    wrapped = model if kind == "plain" else DistributedDataParallel(model)
    parameters = list(wrapped.parameters())
    parameters = parameters[::-1] if backwards else parameters
    if kind == "plain":
        return wrapped, torch.optim.AdamW(parameters, lr=0.1)
    views = kind == "bucket views"
    return wrapped, ZeroRedundancyOptimizer(
        parameters, optimizer_class=torch.optim.AdamW, lr=0.1, parameters_as_bucket_view=views
    )


def save(path: str, kind: str) -> list[torch.Tensor]:
    model, optimizer = build(kind)
    for number in range(3):
        step(model, optimizer, number)
    rankless.save_checkpoint(path, "s", model, optimizer)
    for number in range(3, 5):
        step(model, optimizer, number)
    return [p.detach().clone() for p in model.parameters()]


def load(path: str, kind: str, backwards: bool, fresh: bool) -> list[torch.Tensor]:
    model, optimizer = build(kind, backwards=backwards)
    if not fresh:
        step(model, optimizer, 9)
    optimizer.param_groups[0]["lr"] = 0.7
    rankless.load_checkpoint(path, model=model, optimizer=optimizer)
    for number in range(3, 5):
        step(model, optimizer, number)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", ["zero", "bucket views"])
def test_it_goes_on_as_if_nothing_had_happened_on_any_world_size_and_order(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    (expected, *_) = ranks(2, save, str(tmp_path), kind)
    for n, to, backwards, fresh in (
        (2, kind, False, True),
        (3, kind, True, True),
        (4, kind, False, False),
        (1, "plain", True, True),
        (2, "plain", False, False),
    ):
        for result in ranks(n, load, str(tmp_path), to, backwards, fresh):
            # One rank or several sum gradients in another order.
            assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(result, expected, strict=True)), (n, to)


def test_it_is_bitwise_on_the_same_world_size(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks(2, save, str(tmp_path), "zero")
    results = ranks(2, load, str(tmp_path), "zero", False, True)
    assert all(
        torch.equal(a, b)
        for left, other in zip(results, expected, strict=True)
        for a, b in zip(left, other, strict=True)
    )


def resave(path: str, to: str, kind: str) -> None:
    model, optimizer = build(kind)
    rankless.load_checkpoint(path, model=model, optimizer=optimizer)
    rankless.save_checkpoint(to, "s", model, optimizer)


def test_the_files_are_those_of_a_plain_optimizer(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, save, str(tmp_path / "plain"), "plain")
    for n in (2, 3):
        ranks(n, resave, str(tmp_path / "plain"), str(tmp_path / f"zero{n}"), "zero")
        assert read_state_files(tmp_path / f"zero{n}/s") == read_state_files(tmp_path / "plain/s")


def overlapped(path: str) -> str:

    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, overlap_with_ddp=True, lr=0.1
    )
    with pytest.raises(StateError, match="overlap_with_ddp=True is not supported"):
        rankless.save_checkpoint(path, "s", model, optimizer)
    return "refused"


def test_overlap_with_ddp_is_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, overlapped, str(tmp_path)) == ["refused"] * 2
    assert not list(tmp_path.iterdir())


class Averaging(torch.optim.AdamW):
    """Keeps a number by its own state dict."""

    average = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = state_dict["average"]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


class Outer(ZeroRedundancyOptimizer):
    """Has code of its own for a state dict that only one rank can give."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "number": 3}


def save_own(path: str, average: float) -> list[str]:
    model = net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Averaging, lr=0.1)
    step(model, optimizer, 0)
    optimizer.optim.average = average
    optimizer.optim.state["global"] = {"count": 7}
    rankless.save_checkpoint(path, "s", model, optimizer)
    return list(optimizer.optim.state_dict())


def load_own(path: str) -> tuple[Any, ...]:
    model = net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Averaging, lr=0.7)
    restored = rankless.restore(path, model=model, optimizer=optimizer)
    inner = optimizer.optim
    return "optimizer" in restored.exact, inner.average, inner.state["global"], inner.param_groups[0]["lr"]


def test_the_inner_optimizer_gets_its_own_values_on_any_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, save_own, str(tmp_path), 5.0)[0][-1] == "average"
    for number in (1, 2, 3):
        assert ranks(number, load_own, str(tmp_path)) == [(True, 5.0, {"count": 7}, 0.1)] * number


def save_and_load_outer(path: str, kind: str) -> tuple[Any, ...]:
    model = net()
    make = Outer if kind == "class" else ZeroRedundancyOptimizer
    optimizer = make(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.1)
    if kind == "hook":
        optimizer.register_state_dict_post_hook(lambda _, state_dict: {**state_dict, "number": 3})
    elif kind == "entry":
        optimizer.state["number"] = 3
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rankless.save_checkpoint(path, "s", model, optimizer)
    texts = [str(warning.message) for warning in caught]
    return rankless.restore(path, model=model, optimizer=optimizer).reconstructed, any(
        "It is not saved" in t for t in texts
    )


@pytest.mark.parametrize("kind", ["class", "hook", "entry"])
def test_what_the_outer_optimizer_keeps_is_not_exact(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    assert ranks(2, save_and_load_outer, str(tmp_path), kind) == [(("optimizer",), True)] * 2
