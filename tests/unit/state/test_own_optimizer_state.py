"""Tests of optimizers that keep more than the states of their parameters and the settings of their groups."""

from collections import deque
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

import rankless
from rankless.errors import MismatchError
from tests.helpers.pairwise import first_of


class Overrides(optim.SGD):
    """Keeps a number and averages of gradients, and gives both by its own state dict."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.norm, self.average = 0.0, torch.zeros(30_000)

    def step(self, closure: Any = None) -> Any:
        self.norm += 1.5
        self.average += self.norm
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.add_(self.average[0])
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "norm": self.norm, "average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.norm, self.average = state_dict["norm"], state_dict["average"].clone()


class Hooked(Overrides):
    """The same by torch's hooks, with further keys of groups and of states."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.register_state_dict_post_hook(self._add)
        self.register_load_state_dict_pre_hook(self._take)

    state_dict, load_state_dict = optim.SGD.state_dict, optim.SGD.load_state_dict  # type: ignore[assignment]

    @staticmethod
    def _add(optimizer: Any, state_dict: dict[str, Any]) -> None:
        state_dict["param_groups"][0]["norm"] = optimizer.norm
        state_dict["average"] = optimizer.average

    @staticmethod
    def _take(optimizer: Any, state_dict: dict[str, Any]) -> None:
        optimizer.norm, optimizer.average = state_dict["param_groups"][0]["norm"], state_dict["average"].clone()


class Entries(optim.SGD):
    """Keeps entries of ``state`` that belong to no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.state["count"] = 0

    def step(self, closure: Any = None) -> Any:
        self.state["count"] += 1
        self.state.setdefault("k", torch.zeros(1)).add_(self.state["count"])
        self.param_groups[0]["lr"] = float(0.1 / self.state["k"])
        return super().step(closure)


class Inner(optim.Optimizer):
    """Keeps an optimizer for each parameter, no state of its own, and does not call the constructor of its base."""

    def __init__(self, params: Any) -> None:
        self.inner = [optim.Adam([parameter], lr=0.1) for parameter in params]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self.inner for group in optimizer.param_groups]

    def step(self, closure: Any = None) -> None:
        for optimizer in self.inner:
            optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [optimizer.state_dict() for optimizer in self.inner]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer, state in zip(self.inner, state_dict["inner"], strict=True):
            optimizer.load_state_dict(state)


class Wrapper:
    """Wraps an optimizer without being one, and adds states, as schedulefree's wrapper does."""

    def __init__(self, params: Any) -> None:
        self.base = optim.Adam(params, lr=0.1)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base.param_groups

    @property
    def state(self) -> Any:
        return self.base.state

    def step(self) -> None:
        self.base.step()
        for parameter, states in self.base.state.items():
            states.setdefault("z", torch.zeros_like(parameter)).add_(parameter.detach())
            parameter.data.lerp_(states["z"], 0.1)

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)


class Norm(IntEnum):
    SIGN, COLUMN = 1, 2


class Transposed(optim.SGD):
    """Has an enum in its settings, and a state whose elements are in another order in memory than its parameter's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.param_groups[0]["norm"] = Norm.COLUMN

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            states = self.state[parameter]
            if parameter.ndim > 1:
                states.setdefault("turned", torch.zeros_like(parameter).T.contiguous().T).add_(parameter.grad)
                states.setdefault("small", torch.zeros(3, 2).T).add_(1)
                assert not states["turned"].is_contiguous()
                assert not states["small"].is_contiguous()
                parameter.grad.add_(states["turned"]).add_(states["small"].as_strided((), ()))
        assert self.param_groups[0]["norm"] is Norm.COLUMN
        return super().step(closure)


class Projector:
    """An object that a state is."""

    def __init__(self, rank: int) -> None:
        self.rank, self.basis, self.parts, self.norm = rank, torch.zeros(3), [torch.zeros(2)], Norm.SIGN


class Projected(optim.SGD):
    """Keeps an object for each parameter, as GaLore does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            projector = self.state[parameter].setdefault("projector", Projector(2))
            assert projector.norm is Norm.SIGN
            projector.basis += projector.rank
            projector.parts[0] += projector.basis[0]
            parameter.grad.add_(projector.parts[0][0])
        return super().step(closure)


