"""Drawn training states: modules, optimizers, schedulers, loaders, layouts, and one value that one rank changes.

What a rank holds is read with torch alone. A load that calls a component exact must give each rank what it held, or
what all ranks held that had the name.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import rankless
from rankless.errors import RanklessError
from tests.helpers.drawn_cases import PIPELINES, Case
from tests.helpers.drawn_modules import Part
from tests.helpers.drawn_objects import BATCH, Averaging, Training, build, change, train
from tests.helpers.pool import Ranks

#: By component and name what a rank holds.
Values = dict[str, dict[str, Any]]


def _whole_value(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def read_values(training: Training, content: Any) -> Values:
    """Return what this rank holds, by component and name. Shards are gathered by torch. Every rank calls it."""
    values: Values = {"model": {}, "optimizer": {}, "scheduler": {}}
    for module in training.modules:
        values["model"] |= _read_module(module)
    for number, (module, optimizer) in enumerate(zip(training.modules, training.optimizers, strict=False)):
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        values["optimizer"] |= _read_optimizer(optimizer, names)
        for scheduler in training.schedulers[number : number + 1]:
            values["scheduler"] |= _read_scheduler(scheduler, optimizer, names)
    return values | {
        "stateful": {"values": training.holder.values.clone()},
        "user_content": copy.deepcopy(content),
    }


def _read_module(module: nn.Module) -> dict[str, Any]:
    values = {name: _whole_value(p) for name, p in module.named_parameters(remove_duplicate=False)}
    values |= {name: _whole_value(b) for name, b in module.named_buffers()}
    parts = {name: part for name, part in module.named_children() if isinstance(part, Part)}
    return values | {f"{name}._extra": copy.deepcopy(part.get_extra_state()) for name, part in parts.items()}


def _read_optimizer(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, Any]:
    states: dict[str, Any] = {}
    for group in optimizer.param_groups:
        settings = {k: _whole_value(v) for k, v in group.items() if k not in {"params", "param_names"}}
        for parameter in group["params"]:
            name = names[id(parameter)]
            states[name] = settings
            states |= {f"{name}/{k}": _whole_value(v) for k, v in optimizer.state.get(parameter, {}).items()}
    if isinstance(optimizer, Averaging):
        states["average"] = optimizer.average.clone()
    return states


def _read_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, Any]:
    """Return all that a scheduler holds, for each parameter that it schedules."""
    values: dict[str, Any] = {}
    count = len(optimizer.param_groups)
    for key, value in scheduler.state_dict().items():
        by_group = value if isinstance(value, list) and len(value) == count else [value] * count
        for group, of_group in zip(optimizer.param_groups, by_group, strict=True):
            values |= {f"{names[id(parameter)]}/{key}": copy.deepcopy(of_group) for parameter in group["params"]}
    return values


def save_case(run: Path, case: Case) -> tuple[str, Any]:
    """Train and save. Return what this rank held at the last save, or why it was refused."""
    training = build(case, case.layout, case.seed)
    held: Any = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(case.saves):
            train(training, case, 1 + number % 2)
            if number == case.saves - 1 and dist.get_rank() == case.changed:
                change(training, case)
            held = read_values(training, training.content)
            try:
                saved = rankless.save_checkpoint(
                    run,
                    f"s{number}",
                    **training.objects(case.layout),
                    user_content=training.content,
                    rng=False,
                    async_save=case.background,
                )
                if case.background:
                    saved.wait()
            except RanklessError as error:
                return f"{type(error).__name__}: {error}", None
    return "", held | {"dataloader": {"rest": training.read_rest()}}


def load_case(run: Path, case: Case) -> tuple[str, Any, tuple[str, ...]]:
    """Load into new objects with other values. Return what this rank has then, and what is called exact."""
    training = build(case, case.loaded_layout, case.seed + 1, is_meta=case.is_meta)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            objects = training.objects(case.loaded_layout)
            restored = rankless.restore(run, f"s{case.saves - 1}", **objects, rng=False)
        except RanklessError as error:
            return f"{type(error).__name__}: {error}", None, ()
    training.iterate_again()
    values = read_values(training, restored.user_content)
    return "", values | {"dataloader": {"rest": training.read_rest()}}, restored.exact


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


def _may_refuse(case: Case, message: str) -> bool:
    """Return whether there is a reason to refuse: a change, or what is refused whatever the values are."""
    return case.change != "nothing" or any(part in message for part in _reasons_to_refuse(case))


def _reasons_to_refuse(case: Case) -> Iterator[str]:
    """Yield a part of each message that the layouts and objects of a case may lead to."""
    layouts = {case.layout, case.loaded_layout}
    if "reversed" in layouts:
        yield "make the mesh with ascending ranks"  # torch contradicts itself about uneven shards
    if case.loader == "torchdata" and not case.is_same_world:
        yield "StatefulDataLoader has no load_state_dicts"
    if case.is_meta and "unset" in case.modules:
        yield ".scratch: on the meta device here"
    if case.layout in PIPELINES and case.is_large:
        yield "such values must be on rank 0, too"
    if not layouts.isdisjoint(PIPELINES) and not (case.is_same_world and len(layouts) == 1):
        # Ranks hold other parameters than those that saved.
        yield "parameter groups in the checkpoint"
        yield "own values"


def _is_broadcast(case: Case, component: str, name: str) -> bool:
    """Return whether DDP gives all ranks rank 0's value of a buffer."""
    is_buffer = name.endswith(("counts", "mean", "var", "num_batches_tracked", "scratch"))
    return case.layout == "ddp" and component == "model" and is_buffer


