"""Drawn training states: modules, optimizers, schedulers, objects, layouts, and one value that one rank changes.

What a rank holds is read with torch alone. A load that calls a component exact must give each rank what it held, or, on
other ranks, what all of them held.
"""

from __future__ import annotations

import copy
import random
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import rankless
from rankless.errors import RanklessError
from tests.helpers.pool import Ranks

#: More elements than a value may have that is stored inline: 64 KiB of float32.
LARGE = 20_000

LAYOUTS = ("plain", "ddp", "fsdp2", "hsdp", "tensor", "reversed", "grid")
OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop", "adagrad", "nadam", "own")
SCHEDULERS = ("none", "step", "lambda", "cosine", "plateau")
MODULES = ("linear", "embedding", "norm", "batchnorm", "scalar", "frozen", "tied", "buffer", "extra", "named")
CHANGES = (
    "nothing",
    "parameter",
    "buffer",
    "extra",
    "stateful",
    "user_content",
    "moment",
    "own",
    "setting",
    "scheduler",
)


@dataclass(frozen=True)
class Case:
    """One draw. ``change`` is made on rank ``changed`` before the last of ``saves`` saves."""

    seed: int
    modules: tuple[str, ...]
    optimizer: str
    groups: int
    scheduler: str
    layout: str
    world: int
    loaded_layout: str
    loaded_world: int
    change: str
    changed: int
    is_large: bool
    saves: int
    background: bool


def draw_case(seed: int) -> Case:
    """Draw a case. The same seed gives the same case everywhere."""
    drawn = random.Random(seed)
    world = drawn.choice([2, 2, 2, 3, 4])
    layout = drawn.choice(LAYOUTS)
    is_same = drawn.random() < 0.5
    loaded_world = world if is_same else drawn.choice([1, 2, 3])
    return Case(
        seed,
        tuple(drawn.sample(MODULES, drawn.randint(1, 5))),
        drawn.choice(OPTIMIZERS),
        drawn.choice([1, 2]),
        drawn.choice(SCHEDULERS),
        layout,
        world,
        layout if is_same else drawn.choice(LAYOUTS),
        loaded_world,
        drawn.choice(CHANGES),
        drawn.randrange(world),
        drawn.random() < 0.5,
        drawn.choice([1, 1, 2, 3]),
        drawn.random() < 0.3,
    )


class Part(nn.Module):
    """A module of one kind."""

    def __init__(self, kind: str, size: int) -> None:
        super().__init__()
        self.kind = kind
        if kind in {"linear", "tied"}:
            self.inner: nn.Module = nn.Linear(5, 7)
        if kind == "tied":
            self.head = nn.Linear(5, 7)
            self.head.weight = self.inner.weight
        if kind == "embedding":
            self.inner = nn.Embedding(11, 3)
        if kind == "norm":
            self.inner = nn.LayerNorm(6)
        if kind == "batchnorm":
            self.inner = nn.BatchNorm1d(6)
        if kind == "named":
            self._orig_mod = nn.Linear(3, 3)
            self.module = nn.Linear(2, 3)
        if kind == "scalar":
            self.weight = nn.Parameter(torch.rand(()))
        if kind == "frozen":
            self.weight = nn.Parameter(torch.rand(5, 3), requires_grad=False)
        self.scales = torch.rand(size)
        if kind == "buffer":
            self.register_buffer("counts", torch.arange(size))
            self.register_buffer("mean", torch.rand(size))
            self.register_buffer("scratch", torch.rand(3), persistent=False)

    def get_extra_state(self) -> Any:
        return {"scales": self.scales, "n": 3} if self.kind == "extra" else None

    def set_extra_state(self, state: Any) -> None:
        if self.kind == "extra":
            self.scales = state["scales"]


class Whole(nn.Module):
    """All modules of a case, and a parameter that every layout divides."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 4))
        size = LARGE if case.is_large else 4
        for number, kind in enumerate(case.modules):
            setattr(self, f"{kind}{number}", Part(kind, size))


class Averaging(torch.optim.SGD):
    """An optimizer that keeps a value in its state dict besides its states."""

    average = torch.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "average": self.average, "count": 2}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = state_dict["average"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k not in {"average", "count"}})


class Holder:
    """A stateful object."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


@dataclass
class Training:
    """The objects of a case on this rank."""

    whole: Whole
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    holder: Holder
    content: dict[str, Any]

    def objects(self) -> dict[str, Any]:
        given = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {k: v for k, v in given.items() if v is not None} | {"stateful": {"holder": self.holder}}