class Columns(optim.SGD):
    """Keeps tensors in column-major order inside collections and an object, small and large ones."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["factors"] = [torch.rand(5, 7).T, {"large": torch.rand(3, 9000).T}]
                state["recent"] = deque([torch.rand(2, 3, 4).permute(2, 0, 1), Projector(2)], maxlen=2)
                state["recent"][1].basis = torch.rand(2, 3).T
            recent, projector = state["recent"]
            tensors = state["factors"][0], state["factors"][1]["large"], recent, projector.basis
            assert [tensor.stride() for tensor in tensors] == [(1, 7), (1, 9000), (1, 12, 4), (1, 3)]
            assert state["recent"].maxlen == 2
            parameter.grad.add_(tensors[0][0, 1]).add_(tensors[1].sum()).add_(recent[3, 1, 2]).add_(
                projector.basis[0, 1]
            )
        return super().step(closure)


class Scaled(optim.SGD):
    """Keeps a tensor of each parameter, but a number if a parameter is zero, as Nero does."""

    def step(self, closure: Any = None) -> Any:
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            scale = self.state[parameter].setdefault("scale", 0.25 if number else parameter.detach().norm())
            assert isinstance(scale, float) == (number == 1)
            parameter.grad.add_(scale)
        return super().step(closure)


KINDS = [Projected, Columns, Scaled, Overrides, Hooked, Entries, Inner, Wrapper, Transposed]


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.3 + step)
        optimizer.step()


def make(kind: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, kind(model.parameters())


@pytest.mark.parametrize("has_stepped", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_optimizer_makes_the_same_steps(tmp_path: Path, kind: Any, has_stepped: bool) -> None:
    model, optimizer = make(kind)
    train(model, optimizer, 3)
    rankless.save_checkpoint(tmp_path, "a", model, optimizer)
    other, resumed = make(kind)
    train(other, resumed, int(has_stepped))
    restored = rankless.restore(tmp_path, None, other, resumed)
    assert "optimizer" in restored.exact
    train(model, optimizer, 3)
    train(other, resumed, 3)
    for expected, actual in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(actual, expected)


def test_own_settings_are_those_of_the_save_after_a_resume_too(tmp_path: Path) -> None:
    for number in range(3):
        model, optimizer = make(Hooked)
        if number:
            assert "optimizer" in rankless.restore(tmp_path, None, model, optimizer).exact
        assert optimizer.norm == 3.0 * number
        train(model, optimizer, 2)
        rankless.save_checkpoint(tmp_path, str(number), model, optimizer)


@first_of(1, "staging", ["overlapped", "eager"])
def test_own_values_are_those_at_the_call(tmp_path: Path, staging: Any) -> None:
    model, optimizer = make(Overrides)
    train(model, optimizer, 1)
    handle = rankless.save_checkpoint(tmp_path, "a", model, optimizer, async_save=True, staging=staging)
    optimizer.average.fill_(-1)  # not by a step
    optimizer.norm = -1.0
    train(model, optimizer, 1)
    handle.wait()
    other, resumed = make(Overrides)
    rankless.load_checkpoint(tmp_path, None, other, resumed)
    assert (resumed.norm, resumed.average.unique().tolist()) == (1.5, [1.5])


def test_states_that_torch_would_cast_keep_their_dtype_and_settings_their_tensors(tmp_path: Path) -> None:
    model, optimizer = nn.Linear(4, 3, dtype=torch.bfloat16), None
    optimizer = Hooked(model.parameters())
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 1 / 3, dtype=torch.float32)
    rankless.save_checkpoint(tmp_path, "a", model, optimizer)
    other = nn.Linear(4, 3, dtype=torch.bfloat16)
    resumed = Hooked(other.parameters())
    rate = resumed.param_groups[0]["lr"] = torch.tensor(1.0)
    group = resumed.param_groups[0]
    rankless.load_checkpoint(tmp_path, None, other, resumed)
    assert [state["momentum_buffer"].dtype for state in resumed.state.values()] == [torch.float32] * 2
    assert all(torch.all(state["momentum_buffer"] == torch.tensor(1 / 3)) for state in resumed.state.values())
    assert resumed.param_groups[0] is group
    assert group["lr"] is rate
    assert float(rate) == 0.25


def test_a_checkpoint_without_own_values_does_not_match(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rankless.save_checkpoint(
        tmp_path, "a", optimizer={"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
    )
    resumed = Overrides(model.parameters())
    with pytest.raises(MismatchError, match="optimizer: own values: Overrides keeps values in its state_dict"):
        rankless.load_checkpoint(tmp_path, None, None, resumed)
    with pytest.warns(UserWarning, match="own values"):
        restored = rankless.restore(tmp_path, None, None, resumed, strict=False)
    assert "optimizer" not in (*restored.exact, *restored.reconstructed)


def test_own_values_that_nothing_loads_do_not_match(tmp_path: Path) -> None:
    model, optimizer = make(Hooked)
    rankless.save_checkpoint(tmp_path, "a", model, optimizer)
    plain = type("Hooked", (optim.SGD,), {})(model.parameters(), lr=0.1)
    with pytest.raises(MismatchError, match="'average' of its state_dict"):
        rankless.load_checkpoint(tmp_path, None, model, plain)


class Numbered(optim.SGD):
    """Keeps a number for each parameter, and gives it in its own state dict: in the states, or in a list."""

    def __init__(self, params: Any, place: str) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.place, self.counts = place, [0] * sum(len(group["params"]) for group in self.param_groups)

    def state_dict(self) -> dict[str, Any]:
        given = super().state_dict()
        if self.place == "list":
            return {**given, "counts": self.counts}
        given["state"] = {n: {**given["state"].get(n, {}), "count": count} for n, count in enumerate(self.counts)}
        return given

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.place == "list":
            self.counts = state_dict.pop("counts")
        else:
            self.counts = [state.pop("count") for state in state_dict["state"].values()]
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("place", ["states", "list"])
def test_values_by_number_are_refused_if_parameters_are_in_another_order(place: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = Numbered(list(model.parameters()), place)
    optimizer.counts = [6, 2]
    rankless.save_checkpoint(tmp_path, "a", model, optimizer)
    other = Numbered(list(model.parameters())[::-1], place)
    with pytest.raises(MismatchError, match="in another order"):
        rankless.restore(tmp_path, None, model, other)
    assert other.counts == [0, 0]
    optimizer.counts = [0, 0]
    restored = rankless.restore(tmp_path, None, model, optimizer)
    assert "optimizer" in restored.exact
    assert optimizer.counts == [6, 2]


class Holding(optim.SGD):
    """Keeps any value, and gives it by its own state dict."""

    value: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


@pytest.mark.parametrize(
    "value",
    [
        np.arange(2.0),
        np.arange(1),
        {"a": (np.arange(2),)},
        {0: 1.5, 1: 2.5},
        {"0": 1.5, "1": 2.5},
        {np.int64(0): 1.5},
        {(0, "x"): 1.5},
        deque([1, 2]),
        (1, 2),
        torch.ones(1),
    ],
)
def test_values_of_any_class_that_may_be_by_number_are_refused_in_another_order(value: Any, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer, other = Holding(list(model.parameters())), Holding(list(model.parameters())[::-1])
    optimizer.value = value
    rankless.save_checkpoint(tmp_path, "a", model, optimizer)
    with pytest.raises(MismatchError, match="in another order"):
        rankless.restore(tmp_path, None, model, other)


@pytest.mark.parametrize("value", [np.array(2.5), np.float32(2.5), {"a": np.array(3)}, torch.tensor(1.5), {1.5, 2.5}])
@pytest.mark.parametrize("is_equal", [True, False])
def test_values_on_which_several_optimizers_agree_are_those_of_one_of_all(
    value: Any, is_equal: bool, tmp_path: Path
) -> None:
    model = nn.Linear(3, 2)
    parts = [Holding([parameter]) for parameter in model.parameters()]
    parts[0].value, parts[1].value = value, value if is_equal else {"a": np.array(4)}
    rankless.save_checkpoint(tmp_path, "a", model, parts)
    whole = Holding(model.parameters())
    if is_equal:
        assert "optimizer" in rankless.restore(tmp_path, None, model, whole).exact
        assert type(whole.value) is type(value)
        assert whole.value == value
    else:
        with pytest.raises(MismatchError, match="has for other parameters"):
            rankless.restore(tmp_path, None, model, whole)


class Doubling(optim.SGD):
    """Gives twice its rate, and halves it when it loads."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.register_state_dict_post_hook(self._double)
        self.register_load_state_dict_post_hook(self._halve)

    @staticmethod
    def _double(optimizer: Any, state_dict: dict[str, Any]) -> None:
        state_dict["param_groups"][0]["lr"] = 2 * optimizer.param_groups[0]["lr"]

    @staticmethod
    def _halve(optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] /= 2


