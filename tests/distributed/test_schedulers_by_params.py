"""Tests that each stage of a pipeline, and each chunk of a stage, gets the state of its own scheduler."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.optim import lr_scheduler

import rankless
from tests.helpers.pairwise import first_of
from tests.helpers.pool import Ranks

#: The groups of each of four chunks, two on each rank: what is in each, with its learning rate.
CHUNKS: list[list[tuple[str, float]]] = [
    [("weight", 1.0), ("bias", 0.5)],
    [("weight bias", 0.25)],
    [("weight bias", 0.125)],
    [("bias", 2.0), ("weight", 4.0)],
]

SCHEDULERS: dict[str, Any] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))],
        [2],
    ),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, [group["lr"] for group in optimizer.param_groups], 8.0, 3, cycle_momentum=False
    ),
}


def make(kind: str, numbers: list[int]) -> tuple[nn.Module, list[Any], list[Any]]:
    torch.manual_seed(0)
    model = nn.ModuleDict({str(number): nn.Linear(2, 2) for number in numbers})
    optimizers = [
        optim.SGD(
            [
                {"params": [getattr(model[str(number)], name) for name in names.split()], "lr": lr}
                for names, lr in CHUNKS[number]
            ]
        )
        for number in numbers
    ]
    return model, optimizers, [SCHEDULERS[kind](optimizer) for optimizer in optimizers]


def advance(optimizers: list[Any], schedulers: list[Any], steps: int) -> list[list[float]]:
    for _ in range(steps):
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    return [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]


def save(path: str, kind: str) -> list[list[float]]:
    model, optimizers, schedulers = make(kind, [dist.get_rank(), dist.get_rank() + 2])
    advance(optimizers, schedulers, 3)
    rankless.save_checkpoint(path, "a", model, optimizers, schedulers)
    return advance(optimizers, schedulers, 4)


def resume(path: str, kind: str) -> tuple[tuple[str, ...], list[list[float]]]:
    model, optimizers, schedulers = make(kind, [dist.get_rank(), dist.get_rank() + 2])
    restored = rankless.restore(path, None, model, optimizers, schedulers)
    return restored.exact, advance(optimizers, schedulers, 4)


@first_of(2, "kind", SCHEDULERS)
def test_the_same_program_goes_on_with_the_rates_of_its_stages(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    expected = ranks(2, save, str(tmp_path), kind)
    outcomes = ranks(2, resume, str(tmp_path), kind)
    assert [rates for _, rates in outcomes] == expected
    assert all("scheduler" in exact for exact, _ in outcomes)


def test_one_process_loads_all_stages_into_one_optimizer(ranks: Ranks, tmp_path: Path) -> None:
    """The groups of the stages become groups of one optimizer, and their parts of the schedulers one scheduler."""
    expected = ranks(2, save, str(tmp_path), "lambda")
    by_chunk = {rank + 2 * index: rates for rank, pair in enumerate(expected) for index, rates in enumerate(pair)}
    model, optimizers, _ = make("lambda", [0, 1, 2, 3])
    whole = optim.SGD([group for optimizer in optimizers for group in optimizer.param_groups])
    scheduler = SCHEDULERS["lambda"](whole)
    rankless.load_checkpoint(tmp_path, None, model, whole, scheduler)
    assert advance([whole], [scheduler], 4) == [[rate for number in range(4) for rate in by_chunk[number]]]


def save_with_counts_of_ranks(path: str) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    model, (optimizer,), _ = make("lambda", [0])
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=9)
    scheduler.num_bad_epochs = 3 + dist.get_rank()
    rankless.save_checkpoint(path, "a", model, optimizer, scheduler)
    restored = rankless.restore(path, None, model, optimizer, scheduler)
    return restored.exact, restored.reconstructed, scheduler.num_bad_epochs


def test_a_scheduler_that_differs_between_replicas_is_not_exact(ranks: Ranks, tmp_path: Path) -> None:
    for exact, reconstructed, count in ranks(2, save_with_counts_of_ranks, str(tmp_path)):
        assert "scheduler" not in exact
        assert "scheduler" in reconstructed
        assert count == 3


class Peaks(lr_scheduler.LRScheduler):
    """Keeps a list of its own, with an item for each group."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.peaks = [group["lr"] * 10 for group in optimizer.param_groups]
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        return [peak * min(1, (1 + self.last_epoch) / 10) for peak in self.peaks]


