"""Tests optimizers of other parameters than the saved ones: shared states are restored, the others are reported.

The oracle is torch alone: an optimizer that was given the states of another one by parameter.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

import rankless
from rankless.errors import MismatchError, OptimizerMismatchError
from tests.helpers.pairwise import each_value
from tests.helpers.pool import Ranks
from tests.helpers.torch_limits import AVERAGES_GRADIENTS

#: Layouts, and numbers of ranks.
LAYOUTS = {"plain": 1, "ddp": 3, "zero": 2, "fsdp1": 2, "fsdp2": 2}

HEAD = ["1.bias", "1.weight"]
BODY = ["0.bias", "0.weight"]


def net(frozen: list[str]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return model


def build(layout: str, frozen: list[str], grouped: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, and AdamW over what is not frozen; ``grouped``: the body in a group of its own."""
    model = net(frozen)
    body = list(model[0].parameters())
    if layout == "fsdp2":
        model = fully_shard(model)
        body = list(model[0].parameters())
    elif layout == "fsdp1":
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
        body = list(model.module[0].parameters())
    elif layout in {"ddp", "zero"}:
        model = DistributedDataParallel(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained, "lr": 0.5}]
    if grouped:
        of_body = set(map(id, body))
        groups = [
            {"params": [p for p in trained if id(p) not in of_body], "lr": 0.5},
            {"params": body, "lr": 0.003},
        ]
    if layout == "zero":
        return model, ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.AdamW)
    return model, torch.optim.AdamW(groups)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
    losses = []
    for number in range(first, first + 2):
        data = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def save(path: str, layout: str, frozen: list[str]) -> None:
    model, optimizer = build(layout, frozen, grouped=False)
    set_rate(optimizer, 0.02)
    train(model, optimizer, 0)
    rankless.save_checkpoint(path, "s", model, optimizer)


def go_on(path: str, layout: str, frozen: list[str], grouped: bool) -> tuple[list[float], rankless.RestoreResult]:
    model, optimizer = build(layout, frozen, grouped)
    restored = rankless.restore(path, None, model, optimizer, strict=False)
    return train(model, optimizer, 2), restored


def expected(before: list[str], after: list[str], grouped: bool) -> list[float]:
    """The losses of one process in which parameters are frozen and unfrozen, without any checkpoint."""
    model, old = build("plain", before, grouped=False)
    set_rate(old, 0.02)
    train(model, old, 0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in after)
        parameter.grad = None
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained, "lr": 0.02}]
    if grouped:
        groups = [{"params": list(model[1].parameters()), "lr": 0.02}]
        groups += [{"params": list(model[0].parameters()), "lr": 0.003}]
    new = torch.optim.AdamW(groups)
    for parameter in trained:
        if parameter in old.state:
            new.state[parameter] = old.state[parameter]
    return train(model, new, 2)