def write_by_torch(model: nn.Module, optimizer: Any, folder: Path) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "file.pt")


def convert(model: nn.Module, optimizer: Any, folder: Path) -> None:
    rankless.save_checkpoint(folder, "a", model, optimizer)
    rankless.convert(folder / "a", folder / "file.pt", to="torch")


def by_list(params: Any) -> Numbered:
    return Numbered(params, "list")


def by_states(params: Any) -> Numbered:
    return Numbered(params, "states")


@pytest.mark.parametrize("write", [write_by_torch, convert])
@pytest.mark.parametrize("kind", [Scaled, Overrides, Hooked, Entries, Doubling, by_list, by_states])
def test_an_optimizer_takes_its_own_values_from_a_file_of_torch(tmp_path: Path, kind: Any, write: Any) -> None:
    model, optimizer = make(kind)
    train(model, optimizer, 3)
    optimizer.counts = [6, 2]
    write(model, optimizer, tmp_path)
    other, resumed = make(kind)
    assert "optimizer" in rankless.restore(tmp_path / "file.pt", None, other, resumed, rng=False).exact
    assert getattr(resumed, "counts", [6, 2]) == [6, 2]
    train(model, optimizer, 3)
    train(other, resumed, 3)
    for expected, actual in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(actual, expected)