def one_group_each(names: str, rates: dict[str, float], make_scheduler: Any) -> tuple[Any, Any, Any]:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})
    optimizer = optim.SGD([{"params": [*model[name].parameters()], "lr": rates[name]} for name in names])
    return model, optimizer, make_scheduler(optimizer)


@pytest.mark.parametrize("kind", ["lambda", "cyclic"])
@pytest.mark.parametrize("order", ["ba", "cab"])
def test_groups_in_another_order_keep_their_rates(tmp_path: Path, kind: str, order: str) -> None:
    rates = {"a": 1.0, "b": 0.5, "c": 0.25}
    saved = one_group_each("".join(sorted(order)), rates, SCHEDULERS[kind])
    advance([saved[1]], [saved[2]], 2)
    rankless.save_checkpoint(tmp_path, "x", *saved)
    (expected,) = advance([saved[1]], [saved[2]], 2)
    here = one_group_each(order, dict.fromkeys(rates, 3.0), SCHEDULERS[kind])
    assert "scheduler" in rankless.restore(tmp_path, None, *here).exact
    (actual,) = advance([here[1]], [here[2]], 2)
    assert dict(zip(order, actual, strict=True)) == dict(zip(sorted(order), expected, strict=True))


def test_a_list_that_may_have_an_item_for_each_group_is_not_divided(tmp_path: Path) -> None:
    rates = {"a": 1.0, "b": 0.5}
    rankless.save_checkpoint(tmp_path, "x", *one_group_each("ab", rates, Peaks))
    same = one_group_each("ab", dict.fromkeys(rates, 9.0), Peaks)
    rankless.restore(tmp_path, None, *same)
    assert same[2].peaks == [10.0, 5.0]
    for names in ("ba", "b"):
        model, optimizer, scheduler = one_group_each(names, rates, Peaks)
        with pytest.raises(rankless.MismatchError, match="scheduler: the checkpoint has no state of a scheduler of"):
            rankless.restore(tmp_path, None, model, optimizer, scheduler, strict=False)