def check_case(ranks: Ranks, folder: Path, case: Case) -> str:
    """Save and load a case. Return ``"exact"``, ``"inexact"`` or ``"refused"``, or raise ``AssertionError``."""
    saved = ranks(case.world, save_case, folder / "run", case)
    if saved[0][0]:
        assert _may_refuse(case, saved[0][0]), (case, saved[0][0])
        return "refused"
    loaded = ranks(case.loaded_world, load_case, folder / "run", case)
    if loaded[0][0]:
        assert _may_refuse(case, loaded[0][0]), (case, loaded[0][0])
        return "refused"
    held = [values for _, values in saved]
    for rank, (_, values, exact) in enumerate(loaded):
        for component in exact:
            _check_component(case, component, rank, values[component], [of_rank[component] for of_rank in held])
    _check_nothing_is_lost(case, held, loaded)
    components = _saved_components(case)
    if case.change == "nothing":
        assert components <= {*loaded[0][2]}, (case, loaded[0][2])
    return "exact" if components <= {*loaded[0][2]} else "inexact"


def _check_component(case: Case, component: str, rank: int, values: Any, held: list[Any]) -> None:
    """Raise if a value of an exact component is neither what this rank held nor what all ranks with the name held."""
    for name, value in values.items():
        if name.endswith("scratch") and name.startswith("unset"):
            continue  # it is neither saved nor initialized
        if case.is_same_world and name in held[rank] and _equal(value, held[rank][name]):
            continue
        origins = [n for n, of_rank in enumerate(held) if name in of_rank]
        assert origins, (case, component, name, "appeared")
        for origin in [0] if _is_broadcast(case, component, name) else origins:
            assert _equal(value, held[origin][name]), (case, component, name, rank, origin)


def _check_nothing_is_lost(case: Case, held: list[Values], loaded: list[Any]) -> None:
    """Raise if ranks have no value of a name of a component that all call exact, or no rank gets a sample."""
    for component in set.intersection(*({*exact} for _, _, exact in loaded)):
        expected = {name for values in held for name in values[component]}
        on_ranks = [{*values[component]} for _, values, _ in loaded]
        if case.loaded_layout in PIPELINES:
            on_ranks = [set.union(*on_ranks)]
        assert all(expected == names for names in on_ranks), (case, component, expected, on_ranks)
    left, given = (
        Counter(sample for values in all_ranks for sample in values["dataloader"]["rest"])
        for all_ranks in (held, [values for _, values, _ in loaded])
    )
    assert not left - given, (case, "samples are left out")
    # The last batch of an epoch is completed with samples of the next one.
    assert (given - left).total() < case.loaded_world * BATCH, (case, "samples are repeated")


def _saved_components(case: Case) -> set[str]:
    """Return the components that a load asks for and that can be exact on its ranks: loaders on as many as before."""
    components = {"model", "stateful", "user_content"}
    if not case.is_meta:
        components |= {"optimizer", "scheduler"} - ({"scheduler"} if case.scheduler == "none" else set())
    if case.loader != "none" and case.is_same_world:
        components.add("dataloader")
    return components