def test_further_keys_of_a_file_that_nothing_loads_are_not_exact(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict() | {"average": 3}}, tmp_path / "a.pt")
    assert "optimizer" in rankless.restore(tmp_path / "a.pt", None, model, optimizer, rng=False).reconstructed


@pytest.mark.parametrize("kind", [Overrides, Hooked, by_list, by_states])
def test_a_file_of_torch_without_own_values_does_not_match(tmp_path: Path, kind: Any) -> None:
    model, optimizer = make(kind)
    states = optim.SGD(model.parameters(), lr=0.1, momentum=0.9).state_dict()
    torch.save({"model": model.state_dict(), "optimizer": states}, tmp_path / "a.pt")
    with pytest.raises(MismatchError, match="keeps values in its state_dict"):
        rankless.restore(tmp_path / "a.pt", None, model, optimizer, rng=False)


class Rounding(optim.Adam):
    """Rounds its averages in its state dict."""

    def state_dict(self) -> dict[str, Any]:
        given = super().state_dict()
        given["state"] = {
            number: {name: value.bfloat16() if value.ndim else value for name, value in states.items()}
            for number, states in given["state"].items()
        }
        return given


class Restarting(optim.Adam):
    """Begins to count steps again when it loads."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for states in self.state.values():
            states["step"].zero_()


class Forgetting(optim.Adam):
    """Drops its states when it loads."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "state": {}})


class Slowing(optim.Adam):
    """Halves its learning rate when it loads."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.param_groups[0]["lr"] /= 2


class Tightening(optim.Adam):
    """Changes a setting in what it loads, by torch's hook."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.register_load_state_dict_pre_hook(self._tighten)

    @staticmethod
    def _tighten(_: Any, state_dict: dict[str, Any]) -> None:
        state_dict["param_groups"][0]["betas"] = (0.5, 0.5)