class PeaksByNumber(Peaks):
    """Keeps a dict with the number of each group."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.by_number = dict(enumerate(self.__dict__.pop("peaks")))

    def get_lr(self) -> list[float]:  # type: ignore[override]
        return [group["lr"] for group in self.optimizer.param_groups]


def test_a_dict_by_the_numbers_of_groups_is_not_divided(tmp_path: Path) -> None:
    rates = {"a": 1.0, "b": 0.5}
    rankless.save_checkpoint(tmp_path, "x", *one_group_each("ab", rates, PeaksByNumber))
    model, optimizer, scheduler = one_group_each("ba", rates, PeaksByNumber)
    with pytest.raises(rankless.MismatchError, match="scheduler: the checkpoint has no state of a scheduler of"):
        rankless.restore(tmp_path, None, model, optimizer, scheduler)


def test_groups_in_another_order_whose_parameters_have_other_names_are_not_exact(tmp_path: Path) -> None:
    """Without the model, they are named as the optimizer was made: by a wrapper, for example."""
    rates = {"a": 1.0, "b": 0.5}
    rankless.save_checkpoint(tmp_path, "x", *one_group_each("ab", rates, SCHEDULERS["lambda"]))
    model = nn.ModuleDict({"module": nn.ModuleDict({name: nn.Linear(2, 2) for name in "ab"})})
    groups = [
        {"params": [one for one in model.named_parameters() if f".{name}." in one[0]], "lr": rates[name]}
        for name in "ba"
    ]
    scheduler = SCHEDULERS["lambda"](optim.SGD(groups))
    assert rankless.restore(tmp_path, None, scheduler=scheduler, rng=False).reconstructed == ("scheduler",)


def stage_of(name: str, lr: float, period: int, *, bias: bool = True) -> tuple[Any, Any, Any]:
    """A stage with the usual groups with decay and without. The second one is empty if nothing has a bias."""
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=bias)})
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = optim.SGD([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=lr)
    return model, optimizer, lr_scheduler.CosineAnnealingLR(optimizer, period)


STAGES: dict[str, dict[str, Any]] = {
    "blocks": {"lr": 0.2, "period": 100},
    "embed": {"lr": 0.1, "period": 10, "bias": False},
    "head": {"lr": 0.3, "period": 20, "bias": False},
}


def save_stages(path: str) -> None:
    name = [*STAGES][dist.get_rank()]
    rankless.save_checkpoint(path, "x", *stage_of(name, **STAGES[name]))


def load_stages(path: str, names: list[str]) -> tuple[tuple[str, ...], list[tuple[int, list[float]]]]:
    stages = [stage_of(name, **STAGES[name] | {"lr": 9.0, "period": 55}) for name in names]
    models, optimizers, schedulers = map(list, zip(*stages, strict=True))
    restored = rankless.restore(path, None, models, optimizers, schedulers)
    found = [
        (scheduler.T_max, [group["lr"] for group in optimizer.param_groups])
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True)
    ]
    return restored.exact, found


def load_own_stage(path: str) -> tuple[tuple[str, ...], list[tuple[int, list[float]]]]:
    return load_stages(path, [[*STAGES][dist.get_rank()]])


def test_stages_with_empty_groups_get_their_own_schedules_and_rates(ranks: Ranks, tmp_path: Path) -> None:
    ranks(3, save_stages, str(tmp_path))
    expected = [(stage["period"], [stage["lr"]] * 2) for stage in STAGES.values()]
    outcomes = ranks(3, load_own_stage, str(tmp_path))
    assert [found for _, (found,) in outcomes] == expected
    # The checkpoint has two empty groups of other settings, and does not say which one is whose; their rates are those
    # of the schedulers.
    assert ["optimizer" in exact for exact, _ in outcomes] == [True, False, False]
    for names in ([*STAGES], [*reversed(STAGES)]):
        _, found = load_stages(str(tmp_path), names)
        assert [period for period, _ in found] == [STAGES[name]["period"] for name in names]


def save_two_stages(path: str) -> None:
    name = [*STAGES][dist.get_rank()]
    rankless.save_checkpoint(path, "x", *stage_of(name, **STAGES[name]))


def test_the_empty_group_of_a_stage_gets_its_settings(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_two_stages, str(tmp_path))
    for exact, _ in (outcomes := ranks(2, load_own_stage, str(tmp_path))):
        assert {"optimizer", "scheduler"} <= {*exact}
    assert [found for _, (found,) in outcomes] == [(100, [0.2, 0.2]), (10, [0.1, 0.1])]


def test_one_scheduler_does_not_take_the_place_of_several_that_differ(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_two_stages, str(tmp_path))
    model = nn.ModuleDict({"blocks": nn.Linear(2, 2), "embed": nn.Linear(2, 2, bias=False)})
    whole = optim.SGD(model.parameters(), lr=0.5)
    scheduler = lr_scheduler.CosineAnnealingLR(whole, 55)
    with pytest.raises(rankless.MismatchError, match="or states of several that differ"):
        rankless.restore(tmp_path, None, model, scheduler=scheduler)
    assert scheduler.T_max == 55


def test_stages_load_the_groups_of_a_whole_model(ranks: Ranks, tmp_path: Path) -> None:
    """A scheduler of three groups is divided between stages of two and of one."""
    rates = {"a": 1.0, "b": 0.5, "c": 0.25}
    saved = one_group_each("abc", rates, SCHEDULERS["lambda"])
    advance([saved[1]], [saved[2]], 2)
    rankless.save_checkpoint(tmp_path, "x", *saved)
    (expected,) = advance([saved[1]], [saved[2]], 2)
    parts = [one_group_each(names, rates, SCHEDULERS["lambda"]) for names in ("ac", "b")]
    models, optimizers, schedulers = map(list, zip(*parts, strict=True))
    assert "scheduler" in rankless.restore(tmp_path, None, models, optimizers, schedulers).exact
    assert advance(optimizers, schedulers, 2) == [[expected[0], expected[2]], [expected[1]]]


def test_a_conversion_renames_what_a_scheduler_schedules(tmp_path: Path) -> None:
    rates = {"a": 1.0, "b": 0.5}
    rankless.save_checkpoint(tmp_path / "run", "x", *one_group_each("ab", rates, SCHEDULERS["lambda"]))
    rankless.convert(tmp_path / "run/x", tmp_path / "new", to="native", rename={r"^a\.": "z."})
    here = one_group_each("bz", {"z": 9.0, "b": 9.0}, SCHEDULERS["lambda"])
    assert "scheduler" in rankless.restore(tmp_path / "new", None, *here).exact
    assert here[2].base_lrs == [0.5, 1.0]


def save_schedule_of_ranks(path: str) -> list[str]:
    optimizer = optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 10 + dist.get_rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rankless.save_lr_scheduler(scheduler, f"{path}/schedule")
    return [str(warning.message) for warning in caught]


def test_a_file_of_one_scheduler_is_rank_0s_with_a_warning(ranks: Ranks, tmp_path: Path) -> None:
    (first, second) = ranks(2, save_schedule_of_ranks, str(tmp_path))
    assert any("ranks hold different states of the scheduler" in text for text in first)
    assert second == []


@pytest.mark.parametrize("rates", [{"a": 0.5, "b": 0.5}, {"a": 1.0, "b": 0.5}])
def test_groups_may_be_one_group_if_their_schedules_were_the_same(tmp_path: Path, rates: dict[str, float]) -> None:
    rankless.save_checkpoint(tmp_path, "x", *one_group_each("ab", rates, SCHEDULERS["lambda"]))
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in "ab"})
    scheduler = SCHEDULERS["lambda"](optim.SGD(model.parameters(), lr=9.0))
    if len({*rates.values()}) > 1:
        with pytest.raises(rankless.MismatchError, match="or states of several that differ"):
            rankless.restore(tmp_path, None, model, scheduler=scheduler)
        assert scheduler.base_lrs == [9.0]
    else:
        assert "scheduler" in rankless.restore(tmp_path, None, model, scheduler=scheduler).exact
        assert scheduler.base_lrs == [0.5]


def save_with_a_period_of_its_rank(path: str) -> None:
    rank = dist.get_rank()
    name = "ab"[rank // 2]
    model, optimizer, _ = one_group_each(name, {"a": 0.1, "b": 0.1}, SCHEDULERS["lambda"])
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    period = 10 + rank if rank > 1 else 12
    rankless.save_checkpoint(path, "x", model, optimizer, lr_scheduler.CosineAnnealingLR(optimizer, period))


def test_a_schedule_that_differed_between_ranks_is_not_exact_in_a_joined_group(ranks: Ranks, tmp_path: Path) -> None:
    """The second stage's differed, and the stored one of it equals that of the first stage."""
    ranks(4, save_with_a_period_of_its_rank, str(tmp_path))
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in "ab"})
    scheduler = lr_scheduler.CosineAnnealingLR(optim.SGD(model.parameters(), lr=0.1), 55)
    restored = rankless.restore(tmp_path, None, model, scheduler=scheduler)
    assert scheduler.T_max == 12
    assert "scheduler" in restored.reconstructed


