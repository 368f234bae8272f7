"""Tests that any world size and layout loads what any other saved, bit for bit as a single process does."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankless
from tests.helpers.pairwise import each_value
from tests.helpers.pool import Ranks
from tests.helpers.training import Run, assert_equal, gather_run, start_run, train_run

WRITERS = [("plain", 1), ("ddp", 2), ("fsdp", 3), ("fsdp", 4)]
#: In such an order that ``each_value`` takes another layout or number of ranks for each writer.
READERS = [("fsdp", 3), ("plain", 1), ("fsdp", 4), ("fsdp", 2), ("ddp", 3)]


def save(path: str, layout: str, optimizer: str) -> None:
    run = train_run(layout, optimizer)
    rankless.save_checkpoint(path, "s", run.model, run.optimizer, run.scheduler, {"n": 3})


def load(path: str, layout: str, optimizer: str, *, stepped: bool) -> tuple[dict[str, torch.Tensor], Any, Any]:
    run = start_run(layout, optimizer, seed=9)
    if stepped:
        run.step(5)
    result = rankless.restore(path, model=run.model, optimizer=run.optimizer, scheduler=run.scheduler)
    assert result.verified
    assert result.user_content == {"n": 3}
    return gather_run(run), groups(run), run.scheduler.state_dict()


def groups(run: Run) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in run.optimizer.param_groups]


@each_value({"writer": WRITERS, "reader": READERS})
def test_any_layout_loads_any_other(
    ranks: Ranks, tmp_path: Path, writer: tuple[str, int], reader: tuple[str, int]
) -> None:
    oracle = train_run("plain")
    ranks(writer[1], save, str(tmp_path), writer[0], "adamw")
    for tensors, result, schedule in ranks(reader[1], _load_fresh, str(tmp_path), reader[0], "adamw"):
        assert_equal(tensors, gather_run(oracle))
        assert result == groups(oracle)
        assert schedule == oracle.scheduler.state_dict()


def _load_fresh(path: str, layout: str, optimizer: str) -> Any:
    return load(path, layout, optimizer, stepped=False)


def _load_stepped(path: str, layout: str, optimizer: str) -> Any:
    return load(path, layout, optimizer, stepped=True)


@each_value({"optimizer": ["momentum", "adamw", "sgd"], "loader": [_load_fresh, _load_stepped]})
def test_every_optimizer_comes_back_with_and_without_state_of_its_own(
    ranks: Ranks, tmp_path: Path, optimizer: str, loader: Any
) -> None:
    oracle = train_run("plain", optimizer)
    ranks(2, save, str(tmp_path), "fsdp", optimizer)
    for layout, n in (("plain", 1), ("fsdp", 3)):
        for tensors, result, _ in ranks(n, loader, str(tmp_path), layout, optimizer):
            assert_equal(tensors, gather_run(oracle))
            assert result == groups(oracle)


def save_fresh(path: str, layout: str) -> int:
    run = start_run(layout)
    rankless.save_checkpoint(path, "s", run.model, run.optimizer)
    return len(run.optimizer.state)


def test_an_optimizer_that_never_stepped_is_not_stepped_by_us(ranks: Ranks, tmp_path: Path) -> None:
    before = start_run("plain")
    assert ranks(2, save_fresh, str(tmp_path), "fsdp") == [0, 0]
    run = start_run("plain", seed=3)
    run.step(0)
    rankless.load_checkpoint(tmp_path, model=run.model, optimizer=run.optimizer)
    assert not run.optimizer.state
    assert_equal(gather_run(run), gather_run(before))
    assert not [key for key in rankless.open(tmp_path) if key.startswith("optimizer/")]


class Scaled(nn.Linear):
    """A layer with extra state that is a tensor."""

    amax = torch.zeros(3)

    def get_extra_state(self) -> torch.Tensor:
        return self.amax

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.amax = state


class Outer(nn.Module):
    def __init__(self, *, ddp: bool) -> None:
        super().__init__()
        self.sub = DistributedDataParallel(nn.Sequential(Scaled(2, 2))) if ddp else nn.Sequential(Scaled(2, 2))


def layer(model: Outer) -> Scaled:
    return next(module for module in model.modules() if isinstance(module, Scaled))


def extra_state_under_ddp(path: str) -> torch.Tensor:
    model = Outer(ddp=True)
    rankless.load_checkpoint(path, model=model)
    return layer(model).amax


def test_extra_state_that_is_a_tensor_comes_back_also_inside_a_wrapped_part(ranks: Ranks, tmp_path: Path) -> None:
    model = Outer(ddp=False)
    layer(model).amax = torch.tensor([1.0, 2.0, 3.0])
    rankless.save_checkpoint(tmp_path, "s", model)
    assert ranks(2, extra_state_under_ddp, str(tmp_path))[1].tolist() == [1.0, 2.0, 3.0]
