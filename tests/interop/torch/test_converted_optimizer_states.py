"""Tests of conversions of optimizers whose states are more than one tensor each."""

from argparse import Namespace
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rankless
from rankless.errors import OptimizerMismatchError
from tests.helpers.pool import Ranks


class Collects(optim.Optimizer):
    """Keeps a queue and a table of tensors like the parameter, and tensors whose dimensions have another order."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            turned = torch.arange(12.0).reshape(3, 4).t()
            self.state[parameter] |= {
                "queue": deque([parameter * 2, parameter * 3], 4),
                "table": {"slow": parameter * 5, "turned": [turned, 7]},
                "turned": turned + 1,
            }


def trained() -> tuple[nn.Module, Collects]:
    torch.manual_seed(3)
    model = nn.Linear(3, 4)
    optimizer = Collects(model.parameters())
    optimizer.step()
    return model, optimizer


def fresh() -> tuple[nn.Module, Collects]:
    model = nn.Linear(3, 4)
    return model, Collects(model.parameters())


def assert_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, Namespace):
        found, expected = vars(found), vars(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = [found[key] for key in expected], list(expected.values())
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif hasattr(expected, "__iter__"):
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected


def assert_states_equal(optimizer: Collects, expected: Collects) -> None:
    found, states = (by.state_dict()["state"] for by in (optimizer, expected))
    assert_equal(found, states)


@pytest.mark.parametrize("target", ["torch", "lightning", "colossalai", "dcp"])
def test_a_converted_optimizer_has_each_tensor_in_its_place(target: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    rankless.save_checkpoint(tmp_path / "run", "a", model, optimizer)
    rankless.convert(tmp_path / "run" / "a", tmp_path / "converted", to=target)
    loaded_model, loaded = fresh()
    rankless.restore(tmp_path / "converted", None, loaded_model, loaded, rng=False)
    assert_states_equal(loaded, optimizer)


def converted(tmp_path: Path) -> Path:
    rankless.save_checkpoint(tmp_path / "run", "a", *trained())
    rankless.convert(tmp_path / "run" / "a", tmp_path / "file.pt", to="torch")
    return tmp_path / "file.pt"


def saved_alone(tmp_path: Path) -> Path:
    model, optimizer = trained()
    rankless.save_optimizer(optimizer, tmp_path / "file.pt", model=model)
    return tmp_path / "file.pt"


@pytest.mark.parametrize("write", [converted, saved_alone])
def test_torch_finds_the_states_that_the_optimizer_kept(write: Callable[[Path], Path], tmp_path: Path) -> None:
    read = torch.load(write(tmp_path), weights_only=False)
    state = read.get("optimizer", read)["state"]
    assert_equal(state, trained()[1].state_dict()["state"])


def test_the_order_of_dimensions_in_a_file_that_torch_wrote_is_kept(tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "file.pt")
    rankless.convert(tmp_path / "file.pt", tmp_path / "native", to="native")
    for path in (tmp_path / "file.pt", tmp_path / "native"):
        loaded_model, loaded = fresh()
        assert "optimizer" in rankless.restore(path, None, loaded_model, loaded, rng=False).exact
        assert_states_equal(loaded, optimizer)
        for states in loaded.state.values():
            assert states["turned"].stride() == states["table"]["turned"][0].stride() == (1, 4)


@pytest.mark.parametrize("write", [converted, saved_alone])
def test_a_lost_order_of_dimensions_is_named(write: Callable[[Path], Path], tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="elements of 4 optimizer states in row-major order.*'table' of 'bias'"):
        write(tmp_path)


class Projector:
    """An object that a state is."""

    def __init__(self) -> None:
        self.basis = torch.ones(2)


class Projected(Collects):
    """Keeps an object for each parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] |= {"parts": [Projector()]}


@pytest.mark.parametrize("target", ["torch", "dcp"])
def test_objects_that_become_tables_are_named(target: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    optimizer = Projected(model.parameters())
    optimizer.step()
    rankless.save_checkpoint(tmp_path / "run", "a", model, optimizer)
    with pytest.warns(UserWarning, match="place of 2 optimizer states that are objects, as 'parts' of .* a Projector"):
        rankless.convert(tmp_path / "run" / "a", tmp_path / "converted", to=target)


def test_usual_states_are_converted_without_a_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    model = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
    optimizer = optim.Adam(model.parameters())
    model(torch.ones(1, 2, 4, 4)).sum().backward()
    optimizer.step()
    rankless.save_checkpoint(tmp_path / "run", "a", model, optimizer)
    rankless.convert(tmp_path / "run" / "a", tmp_path / "converted", to="torch")
    assert not recwarn.list


def test_tensors_in_any_collection_of_user_content_are_converted(tmp_path: Path) -> None:
    content: dict[str, Any] = {
        "queue": deque([torch.arange(3.0)]),
        "pair": (torch.ones(2), [torch.ones(3)]),
        "table": {1: torch.ones(1)},
    }
    content["names"] = Namespace(tensor=torch.arange(4.0))
    rankless.save_checkpoint(tmp_path / "run", "a", nn.Linear(1, 1), user_content=content)
    rankless.convert(tmp_path / "run" / "a", tmp_path / "file.pt", to="torch")
    assert_equal(torch.load(tmp_path / "file.pt", weights_only=False)["user_content"], content)


class Turns(optim.SGD):
    """Keeps a state like the parameter, with its dimensions in another order, and a number besides the states."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] |= {"turned": torch.arange(12.0).reshape(3, 4).t()}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict.pop("count")
        super().load_state_dict(state_dict)


def load_turned(path: Path) -> tuple[int, torch.Tensor, tuple[int, ...]]:
    model = nn.Linear(3, 4, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = Turns(model.parameters())
    assert "optimizer" in rankless.restore(path, None, model, optimizer, rng=False).exact
    state = optimizer.state[model.weight]["turned"]
    return optimizer.count, state.full_tensor(), state.to_local().stride()


def test_states_of_a_file_of_torch_are_sharded_in_their_order(ranks: Ranks, tmp_path: Path) -> None:
    model = nn.Linear(3, 4, bias=False)
    optimizer = Turns(model.parameters())
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "file.pt")
    for count, turned, stride in ranks(2, load_turned, tmp_path / "file.pt"):
        assert count == 1
        assert torch.equal(turned, torch.arange(12.0).reshape(3, 4).t())
        assert stride == (1, 2)


def load_sharded(path: Path) -> str:
    model = nn.Linear(3, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(OptimizerMismatchError) as error:
        rankless.restore(path, None, model, Collects(model.parameters()), rng=False)
    return str(error.value)


def test_whole_tensors_of_a_file_are_no_states_of_a_sharded_parameter(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks(2, load_sharded, converted(tmp_path)):
        assert "tensors like its parameter in a collection" in message