def test_without_names_of_parameters_schedulers_of_stages_are_not_called_exact(ranks: Ranks, tmp_path: Path) -> None:
    """They are in the order of their parameters in the checkpoint, and in that of the caller here."""
    ranks(2, save_two_stages, str(tmp_path))
    stages = [stage_of(name, **STAGES[name] | {"lr": 9.0, "period": 55}) for name in ("blocks", "embed")]
    restored = rankless.restore(tmp_path, None, scheduler=[scheduler for _, _, scheduler in stages], rng=False)
    assert "scheduler" in restored.reconstructed


def of_one_optimizer(name: str, kinds: list[Any]) -> tuple[Any, Any, list[Any]]:
    model = nn.ModuleDict({name: nn.Linear(2, 2)})
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    return model, optimizer, [kind(optimizer) for kind in kinds]


#: The schedulers of each of two stages.
SEVERAL: list[list[Any]] = [
    [lambda optimizer: lr_scheduler.StepLR(optimizer, 2), lambda optimizer: lr_scheduler.StepLR(optimizer, 5)],
    [lambda optimizer: lr_scheduler.StepLR(optimizer, 3), lr_scheduler.ReduceLROnPlateau],
]


@pytest.mark.parametrize("kinds", SEVERAL)
def test_each_scheduler_of_one_optimizer_keeps_its_own_state(tmp_path: Path, kinds: list[Any]) -> None:
    model, optimizer, schedulers = of_one_optimizer("a", kinds)
    for number, scheduler in enumerate(schedulers):
        scheduler.last_epoch = 10 + number
    rankless.save_checkpoint(tmp_path, "x", model, optimizer, schedulers)
    model, optimizer, schedulers = of_one_optimizer("a", kinds)
    assert "scheduler" in rankless.restore(tmp_path, None, model, optimizer, schedulers).exact
    assert [scheduler.last_epoch for scheduler in schedulers] == [10, 11]