class Emptying(optim.Adam):
    """Keeps a queue and a number besides, and empties the queue when it loads."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for states in self.state.values():
            states |= {"queue": deque([states["exp_avg"] * 2]), "count": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for states in self.state.values():
            states["queue"].clear()


class Recounting(Emptying):
    """Changes a number that is a state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        optim.Adam.load_state_dict(self, state_dict)
        for states in self.state.values():
            states["count"] += 1


@pytest.mark.parametrize("kind", [Restarting, Rounding, Forgetting, Slowing, Tightening, Emptying, Recounting])
def test_what_the_optimizer_changes_while_it_loads_are_reconstructed(kind: Any, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters())
    model(torch.tensor([[0.1, 0.2, 0.3]])).square().sum().backward()
    optimizer.step()
    rankless.save_checkpoint(tmp_path, "a", model, optimizer)
    restored = rankless.restore(tmp_path, None, model, optimizer)
    assert "optimizer" in restored.reconstructed
    assert "optimizer" not in restored.exact


def test_casts_of_states_with_nans_are_put_back(tmp_path: Path) -> None:
    model = nn.Linear(3, 2).bfloat16()
    optimizer = Hooked(model.parameters())
    state = torch.full((2, 3), float("nan"))
    optimizer.state[model.weight]["momentum_buffer"] = state
    rankless.save_checkpoint(tmp_path, "a", model, optimizer)
    restored = rankless.restore(tmp_path, None, model, optimizer)
    assert "optimizer" in restored.exact
    assert optimizer.state[model.weight]["momentum_buffer"].dtype == torch.float32