@each_value(
    {
        "writer, reader": [*((item, item) for item in LAYOUTS), ("fsdp2", "zero"), ("zero", "fsdp1")],
        "grouped": [False, True],
    }
)
def test_a_parameter_that_is_unfrozen_costs_the_others_nothing(
    ranks: Ranks, tmp_path: Path, writer: str, reader: str, grouped: bool
) -> None:
    ranks(LAYOUTS[writer], save, str(tmp_path), writer, BODY)
    for losses, restored in ranks(LAYOUTS[reader], go_on, str(tmp_path), reader, [], grouped):
        if AVERAGES_GRADIENTS or "fsdp2" not in {writer, reader}:
            assert losses == pytest.approx(expected(BODY, [], grouped), rel=1e-5)
        assert [name for name in restored.missing if name != "rng"] == [f"optimizer/{name}" for name in BODY]
        assert (restored.unexpected, "model" in restored.exact) == ((), True)
        assert "optimizer" not in restored.exact + restored.reconstructed


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_parameter_that_is_frozen_costs_the_others_nothing(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    ranks(LAYOUTS[layout], save, str(tmp_path), layout, [])
    for losses, restored in ranks(LAYOUTS[layout], go_on, str(tmp_path), layout, BODY, False):
        assert losses == pytest.approx(expected([], BODY, grouped=False), rel=1e-5)
        assert restored.unexpected == tuple(f"optimizer/{name}" for name in BODY)


def refused(path: str, layout: str, frozen: list[str]) -> str:
    model, optimizer = build(layout, frozen, grouped=False)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(OptimizerMismatchError) as raised:
        rankless.load_checkpoint(path, None, model, optimizer)
    assert not optimizer.state
    assert all(torch.equal(own, was) for own, was in zip(model.parameters(), before, strict=True))
    return str(raised.value)


@pytest.mark.parametrize("layout", ["plain", "zero", "fsdp2"])
def test_strict_names_parameters_on_one_side_and_the_way_out(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    ranks(LAYOUTS[layout], save, str(tmp_path / "head"), layout, BODY)
    ranks(LAYOUTS[layout], save, str(tmp_path / "all"), layout, [])
    (message,) = set(ranks(LAYOUTS[layout], refused, str(tmp_path / "head"), layout, []))
    assert "trains '0.bias', '0.weight', and the checkpoint has no optimizer state of them" in message
    assert "strict=False" in message
    (message,) = set(ranks(LAYOUTS[layout], refused, str(tmp_path / "all"), layout, BODY))
    assert "optimizer state of '0.bias', '0.weight', which this optimizer does not train" in message
    assert "strict=False" in message


def test_parameters_that_are_added_and_removed_are_told_with_the_models(tmp_path: Path) -> None:
    def make(**layers: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ModuleDict(layers)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = make(a=nn.Linear(2, 2), b=nn.Linear(2, 2))
    (model["a"](torch.ones(2)) + model["b"](torch.ones(2))).sum().backward()
    optimizer.step()
    rankless.save_checkpoint(tmp_path, "s", model, optimizer)
    other, fresh = make(a=nn.Linear(2, 2), c=nn.Linear(2, 2, bias=False))
    with pytest.raises(MismatchError, match=r"(?s)trains 'c\.weight'.*strict=False.*missing.*: c\.weight.*b\.bias"):
        rankless.restore(tmp_path, None, other, fresh)
    restored = rankless.restore(tmp_path, None, other, fresh, strict=False)
    assert restored.missing == ("c.weight", "optimizer/c.weight")
    gone = ("b.bias", "b.weight")
    assert sorted(restored.unexpected) == sorted([*gone, *(f"optimizer/{name}" for name in gone)])
    for mine, theirs in zip(other["a"].parameters(), model["a"].parameters(), strict=True):
        assert torch.equal(fresh.state[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"])
    assert other["c"].weight not in fresh.state


def split(*rates: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net([])
    parts: list[Any] = [model.parameters()] if len(rates) == 1 else [part.parameters() for part in model]
    groups = [{"params": list(part), "lr": rate} for part, rate in zip(parts, rates, strict=True)]
    return model, torch.optim.AdamW(groups)


@pytest.mark.parametrize(("saved", "here"), [((0.1,), (0.2, 0.3)), ((0.2, 0.3), (0.1,))])
def test_other_groups_keep_their_own_settings_and_get_all_states(
    tmp_path: Path, saved: tuple[float, ...], here: tuple[float, ...]
) -> None:
    model, optimizer = split(*saved)
    train(model, optimizer, 0)
    rankless.save_checkpoint(tmp_path, "s", model, optimizer)
    other, fresh = split(*here)
    with pytest.raises(OptimizerMismatchError, match="group parameters as when it was saved"):
        rankless.restore(tmp_path, None, other, fresh)
    restored = rankless.restore(tmp_path, None, other, fresh, strict=False)
    assert restored.missing == tuple(f"optimizer: settings of group {number}" for number in range(len(here)))
    assert [group["lr"] for group in fresh.param_groups] == list(here)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(fresh.state[mine]["exp_avg_sq"], optimizer.state[theirs]["exp_avg_sq"])


def test_by_their_places_alone_nobody_can_tell_which_parameters_are_new(tmp_path: Path) -> None:
    model, optimizer = build("plain", HEAD, grouped=False)
    train(model, optimizer, 0)
    rankless.save_optimizer(optimizer, tmp_path / "o.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    for file in ("o.safetensors", "o.pt"):
        for strict in (True, False):
            with pytest.raises(OptimizerMismatchError, match="pass the model"):
                rankless.load_optimizer(build("plain", [], grouped=False)[1], tmp_path / file, strict=strict)
    rankless.save_optimizer(optimizer, tmp_path / "named.safetensors", model=model)
    other, fresh = build("plain", [], grouped=False)
    with pytest.raises(OptimizerMismatchError, match="strict=False"):
        rankless.load_optimizer(fresh, tmp_path / "named.safetensors", model=other)
    restored = rankless.load_optimizer(fresh, tmp_path / "named.safetensors", model=other, strict=False)
    assert restored.missing == tuple(f"optimizer/{name}" for name in HEAD)


def start_sequence(optimizer: torch.optim.Optimizer) -> Any:
    links = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.StepLR(optimizer, 2)]
    return lr_scheduler.SequentialLR(optimizer, links, milestones=[2])


def of_groups(groups: int, start: Callable[[torch.optim.Optimizer], Any]) -> tuple[Any, Any, Any]:
    model, optimizer = build("plain", BODY if groups == 1 else [], groups == 2)
    return model, optimizer, start(optimizer)


STARTS = [start_sequence, lr_scheduler.ReduceLROnPlateau]


@pytest.mark.parametrize("start", STARTS)
def test_a_scheduler_of_other_groups_is_refused_before_it_fails_in_a_step(
    tmp_path: Path, start: Callable[[torch.optim.Optimizer], Any]
) -> None:
    rankless.save_checkpoint(tmp_path, "s", *of_groups(1, start))
    with pytest.raises(MismatchError, match="scheduler: of 1 parameter groups in the checkpoint, of 2 here"):
        rankless.restore(tmp_path, None, *of_groups(2, start), strict=False)


@pytest.mark.parametrize("start", STARTS)
def test_groups_of_one_schedule_may_be_one_group(tmp_path: Path, start: Callable[[torch.optim.Optimizer], Any]) -> None:
    rankless.save_checkpoint(tmp_path, "s", *of_groups(2, start))
    model, optimizer, scheduler = of_groups(1, start)
    assert "scheduler" in rankless.restore(tmp_path, None, model, optimizer, scheduler, strict=False).exact
    optimizer.step()
    scheduler.step(*([1.0] if start is lr_scheduler.ReduceLROnPlateau else []))


# ---------------------------------------------------------------------------------------------------------------
# Learning rates that are tensors


def two(make: Callable[[], list[torch.Tensor]]) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    rates = make()
    return torch.optim.AdamW([{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates], foreach=False)


def apart() -> list[torch.Tensor]:
    return [torch.tensor(1e-3), torch.tensor(5e-5)]


def shared() -> list[torch.Tensor]:
    return [torch.tensor(0.7)] * 2


def test_groups_that_share_a_learning_rate_get_one_each_as_torch_gives_them(tmp_path: Path) -> None:
    saved, ours, torchs = two(apart), two(shared), two(shared)
    rankless.save_checkpoint(tmp_path, "s", optimizer=saved)
    rankless.load_checkpoint(tmp_path, optimizer=ours)
    torchs.load_state_dict(saved.state_dict())
    rates = [[group["lr"] for group in item.param_groups] for item in (ours, torchs)]
    assert rates[0] == rates[1]
    assert all(isinstance(rate, torch.Tensor) for rate in rates[0])
    assert rates[0][0] is not rates[0][1]


def test_optimizers_that_share_a_learning_rate_get_one_each(tmp_path: Path) -> None:
    def make(rates: list[torch.Tensor]) -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
        models = {name: nn.Linear(1, 1) for name in ("a", "b")}
        optimizers = zip(models.items(), rates, strict=True)
        return models, {
            name: torch.optim.AdamW(optimizer.parameters(), lr=rate) for (name, optimizer), rate in optimizers
        }

    rankless.save_checkpoint(tmp_path, "s", *make(apart()))
    models, optimizers = make(shared())
    rankless.load_checkpoint(tmp_path, None, models, optimizers)
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers.values()] == apart()


def test_a_learning_rate_of_one_group_alone_stays_where_it_is(tmp_path: Path) -> None:
    """A captured step reads it there."""
    rankless.save_checkpoint(tmp_path, "s", optimizer=two(apart))
    ours = two(lambda: [torch.tensor(0.7), torch.tensor(0.8)])
    before = [group["lr"] for group in ours.param_groups]
    rankless.load_checkpoint(tmp_path, optimizer=ours)
    assert [group["lr"] for group in ours.param_groups] == apart()
    assert all(group["lr"] is own for group, own in zip(ours.param_groups, before, strict=True))