def save_several(path: str) -> None:
    rank = dist.get_rank()
    model, optimizer, schedulers = of_one_optimizer("ab"[rank], SEVERAL[rank])
    for number, scheduler in enumerate(schedulers):
        scheduler.last_epoch = 10 * rank + number
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rankless.save_checkpoint(path, "x", model, optimizer, schedulers)


def load_several(path: str) -> tuple[bool, list[int]]:
    rank = dist.get_rank()
    model, optimizer, schedulers = of_one_optimizer("ab"[rank], SEVERAL[rank])
    restored = rankless.restore(path, None, model, optimizer, schedulers)
    return "scheduler" in restored.exact, [scheduler.last_epoch for scheduler in schedulers]


def test_each_scheduler_of_each_stage_keeps_its_own_state(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_several, str(tmp_path))
    assert ranks(2, load_several, str(tmp_path)) == [(True, [0, 1]), (True, [10, 11])]


@pytest.mark.parametrize("order", ["nab", "anb", "abn"])
def test_a_new_group_does_not_take_the_rate_of_another(tmp_path: Path, order: str) -> None:
    rankless.save_checkpoint(tmp_path, "x", *one_group_each("ab", {"a": 1.0, "b": 0.5}, SCHEDULERS["lambda"]))
    model, optimizer, scheduler = one_group_each(order, {"a": 9.0, "b": 9.0, "n": 3.0}, SCHEDULERS["lambda"])
    with pytest.raises(rankless.MismatchError, match="no state of a scheduler of these parameter groups"):
        rankless.restore(tmp_path, None, model, optimizer, scheduler, strict=False)
    assert [group["lr"] for group in optimizer.param_groups] == [3.0 if name == "n" else 9.0 for name in order]


def test_a_group_whose_parameters_are_all_new_is_not_called_exact(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "x", *one_group_each("ab", {"a": 1.0, "b": 0.5}, SCHEDULERS["lambda"]))
    model, optimizer, scheduler = one_group_each("an", {"a": 9.0, "n": 9.0}, SCHEDULERS["lambda"])
    restored = rankless.restore(tmp_path, None, model, optimizer, scheduler, strict=False)
    assert "scheduler" in restored.reconstructed
    assert scheduler.base_lrs == [1.0, 0.5]


def with_names(names: str) -> tuple[Any, Any]:
    """An optimizer that knows the names of its parameters, and has a group for each layer."""
    layers = {name: nn.Linear(2, 2) for name in names}
    groups = [
        {"params": [(f"{name}.{own}", parameter) for own, parameter in layer.named_parameters()], "lr": rate}
        for rate, (name, layer) in enumerate(layers.items(), 1)
    ]
    optimizer = optim.SGD(groups)
    return optimizer, SCHEDULERS["lambda"](optimizer)