class Queued(Hooked):
    """Keeps tensors of another dtype than its parameters in collections."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for parameter, states in self.state.items():
            states["queue"] = deque([parameter.detach().double(), torch.tensor([float("nan")])], 3)
            states["recent"] = deque([1.5], 3)


def test_casts_of_tensors_in_collections_are_put_back(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = Queued(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    rankless.save_checkpoint(tmp_path, "a", model, optimizer)
    restored = rankless.restore(tmp_path, None, model, optimizer)
    assert "optimizer" in restored.exact
    queue = optimizer.state[model.weight]["queue"]
    assert (type(queue), queue.maxlen, queue[0].dtype) == (deque, 3, torch.float64)
    assert optimizer.state[model.weight]["recent"].maxlen == 3


def test_an_expanded_state_gets_elements_of_its_own(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["scale"] = torch.arange(4.0)
    rankless.save_checkpoint(tmp_path, "a", model, optimizer)
    optimizer.state[model.weight]["scale"] = torch.ones(1).expand(4)
    assert "optimizer" in rankless.restore(tmp_path, None, model, optimizer).exact
    assert torch.equal(optimizer.state[model.weight]["scale"], torch.arange(4.0))


def test_the_state_of_a_tensor_in_no_group_is_named_and_not_exact(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = optim.SGD(model.parameters(), momentum=0.9)
    removed = nn.Parameter(torch.ones(7, 5))
    optimizer.state[removed]["momentum_buffer"] = torch.ones(7, 5)
    with pytest.warns(UserWarning, match=r"SGD has the state \['momentum_buffer'\] of a tensor of shape \[7, 5\]"):
        rankless.save_checkpoint(tmp_path, "a", model, optimizer, rng=False)
    restored = rankless.restore(tmp_path, None, model, optim.SGD(model.parameters(), momentum=0.9), rng=False)
    assert (restored.exact, restored.reconstructed) == (("model",), ("optimizer",))


def keep_a_shared_tensor(weight: dict[str, Any], bias: dict[str, Any]) -> None:
    weight["x"] = bias["x"] = torch.ones(2)


def keep_a_tensor_twice(weight: dict[str, Any], bias: dict[str, Any]) -> None:
    bias["x"] = bias["y"] = torch.ones(2)
    weight["x"] = torch.ones(2)


def keep_a_shared_list(weight: dict[str, Any], bias: dict[str, Any]) -> None:
    weight["x"] = bias["x"] = [1, 2]


def keep_a_shared_tensor_in_lists(weight: dict[str, Any], bias: dict[str, Any]) -> None:
    weight["x"] = [torch.ones(2), 1]
    bias["y"] = {"z": (weight["x"][0],)}


def keep_separate_states(weight: dict[str, Any], bias: dict[str, Any]) -> None:
    shared = (1, "text", None)
    for states in (weight, bias):
        states.update(x=torch.ones(2), y=[torch.ones(2)], z=shared)


@pytest.mark.parametrize(
    "keep", [keep_a_shared_tensor, keep_a_tensor_twice, keep_a_shared_list, keep_a_shared_tensor_in_lists]
)
def test_states_that_are_one_object_are_named_and_not_exact(keep: Any, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = optim.SGD(model.parameters())
    keep(optimizer.state[model.weight], optimizer.state[model.bias])
    with pytest.warns(
        UserWarning, match=r"SGD has one (Tensor|list) as two states, of a parameter of shape \[.*\] and"
    ):
        rankless.save_checkpoint(tmp_path, "a", model, optimizer, rng=False)
    restored = rankless.restore(tmp_path, None, model, optim.SGD(model.parameters()), rng=False)
    assert (restored.exact, restored.reconstructed) == (("model",), ("optimizer",))


@pytest.mark.filterwarnings("error")
def test_states_that_only_share_what_no_step_changes_are_exact(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = optim.SGD(model.parameters())
    keep_separate_states(optimizer.state[model.weight], optimizer.state[model.bias])
    rankless.save_checkpoint(tmp_path, "a", model, optimizer, rng=False)
    assert "optimizer" in rankless.restore(tmp_path, None, model, optim.SGD(model.parameters()), rng=False).exact


FURTHER = {"scale": {"a": (1, 2.5)}, "average": torch.arange(30_000.0), "small": torch.ones(3)}


def as_state_dict(model: nn.Module, further: dict[str, Any]) -> dict[str, Any]:
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, float(len(further)))
    state_dict = {**optimizer.state_dict(), **further}
    state_dict["state"]["global"] = {"count": len(further)}
    return state_dict


def test_further_keys_of_a_state_dict_are_saved_and_loaded(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    saved, loaded = as_state_dict(model, FURTHER), as_state_dict(model, {"small": torch.zeros(3)})
    rankless.save_checkpoint(tmp_path, "a", model, saved, rng=False)
    assert rankless.restore(tmp_path, None, model, loaded, rng=False).exact == ("model", "optimizer")
    torch.testing.assert_close(loaded, saved, rtol=0, atol=0)


def test_a_state_dict_and_its_optimizer_load_each_others_values(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    optimizer, loaded = Overrides(model.named_parameters()), Overrides(model.named_parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, saved in (("live", optimizer), ("dict", optimizer.state_dict())):
        rankless.save_checkpoint(tmp_path, name, model, saved, rng=False)
    assert "optimizer" in rankless.restore(tmp_path, "dict", model, loaded, rng=False).exact
    assert loaded.norm == optimizer.norm
    assert torch.equal(loaded.average, optimizer.average)
    by_name = {"state": {}, "param_groups": [{"params": ["weight", "bias"]}], "norm": 0.0, "average": torch.zeros(1)}
    assert "optimizer" in rankless.restore(tmp_path, "live", model, by_name, rng=False).exact
    assert by_name["norm"] == optimizer.norm
    assert torch.equal(by_name["average"], optimizer.average)  # type: ignore[arg-type]


def test_further_keys_of_a_state_dict_that_the_checkpoint_lacks_do_not_match(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    rankless.save_checkpoint(tmp_path, "a", model, as_state_dict(model, {}), rng=False)
    with pytest.raises(MismatchError, match="passed as a state dict keeps values in its state_dict"):
        rankless.restore(tmp_path, None, model, as_state_dict(model, FURTHER), rng=False)


def test_state_dicts_with_states_of_any_shape_are_matched_by_position(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    saved, loaded = as_state_dict(model, {}), as_state_dict(model, {})
    loaded["state"][0]["momentum_buffer"] += 1
    rankless.save_checkpoint(tmp_path, "a", optimizer=saved, rng=False)
    assert rankless.restore(tmp_path, optimizer=loaded, rng=False).exact == ("optimizer",)
    torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