def build(case: Case, layout: str, seed: int) -> Training:
    """Make the objects. Values depend on ``seed``, and are the same on all ranks."""
    torch.manual_seed(seed)
    whole = Whole(case)
    model = _lay_out(whole, layout)
    optimizer = _make_optimizer(case, model)
    if isinstance(optimizer, Averaging):
        optimizer.average = torch.rand(LARGE if case.is_large else 3)
    size = LARGE if case.is_large else 3
    content = {"a": [1, 2.5], "values": torch.rand(size)}
    return Training(whole, model, optimizer, _make_scheduler(case, optimizer), Holder(torch.rand(size)), content)


def _lay_out(whole: Whole, layout: str) -> nn.Module:
    world = dist.get_world_size() if dist.is_initialized() else 1
    if layout == "plain":
        return whole
    if layout == "ddp":
        return DistributedDataParallel(whole)
    if layout in {"tensor", "reversed", "grid"}:
        return _distribute(whole, layout, list(range(world)))
    rows = 2 if layout == "hsdp" and world == 4 else 1
    mesh = DeviceMesh("cpu", list(range(world)))
    if rows > 1:
        mesh = DeviceMesh("cpu", torch.arange(world).reshape(rows, -1), mesh_dim_names=("replicate", "shard"))
    scalars = {p for p in whole.parameters() if p.ndim == 0}
    return fully_shard(whole, mesh=mesh, ignored_params=scalars)


def _distribute(whole: Whole, layout: str, ranks: list[int]) -> Whole:
    """Divide parameters over a mesh of one dimension or two, as tensor parallelism may."""
    mesh = DeviceMesh("cpu", ranks[:: -1 if layout == "reversed" else 1])
    if layout == "grid":
        mesh = DeviceMesh("cpu", torch.tensor(ranks).reshape(2 if len(ranks) == 4 else 1, -1))
    for module in whole.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            places: list[Placement] = [Replicate()] * mesh.ndim
            if parameter.ndim and name != "bias":
                places = [Shard(min(dim, parameter.ndim - 1)) for dim in range(mesh.ndim)]
            spread = distribute_tensor(parameter.detach(), mesh, places)
            setattr(module, name, nn.Parameter(spread, requires_grad=parameter.requires_grad))
    for module in whole.modules():
        if isinstance(module, Part) and module.kind == "tied":
            module.head.weight = module.inner.weight
    return whole


def _make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained}]
    if case.groups == 2 and len(trained) > 1:
        groups = [{"params": trained[:1]}, {"params": trained[1:], "lr": 0.05}]
    kinds: dict[str, Any] = {
        "sgd": lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9),
        "adam": lambda g: torch.optim.Adam(g, lr=0.1, amsgrad=True),
        "adamw": lambda g: torch.optim.AdamW(g, lr=0.1),
        "rmsprop": lambda g: torch.optim.RMSprop(g, lr=0.1, momentum=0.5),
        "adagrad": lambda g: torch.optim.Adagrad(g, lr=0.1),
        "nadam": lambda g: torch.optim.NAdam(g, lr=0.1),
        "own": lambda g: Averaging(g, lr=0.1, momentum=0.9),
    }
    optimizer: torch.optim.Optimizer = kinds[case.optimizer](groups)
    return optimizer


def _make_scheduler(case: Case, optimizer: Any) -> Any:
    schedulers = torch.optim.lr_scheduler
    kinds: dict[str, Any] = {
        "none": lambda: None,
        "step": lambda: schedulers.StepLR(optimizer, 2, 0.5),
        "lambda": lambda: schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, 9),
        "plateau": lambda: schedulers.ReduceLROnPlateau(optimizer, patience=0),
    }
    return kinds[case.scheduler]()


def train(training: Training, case: Case, steps: int) -> None:
    """Take steps with gradients that depend on nothing but the step."""
    for step in range(steps):
        for parameter in training.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, 0.25 + step)
        training.optimizer.step()
        if case.scheduler == "plateau":
            training.scheduler.step(1.0)
        elif training.scheduler is not None:
            training.scheduler.step()


