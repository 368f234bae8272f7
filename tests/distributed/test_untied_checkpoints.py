"""Tests of checkpoints with two tensors under names that are one tensor of the model."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import rankless
from rankless.errors import MismatchError, OptimizerMismatchError
from tests.helpers.pool import Ranks


class Net(nn.Module):
    """A model with an embedding and a head, which may be one tensor."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def _save_native(path: Path, net: Net) -> None:
    rankless.save_checkpoint(path, "s", model=net, rng=False)


def _save_torch(path: Path, net: Net) -> None:
    torch.save({"model": {name: tensor.clone() for name, tensor in net.state_dict().items()}}, path)


def _save_hugging_face(path: Path, net: Net) -> None:
    path.mkdir()
    save_file({name: tensor.clone() for name, tensor in net.state_dict().items()}, path / "model.safetensors")


def _save_dcp(path: Path, net: Net) -> None:
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    dcp.save({"model": state}, checkpoint_id=path, no_dist=True)


WRITERS = [_save_native, _save_torch, _save_hugging_face, _save_dcp]


@pytest.mark.parametrize("save", WRITERS)
def test_a_tensor_that_would_be_dropped_is_named(tmp_path: Path, save: Callable[[Path, Net], None]) -> None:
    untied, tied = Net(tied=False), Net(tied=True)
    before = tied.embed.weight.detach().clone()
    save(tmp_path / "saved", untied)
    with pytest.raises(MismatchError, match=r"head\.weight: the same tensor as embed\.weight here"):
        rankless.load_checkpoint(tmp_path / "saved", model=tied, rng=False)
    assert torch.equal(tied.embed.weight, before)
    restored = rankless.restore(tmp_path / "saved", model=tied, rng=False, strict=False)
    assert (restored.exact, restored.unexpected) == ((), ("head.weight",))
    assert torch.equal(tied.head.weight, untied.embed.weight)


@pytest.mark.parametrize("save", WRITERS)
def test_equal_tensors_are_one(tmp_path: Path, save: Callable[[Path, Net], None]) -> None:
    untied, tied = Net(tied=False), Net(tied=True)
    untied.head.weight.data.copy_(untied.embed.weight)
    save(tmp_path / "saved", untied)
    assert rankless.restore(tmp_path / "saved", model=tied, rng=False).exact == ("model",)
    assert torch.equal(tied.head.weight, untied.embed.weight)


def _load(path: str, strict: bool) -> Any:
    try:
        restored = rankless.restore(path, model=Net(tied=True), rng=False, strict=strict)
    except MismatchError as error:
        return "head.weight" in str(error)
    return restored.exact, restored.unexpected


def test_all_ranks_agree(ranks: Ranks, tmp_path: Path) -> None:
    _save_native(tmp_path, Net(tied=False))
    assert ranks(2, _load, str(tmp_path), True) == [True, True]
    assert ranks(2, _load, str(tmp_path), False) == [((), ("head.weight",))] * 2


