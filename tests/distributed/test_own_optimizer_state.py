"""Tests of what optimizers keep beside states and settings, on several ranks."""

import warnings
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import rankless
from rankless.errors import MismatchError, UnsupportedValueError
from tests.helpers.pool import Ranks


class Averaging(optim.SGD):
    """Keeps a number by its own state dict."""

    average = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = state_dict.pop("average")
        super().load_state_dict(state_dict)


class Lazy(optim.SGD):
    """Keeps a number once it has one."""

    average: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **({} if self.average is None else {"average": self.average})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = state_dict.pop("average", None)
        super().load_state_dict(state_dict)


def save_and_resume(path: str, kind: str) -> tuple[Any, ...]:
    """Save with a number of each rank, and load it again. Return the report, the number, and the warnings."""
    rank = dist.get_rank()
    model = nn.ModuleDict({f"stage{rank if kind == 'stages' else 0}": nn.Linear(2, 2)})
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    optimizer = Averaging(model.parameters(), lr=0.1)
    if kind == "some":
        optimizer = Lazy(model.parameters(), lr=0.1)
    if kind != "some" or rank == 0:
        optimizer.average = 5.0 if kind == "equal" else 5.0 + rank
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rankless.save_checkpoint(path, "a", model, optimizer)
    optimizer.average = 0.0
    restored = rankless.restore(path, None, model, optimizer)
    return restored.exact, restored.reconstructed, optimizer.average, [str(warning.message) for warning in caught]


