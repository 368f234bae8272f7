"""Tests that any number of ranks, in any layout, save the same state as the same files, byte for byte."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import rankless
from tests.helpers.file_contents import read_state_files
from tests.helpers.pool import Ranks
from tests.helpers.training import train_run

CASES = [(layout, n) for layout in ("ddp", "fsdp") for n in (1, 2, 3, 4)]


def save(path: str, layout: str, optimizer: str) -> None:
    run = train_run(layout, optimizer)
    content = {"epoch": 1, "losses": (1.5, float("inf"))}
    rankless.save_checkpoint(path, "s", run.model, run.optimizer, run.scheduler, content, step=3, max_shard_size=600)


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_files_do_not_depend_on_the_ranks(ranks: Ranks, tmp_path: Path, optimizer: str) -> None:
    save(str(tmp_path / "plain"), "plain", optimizer)
    expected = read_state_files(tmp_path / "plain/s")
    assert {"model/model.safetensors.index.json", "optimizer/optimizer.safetensors.index.json", "state.json"} <= set(
        expected
    )
    for layout, n in CASES:
        path = tmp_path / f"{layout}{n}"
        ranks(n, save, str(path), layout, optimizer)
        assert read_state_files(path / "s") == expected, (layout, n)


def test_two_saves_of_one_state_are_equal(tmp_path: Path) -> None:
    for name in "ab":
        save(str(tmp_path / name), "plain", "adamw")
    assert read_state_files(tmp_path / "a/s") == read_state_files(tmp_path / "b/s")


class Stage(nn.Module):
    """One stage of a pipeline: a module with a state beside its tensors, under a name that JSON has to escape."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.weight = nn.Parameter(torch.full((3,), float(number)))

    def get_extra_state(self) -> Any:
        return {"number": self.number}

    def set_extra_state(self, state: Any) -> None:
        self.number = state["number"]


def save_stages(path: str) -> None:
    """Twelve stages in an order that is not that of their names: all of them here, or every rank its own."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    stages = [(f"$stage{n}", Stage(n)) for n in range(12, 0, -1) if n % size == rank]
    model = nn.ModuleDict(dict(stages))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD([{"params": parameters[1:]}, {"params": parameters[:1], "lr": 0.5}])
    if size == 1:
        first = [stage.weight for _, stage in stages if stage.number not in LAST]
        last = [stage.weight for _, stage in stages if stage.number in LAST]
        optimizer = torch.optim.SGD([{"params": first}, {"params": last, "lr": 0.5}])
    for parameter in parameters:
        optimizer.state[parameter] = {"count": int(parameter[0])}
    rankless.save_checkpoint(path, "s", model, optimizer, rng=False)


#: Of each of three ranks, the stage that comes first.
LAST = {12, 11, 10}


def test_files_do_not_depend_on_which_stage_of_a_pipeline_is_where(ranks: Ranks, tmp_path: Path) -> None:
    save_stages(str(tmp_path / "whole"))
    ranks(3, save_stages, str(tmp_path / "stages"))
    assert read_state_files(tmp_path / "stages/s") == read_state_files(tmp_path / "whole/s")
    values = rankless.open(tmp_path / "stages").values
    assert values["model"] == {f"$stage{n}._extra_state": {"number": n} for n in range(1, 13)}


def save_and_swap(path: str) -> torch.Tensor:
    """Save, become the other rank of a new group, save again; what the second checkpoint holds."""
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    for number, own in enumerate((rank, 1 - rank)):
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.PrefixStore(f"g{number}", store), rank=own, world_size=2)
        model = nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.arange(16.0).view(4, 4))
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
        rankless.save_checkpoint(path, f"s{number}", model)
    return rankless.open(f"{path}/s1")["model/weight"]


def test_a_process_that_became_another_rank_plans_anew(ranks: Ranks, tmp_path: Path) -> None:
    for saved in ranks(2, save_and_swap, str(tmp_path)):
        assert torch.equal(saved, torch.arange(16.0).view(4, 4))