def _last(tensor: Any) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().reshape(-1)[local.numel() * 2 // 3 :][:1]


def change(training: Training, case: Case) -> None:
    """Change one element of one value on this rank."""
    whole, optimizer = training.whole, training.optimizer
    targets: list[Any] = {
        "parameter": [whole.weight],
        "buffer": [buffer for _, buffer in whole.named_buffers()],
        "extra": [part.scales for part in whole.children() if isinstance(part, Part)],
        "stateful": [training.holder.values],
        "user_content": [training.content["values"]],
        "moment": [v for states in optimizer.state.values() for v in states.values() if isinstance(v, torch.Tensor)],
        "own": [optimizer.average] if isinstance(optimizer, Averaging) else [],
    }.get(case.change, [])
    for target in targets[case.seed % max(1, len(targets)) :][:1]:
        _last(target).add_(1)
    if case.change == "setting":
        training.optimizer.param_groups[-1]["weight_decay"] = 0.5
    if case.change == "scheduler" and training.scheduler is not None:
        training.scheduler.last_epoch = 7


def _whole_value(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def read_values(training: Training, content: Any) -> dict[str, dict[str, Any]]:
    """Return what this rank holds, by component and name. Shards are gathered by torch. Every rank calls it."""
    whole, optimizer = training.whole, training.optimizer
    names = {id(p): name for name, p in whole.named_parameters()}
    model = {name: _whole_value(p) for name, p in whole.named_parameters(remove_duplicate=False)}
    persistent = {name for name in whole.state_dict() if "_extra_state" not in name}
    model |= {name: _whole_value(b) for name, b in whole.named_buffers() if name in persistent}
    model |= {f"{n}._extra": copy.deepcopy(m.get_extra_state()) for n, m in whole.named_children()}
    states: dict[str, Any] = {}
    for group in optimizer.param_groups:
        settings = {k: _whole_value(v) for k, v in group.items() if k not in {"params", "param_names"}}
        for parameter in group["params"]:
            name = names[id(parameter)]
            states[name] = settings
            states |= {f"{name}/{k}": _whole_value(v) for k, v in optimizer.state.get(parameter, {}).items()}
    if isinstance(optimizer, Averaging):
        states["average"] = optimizer.average.clone()
    scheduler = {} if training.scheduler is None else copy.deepcopy(training.scheduler.state_dict())
    scheduler.pop("lr_lambdas", None)
    return {
        "model": model,
        "optimizer": states,
        "scheduler": scheduler,
        "stateful": {"values": training.holder.values.clone()},
        "user_content": copy.deepcopy(content),
    }


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
                    **training.objects(),
                    user_content=training.content,
                    rng=False,
                    async_save=case.background,
                )
                if case.background:
                    saved.wait()
            except RanklessError as error:
                return f"{type(error).__name__}: {error}", None
    return "", held


def load_case(run: Path, case: Case) -> tuple[str, Any, tuple[str, ...]]:
    """Load into new objects with other values. Return what this rank has then, and what is called exact."""
    training = build(case, case.loaded_layout, case.seed + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            restored = rankless.restore(run, f"s{case.saves - 1}", **training.objects(), rng=False)
        except RanklessError as error:
            return f"{type(error).__name__}: {error}", None, ()
    return "", read_values(training, restored.user_content), restored.exact


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


def _may_refuse(case: Case, message: str) -> bool:
    """Return whether a change is a reason to refuse, or uneven shards on a mesh whose order torch contradicts."""
    is_reversed = "reversed" in {case.layout, case.loaded_layout}
    return case.change != "nothing" or (is_reversed and "make the mesh with ascending ranks" in message)


def _is_broadcast(case: Case, component: str, name: str) -> bool:
    """Return whether DDP gives all ranks rank 0's value of a buffer."""
    kinds = {f"{kind}{n}": kind for n, kind in enumerate(case.modules)}
    is_buffer = kinds.get(name.partition(".")[0]) in {"buffer", "batchnorm"} and "_extra" not in name
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
            is_of_rank = component in {"stateful", "user_content"} or case.layout == case.loaded_layout
            is_own = case.world == case.loaded_world and is_of_rank
            for name, value in values[component].items():
                origins = [rank] if is_own else range(case.world)
                origins = [0] if _is_broadcast(case, component, name) else origins
                for origin in origins:
                    expected = held[origin][component]
                    assert name in expected, (case, component, name, "appeared")
                    assert _equal(value, expected[name]), (case, component, name, rank, origin, exact)
            missing = held[rank % case.world][component].keys() - values[component].keys()
            assert not missing, (case, component, missing)
    components = {"model", "optimizer", "stateful", "user_content"}
    if case.scheduler != "none":
        components.add("scheduler")
    if case.change == "nothing":
        assert components <= {*loaded[0][2]}, (case, loaded[0][2])
    return "exact" if components <= {*loaded[0][2]} else "inexact"