def test_each_stage_of_a_pipeline_gets_its_own_values(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = ranks(2, save_and_resume, str(tmp_path), "stages")
    assert [average for _, _, average, _ in outcomes] == [5.0, 6.0]
    assert all("optimizer" in exact and not texts for exact, _, _, texts in outcomes)


def test_equal_values_are_exact(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = ranks(2, save_and_resume, str(tmp_path), "equal")
    assert all("optimizer" in exact and not texts for exact, _, _, texts in outcomes)


def test_replicas_with_different_values_are_reconstructed_with_a_warning(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = ranks(2, save_and_resume, str(tmp_path), "replicas")
    for exact, reconstructed, average, _ in outcomes:
        assert "optimizer" not in exact
        assert "optimizer" in reconstructed
        assert average == 5.0
    assert ["keep different values" in " ".join(texts) for *_, texts in outcomes] == [True, False]


def test_values_that_only_some_replicas_have_are_reconstructed(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = ranks(2, save_and_resume, str(tmp_path), "some")
    assert [(exact, average) for exact, _, average, _ in outcomes] == [(("model", "rng"), 5.0)] * 2


def save_lazy_stages(path: str) -> None:
    model = nn.ModuleDict({f"stage{dist.get_rank()}": nn.Linear(2, 2)})
    optimizer = Lazy(model.parameters(), lr=0.1)
    optimizer.average = 5.0 + dist.get_rank()
    rankless.save_checkpoint(path, "a", model, optimizer)


def test_different_values_of_stages_are_refused_by_an_optimizer_of_all(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_lazy_stages, str(tmp_path))
    model = nn.ModuleDict({f"stage{number}": nn.Linear(2, 2) for number in range(2)})
    with pytest.raises(MismatchError, match="keeps values"):
        rankless.restore(str(tmp_path), None, model, Lazy(model.parameters(), lr=0.1))


class Delayed(optim.SGD):
    """Keeps gradients of the last steps in collections, and numbers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["queue"] = deque([torch.zeros_like(parameter)] * 2, maxlen=2)
                state["averages"] = {0.5: torch.zeros_like(parameter), 0.9: [torch.zeros_like(parameter), 0]}
                state["weight"] = torch.zeros(1)
            parameter.sub_(state["queue"][0], alpha=0.1)
            state["queue"].append(parameter.grad.clone())
            state["averages"][0.5].lerp_(parameter.grad, 0.5)
            state["averages"][0.9][0].lerp_(parameter.grad, 0.1)
            state["averages"][0.9][1] += 1
            state["weight"] += 1


def whole(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return (tree.full_tensor() if isinstance(tree, DTensor) else tree).tolist()
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    return [type(tree).__name__, *map(whole, tree)] if isinstance(tree, list | tuple | deque) else tree


def delay(path: str, has_checkpoint: bool) -> Any:
    """Train and save on several ranks, or load on any number. Return the states after it, and those a step later."""
    model: Any = nn.Linear(4, 6)
    if dist.get_world_size() > 1:
        model = fully_shard(model)
    optimizer = Delayed(model.parameters())
    for number in range(3 if not has_checkpoint else 0):
        step_by_numbers(model, optimizer, number)
    if has_checkpoint:
        assert "optimizer" in rankless.restore(path, None, model, optimizer).exact
    else:
        rankless.save_checkpoint(path, "a", model, optimizer)
    states = [whole(optimizer.state[parameter]) for parameter in model.parameters()]
    step_by_numbers(model, optimizer, 3)
    return states, [whole(parameter) for parameter in model.parameters()]


def step_by_numbers(model: nn.Module, optimizer: optim.Optimizer, number: int) -> None:
    for parameter in model.parameters():
        grad = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape) + number
        is_sharded = isinstance(parameter, DTensor)
        parameter.grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements) if is_sharded else grad
    optimizer.step()


@pytest.mark.parametrize("saver", [1, 2])
def test_tensors_in_collections_are_divided_like_their_parameter(ranks: Ranks, tmp_path: Path, saver: int) -> None:
    expected = ranks(saver, delay, str(tmp_path), False)[0]
    for loader in (1, 3):
        assert ranks(loader, delay, str(tmp_path), True) == [expected] * loader


class Clearing(optim.SGD):
    """Sets its averages of gradients to zero when it has loaded them."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for states in self.state.values():
            states["momentum_buffer"].zero_()


def resume_cleared(path: str) -> tuple[str, ...]:
    model = nn.Linear(4, 4)
    fully_shard(model)
    optimizer = Clearing(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    rankless.save_checkpoint(path, "a", model, optimizer)
    return rankless.restore(path, None, model, optimizer).reconstructed


def test_sharded_states_that_the_optimizer_changes_while_it_loads_are_reconstructed(
    ranks: Ranks, tmp_path: Path
) -> None:
    for reconstructed in ranks(2, resume_cleared, str(tmp_path)):
        assert "optimizer" in reconstructed


def resume_with_states_of(path: str, holders: list[int], kind: str) -> tuple[Any, ...]:
    """Save with a state that only some ranks have, and load it. Return the report, this state, and the warnings."""
    rank = dist.get_rank()
    model = nn.Linear(2, 2) if kind == "replicas" else nn.ModuleDict({f"stage{rank}": nn.Linear(2, 2)})
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    if rank in holders:
        optimizer.state[next(model.parameters())]["count"] = torch.tensor(3.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rankless.save_checkpoint(path, "a", model, optimizer)
        restored = rankless.restore(path, None, model, optimizer)
    count = optimizer.state[next(model.parameters())].get("count")
    return restored.exact, restored.reconstructed, count, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("holders", [[0], [1]])
def test_a_state_that_only_some_replicas_have_is_not_exact(ranks: Ranks, tmp_path: Path, holders: list[int]) -> None:
    outcomes = ranks(2, resume_with_states_of, str(tmp_path), holders, "replicas")
    for exact, reconstructed, count, _ in outcomes:
        assert "optimizer" not in exact
        assert "optimizer" in reconstructed
        assert count == 3.0
    assert ["optimizer/names of states" in text for text in outcomes[0][3]] == [True, True]


@pytest.mark.parametrize(("holders", "kind"), [([0, 1], "replicas"), ([1], "stages")])
def test_states_that_all_ranks_of_a_parameter_have_are_exact(
    ranks: Ranks, tmp_path: Path, holders: list[int], kind: str
) -> None:
    for exact, _, _, texts in ranks(2, resume_with_states_of, str(tmp_path), holders, kind):
        assert "optimizer" in exact
        assert not texts


def save_a_number_as_a_setting(path: str) -> str:
    """Save an optimizer that has, on rank 1 alone, a setting whose key is a number."""
    model = nn.Linear(2, 2)
    optimizer = optim.SGD(model.parameters())
    if dist.get_rank() == 1:
        optimizer.param_groups[0][5] = 1  # type: ignore[index]
    with pytest.raises(UnsupportedValueError) as error:
        rankless.save_checkpoint(path, "a", model, optimizer)
    return str(error.value)


def test_all_ranks_refuse_a_setting_that_no_load_could_read(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks(2, save_a_number_as_a_setting, str(tmp_path)):
        assert "group 0 of the optimizer (SGD) has the setting 5" in message
    assert not rankless.has_checkpoint(tmp_path)


def save_a_stale_state(path: str) -> tuple[Any, ...]:
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    optimizer = optim.SGD(model.parameters(), momentum=0.9)
    if dist.get_rank() == 1:
        optimizer.state[torch.ones(7)]["x"] = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rankless.save_checkpoint(path, "a", model, optimizer)
    return rankless.restore(path, None, model, optimizer).reconstructed


def test_a_state_of_no_parameter_on_one_rank_makes_no_rank_exact(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, save_a_stale_state, str(tmp_path)) == [("optimizer",)] * 2