def _train(net: Net, *, sums_gradients: bool = True) -> torch.optim.Optimizer:
    """Take two steps, with the gradient that a tied tensor would have, as stages of a pipeline compute it."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for step in range(2):
        net.head(net.embed(torch.arange(step, 6))).square().sum().backward()
        if sums_gradients:
            gradient = net.embed.weight.grad + net.head.weight.grad  # type: ignore[operator]
            net.embed.weight.grad, net.head.weight.grad = gradient, gradient.clone()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _build_equal() -> Net:
    net = Net(tied=False)
    net.head.weight.data.copy_(net.embed.weight)
    return net


def test_equal_optimizer_states_are_one(tmp_path: Path) -> None:
    untied, tied = _build_equal(), Net(tied=True)
    saved, loaded = _train(untied), torch.optim.AdamW(tied.parameters())
    rankless.save_checkpoint(tmp_path, "s", model=untied, optimizer=saved, rng=False)
    restored = rankless.restore(tmp_path, model=tied, optimizer=loaded, rng=False)
    assert restored.exact == ("model", "optimizer")
    for name, value in saved.state[untied.embed.weight].items():
        assert torch.equal(loaded.state[tied.embed.weight][name], value)


def test_an_optimizer_state_that_would_be_dropped_is_named(tmp_path: Path) -> None:
    untied, tied = _build_equal(), Net(tied=True)
    optimizer, loaded = _train(untied), torch.optim.AdamW(tied.parameters())
    optimizer.state[untied.head.weight]["exp_avg"][3, 1] += 1
    rankless.save_checkpoint(tmp_path, "s", model=untied, optimizer=optimizer, rng=False)
    with pytest.raises(MismatchError, match=r"head\.weight/exp_avg: the same tensor as embed\.weight/exp_avg here"):
        rankless.load_checkpoint(tmp_path, model=tied, optimizer=loaded, rng=False)
    restored = rankless.restore(tmp_path, model=tied, optimizer=loaded, rng=False, strict=False)
    assert (restored.exact, restored.unexpected) == (("model",), ("optimizer/head.weight/exp_avg",))


@pytest.mark.parametrize("change", ["lr", "state"])
def test_a_parameter_with_other_settings_or_without_a_state_is_not_dropped(tmp_path: Path, change: str) -> None:
    untied, tied = _build_equal(), Net(tied=True)
    optimizer = _train(untied)
    if change == "state":
        del optimizer.state[untied.head.weight]
    else:
        parameters = [{"params": [untied.embed.weight]}, {"params": [untied.head.weight], "lr": 0.5}]
        optimizer = torch.optim.AdamW(parameters)
    rankless.save_checkpoint(tmp_path, "s", model=untied, optimizer=optimizer, rng=False)
    loaded = torch.optim.AdamW(tied.parameters())
    with pytest.raises(MismatchError, match=r"head\.weight is one tensor with embed\.weight here"):
        rankless.load_checkpoint(tmp_path, model=tied, optimizer=loaded, rng=False)
    restored = rankless.restore(tmp_path, model=tied, optimizer=loaded, rng=False, strict=False)
    assert "optimizer" not in restored.exact
    assert "optimizer/head.weight" in restored.unexpected


@pytest.mark.parametrize(
    "rate", [torch.tensor(0.5), np.float64(0.5), np.full(3, 0.5), torch.full((30_000,), 0.5), [torch.ones(2)]]
)
@pytest.mark.parametrize("is_equal", [True, False])
def test_equal_settings_are_one_whatever_their_class(tmp_path: Path, rate: Any, is_equal: bool) -> None:
    untied, tied = _build_equal(), Net(tied=True)
    other = copy.deepcopy(rate) if is_equal else [torch.zeros(2)] if isinstance(rate, list) else rate / 2
    optimizer = torch.optim.SGD(
        [{"params": [untied.embed.weight], "x": rate}, {"params": [untied.head.weight], "x": other}]
    )
    rankless.save_checkpoint(tmp_path, "s", model=untied, optimizer=optimizer, rng=False)
    loaded = torch.optim.SGD(tied.parameters())
    if not is_equal:
        with pytest.raises(MismatchError, match=r"head\.weight is one tensor with embed\.weight here"):
            rankless.load_checkpoint(tmp_path, model=tied, optimizer=loaded, rng=False)
        return
    assert rankless.restore(tmp_path, model=tied, optimizer=loaded, rng=False).exact == ("model", "optimizer")
    (setting,) = [group["x"] for group in loaded.param_groups]
    torch.testing.assert_close(setting, rate, rtol=0, atol=0)


class Three(nn.Module):
    """Three layers, and the last one is one tensor with another one."""

    def __init__(self, other: str) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(2, 2, bias=False) for _ in range(3))
        self.c.weight = self.get_submodule(other).weight


def _train_three(net: Three, b: dict[str, Any]) -> torch.optim.Optimizer:
    net.b.weight.data.copy_(net.a.weight)
    optimizer = torch.optim.SGD([{"params": [net.a.weight]}, {"params": [net.b.weight], **b}], lr=0.1, momentum=0.9)
    optimizer.state[net.a.weight]["momentum_buffer"] = torch.ones(2, 2)
    optimizer.state[net.b.weight]["momentum_buffer"] = torch.ones(2, 2)
    return optimizer


@pytest.mark.parametrize("difference", ["", "settings", "state", "no state"])
def test_a_parameter_that_is_tied_to_another_one_now_is_named(tmp_path: Path, difference: str) -> None:
    """The other one and the one before are trained here both, so that nothing is left over."""
    net, here = Three("a"), Three("b")
    optimizer = _train_three(net, {"lr": 0.5} if difference == "settings" else {})
    if difference == "no state":
        del optimizer.state[net.a.weight]
    elif difference == "state":
        optimizer.state[net.b.weight]["momentum_buffer"] *= 2
    rankless.save_checkpoint(tmp_path, "s", model=net, optimizer=optimizer, rng=False)
    loaded = _train_three(here, {"lr": 0.5})
    if difference:
        with pytest.raises(
            MismatchError, match=r"(?s)a\.weight.*same tensor as b|c\.weight is one tensor with b\.weight here"
        ):
            rankless.load_checkpoint(tmp_path, model=here, optimizer=loaded, rng=False)
        restored = rankless.restore(tmp_path, model=here, optimizer=loaded, rng=False, strict=False)
        assert restored.exact == ("model",)
        assert any("a.weight" in name for name in restored.unexpected)
    else:
        assert rankless.restore(tmp_path, model=here, optimizer=loaded, rng=False).exact == ("model", "optimizer")


def test_two_parameters_of_one_memory_keep_their_own_states(tmp_path: Path) -> None:
    net = Net(tied=False)
    net.head.weight = nn.Parameter(net.embed.weight.data)
    optimizer, loaded = (torch.optim.SGD(net.parameters(), momentum=0.9) for _ in range(2))
    for number, parameter in enumerate(net.parameters()):
        optimizer.state[parameter]["momentum_buffer"] = torch.full((6, 4), float(number))
    rankless.save_checkpoint(tmp_path, "s", model=net, optimizer=optimizer, rng=False)
    assert "optimizer" in rankless.restore(tmp_path, model=net, optimizer=loaded, rng=False).exact
    assert [loaded.state[p]["momentum_buffer"].mean() for p in net.parameters()] == [0, 1]


def test_an_optimizer_alone_is_loaded_for_a_model_that_is_tied_now(tmp_path: Path) -> None:
    untied, tied = _build_equal(), Net(tied=True)
    saved, loaded = _train(untied), torch.optim.AdamW(tied.parameters())
    rankless.save_optimizer(saved, tmp_path / "optimizer", model=untied)
    rankless.load_optimizer(loaded, tmp_path / "optimizer", model=tied)
    for name, value in saved.state[untied.embed.weight].items():
        assert torch.equal(loaded.state[tied.embed.weight][name], value)
    saved.state[untied.head.weight]["exp_avg"][3, 1] += 1
    rankless.save_optimizer(saved, tmp_path / "other", model=untied)
    with pytest.raises(MismatchError, match=r"head\.weight/exp_avg: the same tensor as embed\.weight/exp_avg here"):
        rankless.load_optimizer(loaded, tmp_path / "other", model=tied)


def test_parameters_by_number_are_not_matched_with_a_model_that_is_tied_now(tmp_path: Path) -> None:
    untied, tied = _build_equal(), Net(tied=True)
    torch.save({"model": untied.state_dict(), "optimizer": _train(untied).state_dict()}, tmp_path / "x.pt")
    with pytest.raises(OptimizerMismatchError, match="by position only: create the optimizer as when it was saved"):
        rankless.restore(tmp_path / "x.pt", model=tied, optimizer=torch.optim.AdamW(tied.parameters()), rng=False)


def _save_stage(path: str) -> torch.Tensor:
    """Save an embedding on rank 0 and a head on rank 1, trained with equal gradients."""
    whole = _build_equal()
    _train(whole)
    stage = nn.Module()
    name, kept = ("embed", whole.embed) if dist.get_rank() == 0 else ("head", whole.head)
    stage.add_module(name, kept)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.1)
    kept.weight.grad = torch.arange(24.0).reshape(6, 4)
    optimizer.step()
    rankless.save_checkpoint(path, "s", model=stage, optimizer=optimizer, rng=False)
    return optimizer.state[kept.weight]["exp_avg"].clone()


def _load_whole(path: str) -> tuple[tuple[str, ...], torch.Tensor]:
    tied = Net(tied=True)
    optimizer = torch.optim.AdamW(tied.parameters())
    restored = rankless.restore(path, model=tied, optimizer=optimizer, rng=False)
    return restored.exact, optimizer.state[tied.embed.weight]["exp_avg"]


def test_a_whole_model_ties_what_stages_trained_apart(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks(2, _save_stage, str(tmp_path))[0]
    for exact, moments in [_load_whole(str(tmp_path)), *ranks(3, _load_whole, str(tmp_path))]:
        assert exact == ("model", "optimizer")
        assert torch.equal(moments, expected)
