"""Tests of ranks that pass other objects, such as stages of a pipeline: what is stored, and what is refused."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import rankless
from tests.helpers.pool import Ranks
from tests.helpers.stateful import Counter

METERS: dict[str, list[dict[str, int]]] = {
    "only the last": [{}, {"loss": 3}],
    "other names": [{"embed": 1}, {"loss": 3}],
    "one in common": [{"both": 1}, {"both": 1, "loss": 3}],
    "only the first": [{"loss": 3}, {}],
}


def save_and_load_meters(path: str, kind: str) -> tuple[dict[str, Any], tuple[str, ...], list[str]]:
    rank = dist.get_rank()
    stage = nn.ModuleDict({"ab"[rank]: nn.Linear(2, 2)})
    meters = {name: Counter(value) for name, value in METERS[kind][rank].items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for tag in ("x", "y"):  # the second one knows what differs
            rankless.save_checkpoint(path, tag, stage, stateful=meters)
    for meter in meters.values():
        meter.count = 0
    restored = rankless.restore(path, "y", stage, stateful=meters)
    values = {name: meter.count for name, meter in meters.items()}
    return values, restored.exact, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("kind", METERS)
def test_stateful_objects_of_any_rank_are_stored(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    outcomes = ranks(2, save_and_load_meters, str(tmp_path), kind)
    assert [values for values, *_ in outcomes] == METERS[kind]
    assert all("stateful" in exact for _, exact, _ in outcomes)
    has_more = bool(METERS[kind][1].keys() - METERS[kind][0].keys())
    assert any("stateful/loss" in text for text in outcomes[0][2]) == has_more


def test_another_number_of_ranks_names_what_it_has_not(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_and_load_meters, str(tmp_path), "only the last")
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in "ab"})
    with pytest.raises(rankless.MismatchError, match="loss"):
        rankless.restore(tmp_path, "y", model, stateful={"loss": Counter()})


def tied(order: str, is_tied: bool = True) -> nn.Module:
    module = nn.Module()
    weight = nn.Parameter(nn.Linear(2, 2).weight.detach().fill_(1.0))
    for name in order.split():
        layer = nn.Linear(2, 2, bias=False)
        layer.weight = weight if is_tied else nn.Parameter(weight.detach().clone())
        module.add_module(name, layer)
    return module


TIES: dict[str, list[nn.Module]] = {
    "a copy on the other rank": [tied("embed head"), tied("head")],
    "another order": [tied("embed head"), tied("head embed")],
    "untied replica": [tied("embed head"), tied("embed head", is_tied=False)],
    "a chain": [tied("a b"), tied("b c")],
    "another name": [tied("a b"), tied("c b")],
}


def save_tied(path: str, kind: str, component: bool) -> str:
    model = TIES[kind][dist.get_rank()]
    try:
        if component:
            rankless.save_model(model, f"{path}/model")
        else:
            rankless.save_checkpoint(path, "x", model)
    except rankless.RankMismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("component", [False, True])
@pytest.mark.parametrize("kind", TIES)
def test_a_save_that_no_load_could_read_is_refused(ranks: Ranks, tmp_path: Path, kind: str, component: bool) -> None:
    """A file cannot have a name as a tensor, and as a further name of another one."""
    messages = ranks(2, save_tied, str(tmp_path), kind, component)
    assert all("is one tensor with" in message for message in messages), messages
    assert rankless.list_checkpoints(tmp_path) == []


def call_with_empty_list(path: str, argument: str, loads: bool) -> tuple[str, float]:
    model = nn.Linear(2, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    rankless.save_checkpoint(path, "x", **objects, overwrite=True)
    given = objects | ({argument: []} if dist.get_rank() else {})
    began = time.monotonic()
    call = rankless.restore if loads else rankless.save_checkpoint
    with pytest.raises(rankless.InvalidArgumentError) as caught:
        call(path, "x", **given, timeout=60.0)
    return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize("loads", [False, True])
def test_a_list_without_objects_on_one_rank_is_an_error_of_all(ranks: Ranks, tmp_path: Path, loads: bool) -> None:
    for message, seconds in ranks(2, call_with_empty_list, str(tmp_path), "model", loads):
        assert "model is a list without objects" in message
        assert seconds < 30


class Counting(optim.SGD):
    """Counts something in its own state dict."""

    calls = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self.calls = state.pop("calls")
        super().load_state_dict(state)


def count_in_an_empty_stage(path: str) -> tuple[tuple[str, ...], int]:
    rank = dist.get_rank()
    stage = nn.ModuleDict({} if rank else {"a": nn.Linear(2, 2)})
    optimizer = Counting([{"params": [*stage.parameters()]}], lr=0.1)
    optimizer.calls = 5 + rank
    rankless.save_checkpoint(path, "x", stage, optimizer)
    optimizer.calls = 0
    return rankless.restore(path, None, stage, optimizer).exact, optimizer.calls


def test_the_optimizer_of_an_empty_stage_keeps_its_own_values(ranks: Ranks, tmp_path: Path) -> None:
    for rank, (exact, calls) in enumerate(ranks(2, count_in_an_empty_stage, str(tmp_path))):
        assert "optimizer" in exact
        assert calls == 5 + rank


def register_late(path: str) -> tuple[tuple[str, ...], float]:
    """Save with an object that only rank 1 has, and resume with one on each rank that is registered afterwards."""
    model, other = nn.Linear(2, 2), Counter(1)
    with rankless.Checkpointer(path, model=model, save_every=1, signals=()) as checkpointer:
        checkpointer.register("other", other)
        if dist.get_rank():
            checkpointer.register("mine", Counter(5))
        checkpointer.resume()
        checkpointer.step(1)
    mine, began = Counter(0), time.monotonic()
    checkpointer = rankless.Checkpointer(path, model=model, stateful={"other": other}, timeout=60.0, signals=())
    checkpointer.resume()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        checkpointer.register("mine", mine)
    assert checkpointer.restored is not None
    assert time.monotonic() - began < 30
    return checkpointer.restored.not_requested, mine.count


def test_an_object_of_one_rank_may_be_registered_on_all_ranks_after_a_load(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, register_late, str(tmp_path)) == [(("stateful/mine",), 0), (("stateful/mine",), 5)]


def save_with_metrics(path: str, passing: int) -> list[str]:
    metrics = {"loss": 0.5} if dist.get_rank() == passing else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rankless.save_checkpoint(path, f"from_{passing}", {"w": torch.ones(2)}, metrics=metrics)
    return [str(warning.message) for warning in caught]


def test_metrics_that_rank_0_lacks_are_named(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, save_with_metrics, str(tmp_path), 0) == [[], []]
    (message,), none = ranks(2, save_with_metrics, str(tmp_path), 1)
    assert "rank 1 passed metrics, and rank 0, whose metrics are saved, passed none" in message
    assert none == []
    assert [info.metrics for info in rankless.list_checkpoints(tmp_path)] == [{"loss": 0.5}, {}]


def restore_with_a_tier_on_rank_1(path: str, call: str) -> tuple[str, float]:
    model = nn.Linear(2, 2)
    rankless.save_checkpoint(path, "x", model, step=1, overwrite=True)
    local = {"local": f"{path}/tier"} if dist.get_rank() else {}
    began = time.monotonic()
    calls = {
        "restore": lambda: rankless.restore(path, None, model, timeout=60.0, **local),
        "resume": lambda: rankless.Checkpointer(path, model=model, timeout=60.0, signals=(), **local).resume(),
    }
    with pytest.raises(rankless.RankMismatchError) as caught:
        calls[call]()
    return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize("call", ["restore", "resume"])
def test_a_local_tier_on_one_rank_is_an_error_of_all(ranks: Ranks, tmp_path: Path, call: str) -> None:
    """Each rank begins with another vote: neither takes the other's message for its own."""
    for message, seconds in ranks(2, restore_with_a_tier_on_rank_1, str(tmp_path), call):
        assert "ranks disagree about the call: rank 0 is finding the checkpoint to load, rank 1 is" in message
        assert "local=" in message
        assert seconds < 30
