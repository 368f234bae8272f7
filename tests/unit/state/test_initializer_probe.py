"""Tests that a tensor on the meta device which is not loaded is refused by name unless an initializer sets it."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import rankless
from rankless.errors import MismatchError, StateError


class Table(nn.Module):
    """A module with a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.arange(4.0), persistent=False)


class Unset(Table):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class SetInPlace(Table):
    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(4.0))


class SetThroughData(Table):
    def reset_parameters(self) -> None:
        self.table.data.copy_(torch.arange(4.0))


class Replaced(Table):
    def reset_parameters(self) -> None:
        self.table = torch.arange(4.0)


class SetInPart(Table):
    def reset_parameters(self) -> None:
        self.table[1:] = 1.0


class ReplacedWithoutValues(Table):
    def reset_parameters(self) -> None:
        self.table = torch.empty(4)


class ChangedInPlace(Table):
    def reset_parameters(self) -> None:
        self.table.add_(1)


class SetInPartByLogic(Table):
    """Combines with what is in memory, where most bytes count as true."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(4, dtype=torch.bool)

    def reset_parameters(self) -> None:
        self.table |= torch.tensor([True, False, True, False])


class Clamped(Table):
    def reset_parameters(self) -> None:
        self.table.clamp_(max=-1)


class ReplacesModules(Table):
    """Makes a module anew, whose old weight is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(4.0))
        self.inner = nn.Linear(2, 2)


class ReplacesAll(nn.Module):
    """Makes all its tensors anew, one of them as a tensor of another kind. Two names are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.table = nn.Buffer(torch.arange(4.0), persistent=False)
        self.tied = nn.Module()
        self.tied.weight, self.tied.table = self.weight, self.table

    def reset_parameters(self) -> None:
        self.weight, self.table = nn.Parameter(torch.zeros(3)), torch.arange(4.0)
        del self.other
        self.register_buffer("other", torch.zeros(3))


class ReplacesByAnotherForm(ReplacesAll):
    def reset_parameters(self) -> None:
        self.table = torch.arange(6)


class FailingLate(Table):
    """Has no values the fifth time, when the model has memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def reset_parameters(self) -> None:
        self.calls.append(1)
        self.table.copy_(torch.arange(4.0))
        if len(self.calls) > 4:
            raise ValueError("no values")


class Random(Table):
    """Takes values of each generator, which both runs of the probe must find in the same state."""

    def reset_parameters(self) -> None:
        values = [torch.rand(()).item(), random.random(), np.random.random(), torch.empty(()).normal_().item()]  # noqa: NPY002
        self.table.copy_(torch.tensor(values))


class Failing(Table):
    def reset_parameters(self) -> None:
        raise ValueError("no values")


class Initialized(nn.Module):
    """A model with the initializer of transformers' models, which sets what ``sets`` says."""

    def __init__(self, sets: bool) -> None:
        super().__init__()
        self.config, self.sets, self.inner = SimpleNamespace(), sets, Table()

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.inner and self.sets:
            module.table.data.copy_(torch.arange(4.0))


class SetsTablesInside(nn.Module):
    """A model whose initializer, called for the model itself, sets tables of its layers, as that of Falcon-H1."""

    def __init__(self, value: float | None = 7.0) -> None:
        super().__init__()
        self.config, self.value = SimpleNamespace(), value
        self.layers = nn.ModuleList([Table(), Table()])

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, SetsTablesInside):
            for layer in module.layers:
                nn.init.zeros_(layer.weight)  # its value is loaded
                if self.value is not None:
                    layer.table.copy_(torch.full((4,), self.value))


def _make_on_meta(tmp_path: Path, make: Callable[[], nn.Module]) -> nn.Module:
    rankless.save_checkpoint(tmp_path, "s", model=make(), rng=False)
    with torch.device("meta"):
        return make()


@pytest.mark.parametrize("make", [SetInPlace, SetThroughData, Replaced])
def test_a_buffer_that_is_initialized_has_its_value(tmp_path: Path, make: Callable[[], Table]) -> None:
    model = _make_on_meta(tmp_path, make)
    assert rankless.restore(tmp_path, model=model, rng=False).exact == ("model",)
    assert model.table.tolist() == [0, 1, 2, 3]


def test_random_values_are_values_and_the_probe_leaves_the_generators_alone(tmp_path: Path) -> None:
    model = _make_on_meta(tmp_path, Random)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the one that initializers use
    result = rankless.restore(tmp_path, model=model, rng=False)
    table = model.table.tolist()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the one that initializers use
    expected = Random()
    expected.reset_parameters()
    assert result.exact == ("model",)
    assert table == expected.table.tolist()


def test_the_initializer_of_the_model_counts_if_it_sets_the_buffer(tmp_path: Path) -> None:
    model = _make_on_meta(tmp_path, lambda: Initialized(sets=True))
    rankless.restore(tmp_path, model=model, rng=False)
    assert model.inner.table.tolist() == [0, 1, 2, 3]


def test_the_initializer_of_a_module_around_sets_the_buffer_and_no_loaded_tensor(tmp_path: Path) -> None:
    model = _make_on_meta(tmp_path, SetsTablesInside)
    rankless.restore(tmp_path, model=model, rng=False)
    assert [layer.table.tolist() for layer in model.layers] == [[7.0] * 4] * 2
    assert [layer.weight.tolist() for layer in model.layers] == [[1.0] * 3] * 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: SetsTablesInside(None),
        Table,
        Unset,
        SetInPart,
        ReplacedWithoutValues,
        ChangedInPlace,
        SetInPartByLogic,
        Clamped,
        ReplacesModules,
        Failing,
        lambda: Initialized(sets=False),
    ],
)
def test_a_buffer_that_nothing_sets_is_refused_and_nothing_changes(
    tmp_path: Path, make: Callable[[], nn.Module]
) -> None:
    model = _make_on_meta(tmp_path, make)
    generator = torch.get_rng_state()
    with pytest.raises(MismatchError, match="table: on the meta device here"):
        rankless.restore(tmp_path, model=model, rng=False)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert torch.equal(generator, torch.get_rng_state())


def test_a_model_keeps_the_tensors_that_are_loaded_if_its_initializer_makes_others(tmp_path: Path) -> None:
    model = _make_on_meta(tmp_path, ReplacesAll)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    weight, other, table = model.weight, model.other, model.table
    assert rankless.restore(tmp_path, model=model, rng=False).exact == ("model",)
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == names
    assert model.weight is model.tied.weight is weight
    assert model.other is other
    assert model.table is model.tied.table is table
    assert (weight.tolist(), other.tolist(), table.tolist()) == ([1.0] * 3, [1.0] * 3, [0, 1, 2, 3])


def test_a_tensor_of_another_form_that_an_initializer_makes_is_in_all_places_of_the_old_one(tmp_path: Path) -> None:
    model = _make_on_meta(tmp_path, ReplacesByAnotherForm)
    rankless.restore(tmp_path, model=model, rng=False)
    assert model.table is model.tied.table
    assert model.tied.table.tolist() == [0, 1, 2, 3, 4, 5]


def test_code_that_fails_when_the_model_has_memory_is_named(tmp_path: Path) -> None:
    model = _make_on_meta(tmp_path, lambda: nn.Sequential(nn.Linear(2, 2), FailingLate()))
    with pytest.raises(StateError, match=r"module '1' \(FailingLate\) failed after the model got memory.*no values"):
        rankless.restore(tmp_path, model=model, rng=False)
