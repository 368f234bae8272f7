"""Tests lists of models, dicts of separate objects, and state dicts in their place."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import rankless
from rankless.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    MismatchError,
    OptimizerMismatchError,
    RankMismatchError,
    ReplicaMismatchError,
    StateError,
)
from tests.helpers.pool import Ranks
from tests.helpers.torch_limits import HAS_MUON


def net(seed: int = 0, *sizes: int) -> nn.Sequential:
    torch.manual_seed(seed)
    sizes = sizes or (4, 6, 3)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def step(*pairs: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    for model, optimizer in pairs:
        model(torch.ones(2, model[0].in_features)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **options)


def states(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [optimizer.state[p] for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]


def assert_same_states(left: torch.optim.Optimizer, right: torch.optim.Optimizer) -> None:
    assert len(states(left)) == len(states(right)) > 0
    for item, other in zip(states(left), states(right), strict=True):
        assert item.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in item.items())


def gan() -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
    models = {"gen": net(1), "disc": net(2, 3, 5, 1)}
    return models, {"gen": adam(models["gen"], lr=0.1), "disc": torch.optim.SGD(models["disc"].parameters(), 0.2, 0.9)}


def test_separate_models_get_folders_of_their_own(tmp_path: Path) -> None:
    models, optimizers = gan()
    step(*((models[name], optimizers[name]) for name in models))
    rankless.save_checkpoint(tmp_path, "s", models, optimizers)
    on_disk = load_file(tmp_path / "s/model/gen/model.safetensors")
    assert all(torch.equal(on_disk[name], tensor) for name, tensor in models["gen"].state_dict().items())
    assert set(load_file(tmp_path / "s/optimizer/disc/optimizer.safetensors")) == {
        f"{name}/momentum_buffer" for name in models["disc"].state_dict()
    }
    again, fresh = gan()
    rankless.load_checkpoint(tmp_path, model=again, optimizer=fresh)
    for name in models:
        assert_same_states(fresh[name], optimizers[name])
    alone = net(9)
    rankless.load_checkpoint(tmp_path, model={"gen": alone})
    assert torch.equal(alone[0].weight, models["gen"][0].weight)
    with pytest.raises(MismatchError, match=r"model/|missing"):
        rankless.load_checkpoint(tmp_path, model={"other": net(9)})


def test_an_optimizer_of_several_models_names_their_parameters_apart(tmp_path: Path) -> None:
    models = {"a": net(1), "b": net(2)}
    together = torch.optim.AdamW([*models["a"].parameters(), *models["b"].parameters()])
    step((models["a"], together), (models["b"], together))
    rankless.save_checkpoint(tmp_path, "s", models, together)
    assert "a/0.weight/exp_avg" in load_file(tmp_path / "s/optimizer/optimizer.safetensors")
    again = {"a": net(8), "b": net(9)}
    fresh = torch.optim.AdamW([*again["b"].parameters(), *again["a"].parameters()])
    rankless.load_checkpoint(tmp_path, model=again, optimizer=fresh)
    for mine, other in zip(again["b"].parameters(), models["b"].parameters(), strict=True):
        assert torch.equal(fresh.state[mine]["exp_avg"], together.state[other]["exp_avg"])


def muon_and_adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return [
        (torch.optim.Muon if HAS_MUON else torch.optim.NAdam)(matrices, lr=0.1),
        torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], lr=0.2),
    ]


def test_several_optimizers_of_one_model_keep_their_classes_and_settings(tmp_path: Path) -> None:
    model = net()
    optimizers = muon_and_adam(model)
    step(*((model, optimizer) for optimizer in optimizers))
    rankless.save_checkpoint(tmp_path, "s", model, optimizers)
    again = net(5)
    fresh = muon_and_adam(again)
    for optimizer in fresh:
        optimizer.param_groups[0]["lr"] = 7
    rankless.load_checkpoint(tmp_path, model=again, optimizer=fresh[::-1])
    assert [optimizer.param_groups[0]["lr"] for optimizer in fresh] == [0.1, 0.2]
    for mine, other in zip(fresh, optimizers, strict=True):
        assert_same_states(mine, other)
    with pytest.raises(OptimizerMismatchError, match=r"different groups|state of"):
        rankless.load_checkpoint(tmp_path, model=again, optimizer=adam(again))
    with pytest.raises(OptimizerMismatchError, match="does not train"):
        rankless.load_checkpoint(tmp_path, model=again, optimizer=fresh[0])


def test_state_dicts_are_saved_as_the_objects_are_and_filled_in_place(tmp_path: Path) -> None:
    model = net()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    step((model, optimizer))
    scheduler.step()
    given = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    rankless.save_checkpoint(tmp_path, "s", **given)
    other = net(7)
    stepped = adam(other, lr=0.5)
    step((other, stepped))
    empty = {**adam(net(8)).state_dict(), "state": {}}
    rankless.load_checkpoint(tmp_path, optimizer=empty)
    assert torch.equal(empty["state"][0]["exp_avg"], given["optimizer"]["state"][0]["exp_avg"])
    targets = {"model": other.state_dict(), "optimizer": stepped.state_dict(), "scheduler": {}}
    rankless.load_checkpoint(tmp_path, **targets)
    assert all(torch.equal(targets["model"][name], tensor) for name, tensor in given["model"].items())
    for number, states in given["optimizer"]["state"].items():
        assert all(torch.equal(targets["optimizer"]["state"][number][name], t) for name, t in states.items())
    assert targets["optimizer"]["param_groups"] == given["optimizer"]["param_groups"]
    assert targets["scheduler"] == given["scheduler"]


def test_an_optimizer_without_its_model_is_named_by_position_and_loads_likewise(tmp_path: Path) -> None:
    model = net()
    optimizer = adam(model)
    step((model, optimizer))
    rankless.save_checkpoint(tmp_path, "s", optimizer=optimizer)
    fresh = adam(net(4))
    rankless.load_checkpoint(tmp_path, optimizer=fresh)
    assert_same_states(fresh, optimizer)


def test_schedulers_of_parts_that_agree_are_one_and_load_into_any_number(tmp_path: Path) -> None:
    parts = [net(1), net(2)]
    optimizers = [torch.optim.SGD(part.parameters(), 0.5) for part in parts]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2) for optimizer in optimizers]
    for left, other in zip(optimizers, schedulers, strict=True):
        left.step()
        other.step()
    rankless.save_checkpoint(tmp_path, "s", scheduler=schedulers)
    assert rankless.open(tmp_path).values["scheduler"]["class"] == "StepLR"
    fresh = torch.optim.lr_scheduler.StepLR(optimizers[0], 2)
    rankless.load_checkpoint(tmp_path, scheduler=fresh)
    assert fresh.last_epoch == 1
    rankless.save_checkpoint(tmp_path, "t", scheduler={"warm": schedulers[0], "cold": schedulers[1]})
    assert {"scheduler/warm", "scheduler/cold"} <= rankless.open(tmp_path).values.keys()


def test_parts_of_a_model_may_share_what_is_equal_and_nothing_else(tmp_path: Path) -> None:
    first, last = nn.ModuleDict({"embed": net(1)}), nn.ModuleDict({"embed": net(1), "head": net(2)})
    rankless.save_checkpoint(tmp_path, "s", [first, last])
    again = [nn.ModuleDict({"embed": net(7)}), nn.ModuleDict({"embed": net(8), "head": net(9)})]
    rankless.load_checkpoint(tmp_path, model=again)
    for part in again:
        assert torch.equal(part["embed"][0].weight, first["embed"][0].weight)
    last["embed"][0].weight.data.add_(1)
    with pytest.raises(StateError, match=r"different values of 'embed\.0\.weight'"):
        rankless.save_checkpoint(tmp_path, "t", [first, last])
    with pytest.raises(StateError, match=r"different tensors named 'embed\.0\.weight'"):
        rankless.save_checkpoint(tmp_path, "t", [first, nn.ModuleDict({"embed": net(1, 5, 5)})])


@pytest.mark.parametrize("name", ["a/b", "", "..", 3])
def test_names_of_separate_models_are_names_of_folders(tmp_path: Path, name: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="dict of models"):
        rankless.save_checkpoint(tmp_path, "s", {name: net()})
    assert not list(tmp_path.iterdir())


def tied_over_stages(path: str, differ: bool) -> str:
    """The embedding of the first stage is the head of the last one, and both call it so."""
    rank = torch.distributed.get_rank()
    stage = nn.ModuleDict({"embed": net(1), f"body{rank // 2}": net(2)})
    if differ and rank > 1:
        stage["embed"][0].bias.data.add_(1)
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
    for part in stage.values():
        fully_shard(part, mesh=mesh)
    if differ:
        with pytest.raises(ReplicaMismatchError, match=r"'embed\.0\.bias'"):
            rankless.save_checkpoint(path, "t", stage)
        return "refused"
    rankless.save_checkpoint(path, "s", stage)
    return "saved"


def test_an_embedding_tied_over_two_stages_is_stored_once_and_proven_equal(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(4, tied_over_stages, str(tmp_path), False) == ["saved"] * 4
    loaded = load_file(tmp_path / "s/model/model.safetensors")
    assert torch.equal(loaded["embed.0.weight"], net(1)[0].weight)
    assert {name.partition(".")[0] for name in loaded} == {"embed", "body0", "body1"}
    assert ranks(4, tied_over_stages, str(tmp_path), True) == ["refused"] * 4


def unlike_settings(path: str) -> str:
    rank = torch.distributed.get_rank()
    model = nn.ModuleDict({"shared": net(1)})
    with pytest.raises(StateError, match=r"train '.*' with different settings"):
        rankless.save_checkpoint(path, "s", model, adam(model, lr=0.1 + rank))
    return "refused"


def test_ranks_that_train_one_parameter_with_different_settings_are_told(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, unlike_settings, str(tmp_path)) == ["refused"] * 2


def unlike_dicts(path: str) -> str:
    name = "gen" if torch.distributed.get_rank() else "disc"
    with pytest.raises(RankMismatchError, match=r"what is saved.*model/disc.*model/gen"):
        rankless.save_checkpoint(path, "s", {name: net()})
    return "refused"


def test_ranks_that_save_different_models_are_told(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, unlike_dicts, str(tmp_path)) == ["refused"] * 2


def test_damage_is_told_with_the_names_of_the_models_that_may_be_partly_filled(tmp_path: Path) -> None:
    models, optimizers = gan()
    rankless.save_checkpoint(tmp_path, "s", models, optimizers)
    file = tmp_path / "s/model/gen/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(
        CorruptCheckpointError, match=r"model/gen and model/disc and optimizer/gen .* may be partly filled"
    ):
        rankless.load_checkpoint(tmp_path, "s", models, optimizers)


def test_an_optimizer_names_the_parameters_of_its_own_model_as_that_does(tmp_path: Path) -> None:
    """Also where another model, which comes first, shares one."""
    first, second = net(1), net(2)
    second[0].weight = first[0].weight
    optimizer = torch.optim.SGD([second[0].weight], lr=1, momentum=0.9)
    optimizer.state[second[0].weight] = {"momentum_buffer": torch.ones(6, 4)}
    rankless.save_checkpoint(tmp_path, "s", {"a": first, "b": second}, {"b": optimizer})
    assert set(load_file(tmp_path / "s/optimizer/b/optimizer.safetensors")) == {"0.weight/momentum_buffer"}


class Together(torch.optim.Optimizer):
    """A container of optimizers that is one itself, with groups but no states: as torchtitan's is."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__(
            [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]], {}
        )

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)


def test_a_container_of_optimizers_is_a_list_of_them(tmp_path: Path) -> None:
    model, again = net(), net(5)
    optimizers, fresh = muon_and_adam(model), muon_and_adam(again)
    step(*((model, optimizer) for optimizer in optimizers))
    rankless.save_checkpoint(tmp_path, "s", model, Together(optimizers))
    rankless.load_checkpoint(tmp_path, model=again, optimizer=Together(fresh))
    for mine, other in zip(fresh, optimizers, strict=True):
        assert_same_states(mine, other)


def test_torchtitans_wrapper_of_a_model_is_the_model(tmp_path: Path) -> None:
    class ModelWrapper:
        __module__ = "torchtitan.components.checkpointer.base"
        __qualname__ = "ModelWrapper"

        def __init__(self, model: list[nn.Module]) -> None:
            self.model = model

    model, again = net(), net(5)
    optimizer, fresh = adam(model), adam(again)
    step((model, optimizer))
    rankless.save_checkpoint(tmp_path, "s", ModelWrapper([model]), optimizer)
    rankless.load_checkpoint(tmp_path, model=ModelWrapper([again]), optimizer=fresh)
    assert_same_states(fresh, optimizer)
    assert torch.equal(again[0].weight, model[0].weight)