def test_an_optimizer_with_names_has_a_scheduler_with_names(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "x", None, *with_names("ab"))
    optimizer, scheduler = with_names("ba")
    assert "scheduler" in rankless.restore(tmp_path, None, None, optimizer, scheduler).exact
    assert scheduler.base_lrs == [2, 1]


def test_groups_of_one_scheduler_without_names_are_not_called_exact(tmp_path: Path) -> None:
    model, optimizer, scheduler = one_group_each("ab", {"a": 1.0, "b": 0.5}, SCHEDULERS["lambda"])
    rankless.save_checkpoint(tmp_path, "x", model, optimizer, scheduler)
    assert "scheduler" in rankless.restore(tmp_path, None, scheduler=scheduler, rng=False).reconstructed


class OwnSchedule:
    """A scheduler that does not say which parameters it schedules."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def stage_with_others(kind: str, shift: int) -> tuple[Any, Any, list[Any]]:
    rank = dist.get_rank()
    model, optimizer, schedulers = of_one_optimizer("ab"[rank], [lambda one: lr_scheduler.StepLR(one, 3 + rank)])
    if kind == "own":
        return model, optimizer, [OwnSchedule(10 * rank + number + shift) for number in range(2 - rank)]
    if kind == "outside" and rank == 0:
        schedulers.append(OwnSchedule(7 + shift))
    if kind == "untrained" and rank == 0:
        return model.requires_grad_(False), [], []
    return model, optimizer, schedulers


def resume_with_others(path: str, kind: str) -> tuple[bool, list[Any]]:
    rankless.save_checkpoint(path, "x", *stage_with_others(kind, 0))
    model, optimizer, schedulers = stage_with_others(kind, 100)
    restored = rankless.restore(path, None, model, optimizer, schedulers)
    states = [getattr(scheduler, "value", getattr(scheduler, "step_size", None)) for scheduler in schedulers]
    return "scheduler" in restored.exact, states


def test_ranks_may_have_other_numbers_of_schedulers(ranks: Ranks, tmp_path: Path) -> None:
    """If the checkpoint has one of them only once although ranks had different ones, they are not called exact."""
    assert ranks(2, resume_with_others, str(tmp_path / "own"), "own") == [(False, [0, 1]), (False, [0])]
    assert ranks(2, resume_with_others, str(tmp_path / "outside"), "outside") == [(False, [3, 7]), (True, [4])]
    assert ranks(2, resume_with_others, str(tmp_path / "untrained"), "untrained") == [(True, []), (True, [4])]


def test_schedulers_of_a_file_without_names_are_not_called_exact(ranks: Ranks, tmp_path: Path) -> None:
    """The file has those of stages in the order of their parameters."""
    ranks(2, save_two_stages, str(tmp_path))
    rankless.convert(tmp_path / "x", tmp_path / "x.pt", to="torch")
    stages = [stage_of(name, **STAGES[name] | {"lr": 9.0, "period": 55}) for name in ("embed", "blocks")]
    models, optimizers, schedulers = map(list, zip(*stages, strict=True))
    restored = rankless.restore(tmp_path / "x.pt", None, models, optimizers, schedulers, rng=False)
    assert "scheduler" not in restored.exact


@pytest.mark.parametrize("target", ["torch", "dcp", "lightning"])
@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_groups_of_a_file_without_names_are_exact_if_their_order_does_not_matter(
    tmp_path: Path, target: str, rate: float
) -> None:
    rankless.save_checkpoint(tmp_path, "x", *one_group_each("ab", {"a": 1.0, "b": rate}, SCHEDULERS["lambda"]))
    path = tmp_path / ("exported.ckpt" if target == "lightning" else f"exported_{target}")
    rankless.convert(tmp_path / "x", path, to=target)
    here = one_group_each("ba", {"a": 9.0, "b": 9.0}, SCHEDULERS["lambda"])
    restored = rankless.restore(path, None, *here, rng=False)
    assert ("scheduler" in restored.exact) == (rate == 1.0)
