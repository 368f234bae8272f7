"""Tests that a probe predicts what a real first step creates, and leaves nothing behind."""

import functools
import itertools
import re
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rankless.errors import OptimizerMismatchError
from rankless.state.optimizer.probe import ProbedState, probe_states
from tests.helpers.torch_limits import HAS_MUON, SHARDS_UNEVENLY, STEPS_FAIL_TOGETHER

#: Of torch's optimizers, only this one has steps that use collectives.
needs_muon = pytest.mark.skipif(not HAS_MUON, reason="torch has Muon since 2.9")

# Other shapes than an uneven matrix: smaller than the mesh, a scalar, three dimensions.
SHAPES = [(7, 5), (9,), (1,), (), (4, 3, 5)]
MORE_SHAPES = {"AdamW": SHAPES, "Adagrad": SHAPES, "Adafactor": SHAPES}
# torch 2.13 cannot step these on sharded matrices.
NOT_ON_SHARDS = {"Rprop", "Adafactor", "Adafactor foreach"}

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "Adam, lr a tensor": (torch.optim.Adam, {"lr": torch.tensor(0.1)}),
    "SGD": (torch.optim.SGD, {}),
    "SGD momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {"foreach": True}),
    "Adamax": (torch.optim.Adamax, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "Rprop": (torch.optim.Rprop, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "Adafactor foreach": (torch.optim.Adafactor, {"foreach": True}),
    **({"Muon": (torch.optim.Muon, {})} if HAS_MUON else {}),
}
ONLY_PLAIN: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "Adagrad fused": (torch.optim.Adagrad, {"fused": True}),
}


class Odd(torch.optim.Optimizer):
    """States of all kinds, some out of results of the step, and all that a copy of an optimizer may share."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "buffer": [[0], [0]], "scale": torch.ones(())})
        self.seen: dict[str, list[int]] = {"steps": []}
        self.total = torch.zeros(3)
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"eager": torch.zeros_like(p), "trace": [torch.zeros(2)]}

    def step(self, _: Any = None) -> None:
        self.seen["steps"].append(1)
        self.total.add_(1)
        for group in self.param_groups:
            group["buffer"][0][0] += 1
            group["scale"].mul_(0.5)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["eager"].add_(p.grad)
                state["trace"].append(state["trace"][0] + 1)
                state["count"] = 1
                state["nothing"] = None
                state["list"] = [p.grad.sum()]
                state["half"] = p.grad.to(torch.bfloat16)
                state["mask"] = p.grad > 0
                state["turned"] = p.grad.t()
                state["sum"] = p.grad.sum(0, keepdim=True)
                state["mine"] = torch.zeros(3, dtype=torch.int16)
                with torch.no_grad():
                    p.add_(torch.randn_like(p) * group["scale"] * self.total[0], alpha=float(p.norm() > 0))


class Sub(torch.optim.AdamW):
    """Calls a step that is wrapped again."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def laid_out(shape: tuple[int, ...], layout: str) -> nn.Parameter:
    value = torch.randn(shape)
    if layout == "plain":
        return nn.Parameter(value)
    if layout == "channels last":
        return nn.Parameter(value.t().contiguous().t()) if len(shape) == 2 else nn.Parameter(value)
    if layout in {"fsdp", "fsdp and tp"}:
        return _sharded_by_fsdp(shape, layout)
    size = dist.get_world_size()
    grid = (size,) if "," not in layout else (1, size)
    codes = layout.split(",")
    placements = [Shard(int(code)) if code.isdigit() and int(code) < len(shape) else Replicate() for code in codes]
    return nn.Parameter(distribute_tensor(value, init_device_mesh("cpu", grid), placements, src_data_rank=None))


def _sharded_by_fsdp(shape: tuple[int, ...], layout: str) -> nn.Parameter:
    size = dist.get_world_size()
    if len(shape) == 2 and layout == "fsdp and tp" and not SHARDS_UNEVENLY:
        shape = (-(-shape[0] // size) * size, shape[1])
    module = nn.Linear(shape[1], shape[0], bias=False) if len(shape) == 2 else nn.LayerNorm(shape or (3,), bias=False)
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    if layout == "fsdp":
        fully_shard(module, mesh=mesh["tp"])
    else:
        if len(shape) == 2:
            parallelize_module(module, mesh["tp"], ColwiseParallel())
        fully_shard(module, mesh=mesh["dp"])
    return module.weight


LAYOUTS = ("0", "1", "r,0", "0,1", "fsdp", "fsdp and tp")


def gradient(parameter: torch.Tensor) -> torch.Tensor:
    return torch.full_like(parameter, 0.25, requires_grad=False)


def told(tensor: Any) -> Any:
    """All that a probe tells of a state, taken from the state."""
    if not isinstance(tensor, torch.Tensor):
        return None
    is_distributed = isinstance(tensor, DTensor)
    local = tensor._local_tensor if is_distributed else tensor
    return ProbedState(
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tuple(local.shape),
        local.stride(),
        tensor.device_mesh if is_distributed else None,
        tuple(tensor.placements) if is_distributed else (),
    )


def stepped(make: Callable[[], torch.optim.Optimizer], parameter: torch.Tensor) -> Any:
    """The states after a real step, or the error of torch."""
    optimizer = make()
    parameter.grad = gradient(parameter)
    try:
        optimizer.step()
    except Exception as error:  # noqa: BLE001 - torch's own failings
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return {name: told(value) for name, value in optimizer.state.get(parameter, {}).items()}


def compared(kinds: dict[str, tuple[Any, dict[str, Any]]], layouts: tuple[str, ...]) -> list[str]:
    """Where a probe and a real step differ."""
    wrong = []
    lay_out_once = functools.cache(laid_out)
    for name, (kind, options) in kinds.items():
        for shape, layout in itertools.product(MORE_SHAPES.get(name, SHAPES[:1]), layouts):
            parameter = lay_out_once(shape, layout)
            make = functools.partial(kind, [parameter], **options)
            try:
                actual: Any = probe_states(make(), parameter)
            except OptimizerMismatchError as error:
                actual = str(error)
            made = stepped(make, parameter)
            if isinstance(made, str) and name in NOT_ON_SHARDS:
                continue
            if actual != made:
                wrong.append(f"{name}, {layout}, {shape}: told {actual}, made {made}")
    return wrong


def test_a_plain_parameters_states_are_those_of_a_real_step() -> None:
    kinds = {**OPTIMIZERS, **ONLY_PLAIN, "Odd": (Odd, {})}
    assert compared(kinds, ("plain", "channels last")) == []


@pytest.mark.skipif(not STEPS_FAIL_TOGETHER, reason="a failing step blocks the other rank")
@pytest.mark.parametrize(
    ("size", "names", "layouts"),
    [
        pytest.param(1, {"SGD momentum", "Muon"}, LAYOUTS, marks=pytest.mark.full),
        (2, {"SGD momentum", "Muon"}, LAYOUTS),
        (2, OPTIMIZERS.keys(), ("fsdp and tp",)),
        pytest.param(2, OPTIMIZERS.keys(), LAYOUTS, marks=pytest.mark.full),
    ],
)
def test_a_dtensors_states_are_those_of_a_real_step(
    ranks: Any, size: int, names: Collection[str], layouts: tuple[str, ...]
) -> None:
    kinds = {name: kind for name, kind in OPTIMIZERS.items() if name in names}
    for wrong in ranks(size, compared, {**kinds, "Odd": (Odd, {})}, layouts):
        assert wrong == []


def emptied(kind: Any, layout: str, shape: tuple[int, ...]) -> list[bool]:
    parameter = laid_out(shape, layout)
    actual = probe_states(kind([parameter]), parameter)
    dist.barrier()  # a rank that leaves before the others have connected breaks their pool
    return [
        told(value.make_empty()) == value and not isinstance(value.make_empty(), nn.Parameter)
        for value in actual.values()
        if value
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_empty_one_is_like_it(ranks: Any, layout: str) -> None:
    for same in ranks(2, emptied, torch.optim.AdamW, layout, (7, 5)):
        assert same == [True, True, True]


def test_adafactor_keeps_rows_and_columns() -> None:
    parameter = nn.Parameter(torch.ones(7, 5))
    actual = probe_states(torch.optim.Adafactor([parameter]), parameter)
    assert {name: value.shape for name, value in actual.items()} == {"step": (), "row_var": (7, 1), "col_var": (1, 5)}


def snapshot(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> list[str]:
    """All that a probe could have changed."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    parts = [vars(optimizer), groups, optimizer.state, parameter, parameter._version, parameter.grad, vars(parameter)]
    return [*map(repr, parts), torch.get_rng_state().numpy().tobytes().hex()]


@pytest.mark.parametrize("kind", [Odd, Sub, torch.optim.Adagrad, torch.optim.SGD, torch.optim.Adafactor])
def test_nothing_is_left_of_a_probe(kind: Any) -> None:
    parameter = nn.Parameter(torch.randn(7, 5))
    optimizer = kind([parameter, nn.Parameter(torch.ones(2, 2))])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    called: list[str] = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: called.append("pre")),
        optimizer.register_step_post_hook(lambda *_: called.append("post")),
        register_optimizer_step_pre_hook(lambda *_: called.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: called.append("global post")),
    ]
    before = snapshot(optimizer, parameter)
    probe_states(optimizer, parameter)
    after = snapshot(optimizer, parameter)
    assert called == []
    assert after == before
    assert not getattr(optimizer, "_opt_called", False), "the scheduler believes in a step"
    parameter.grad = gradient(parameter)
    optimizer.step()
    scheduler.step()
    assert {"pre", "post", "global pre", "global post"} <= set(called)
    for handle in handles:
        handle.remove()


def test_a_probe_after_a_step_tells_the_same() -> None:
    parameter = nn.Parameter(torch.randn(7, 5))
    optimizer = torch.optim.Adafactor([parameter])
    first = probe_states(optimizer, parameter)
    parameter.grad = gradient(parameter)
    optimizer.step()
    kept = {name: value.clone() for name, value in optimizer.state[parameter].items()}
    assert probe_states(optimizer, parameter) == first
    assert all(torch.equal(value, kept[name]) for name, value in optimizer.state[parameter].items())


def test_a_probe_takes_no_memory() -> None:
    parameter = nn.Parameter(torch.zeros(1, 1).expand(2**30, 2**12))
    for kind in (torch.optim.AdamW, torch.optim.Adafactor, *((torch.optim.Muon,) if HAS_MUON else ())):
        assert probe_states(kind([parameter]), parameter)


def sequence_numbers() -> list[int]:
    """How many collectives each group has seen."""
    return [group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map]


def alone(kind: Any, layout: str) -> tuple[bool, bool]:
    """Whether a probe on one rank alone, then a real step on all, use a process group."""
    parameter = laid_out((7, 5), layout)
    optimizer = kind([parameter])
    before = sequence_numbers()
    if dist.get_rank() == 0:
        probe_states(optimizer, parameter)
    between = sequence_numbers()
    parameter.grad = gradient(parameter)
    optimizer.step()
    return between != before, sequence_numbers() != between


@needs_muon
@pytest.mark.parametrize("layout", ["0", "1", "0,0", "fsdp"])
def test_one_rank_can_probe_alone(ranks: Any, layout: str) -> None:
    for probed, really in ranks(2, alone, torch.optim.Muon, layout):
        assert (probed, really) == (False, True)


def trained(with_probe: bool, layout: str) -> list[Any]:
    torch.manual_seed(3)
    parameter = laid_out((7, 5), layout)
    optimizer = torch.optim.Muon([parameter], lr=0.1)
    for _ in range(2):
        if with_probe:
            probe_states(optimizer, parameter)
        parameter.grad = gradient(parameter) * parameter.detach()
        optimizer.step()
    return parameter.full_tensor().tolist()


@needs_muon
def test_a_probe_does_not_change_steps_to_come(ranks: Any) -> None:
    assert ranks(2, trained, True, "0") == ranks(2, trained, False, "0")


class Talkative(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        dist.all_reduce(self.param_groups[0]["params"][0].grad)
        super().step(closure)


class Nested(torch.optim.Optimizer):
    """Hides an optimizer where a look at its attributes does not find it."""

    def __init__(self, params: list[Any]) -> None:
        super().__init__(params, {})
        inner = torch.optim.AdamW(params)
        self.inner = lambda: inner

    def step(self, _: Any = None) -> None:
        self.inner().step()


def refused(kind: str) -> tuple[str, int]:
    parameter = laid_out((7, 5), "plain")
    parameter.grad = gradient(parameter)
    if kind == "zero":
        optimizer: Any = ZeroRedundancyOptimizer([parameter], torch.optim.AdamW, lr=0.1)
        inner = optimizer.optim
    else:
        optimizer = (Nested if kind == "nested" else Talkative)([parameter])
        inner = optimizer.inner() if kind == "nested" else optimizer
    with pytest.raises(OptimizerMismatchError) as raised:
        probe_states(optimizer, parameter)
    return str(raised.value), len(inner.state)


@pytest.mark.parametrize(
    ("kind", "reason"), [("zero", "wraps another"), ("nested", "steps another"), ("talkative", "communicates")]
)
def test_what_reaches_beyond_the_copy_is_refused(ranks: Any, kind: str, reason: str) -> None:
    for message, states in ranks(1, refused, kind):
        assert reason in message
        assert states == 0


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(torch.optim.LBFGS, "closure"), (torch.optim.SparseAdam, "dense gradients")],
)
def test_an_error_names_the_optimizer_and_the_reason(kind: Any, reason: str) -> None:
    parameter = nn.Parameter(torch.ones(7, 5))
    with pytest.raises(OptimizerMismatchError, match=rf"{kind.__name__}.*\[7, 5\].*{re.escape(reason)}"):
        probe_states(kind([parameter]), parameter)


def fsdp_adafactor() -> str:
    parameter = laid_out((7, 5), "fsdp")
    with pytest.raises(OptimizerMismatchError) as raised:
        probe_states(torch.optim.Adafactor([parameter]), parameter)
    dist.barrier()
    return str(raised.value)


@pytest.mark.skipif(not STEPS_FAIL_TOGETHER, reason="torch takes this step")
def test_a_step_that_torch_cannot_take_is_refused(ranks: Any) -> None:
    for message in ranks(2, fsdp_adafactor):
        # What torch says, differs from version to version.
        assert re.match(
            r"the states that Adafactor creates .* before its first step; take one, then load \(\w+: .", message
        )


def test_a_parameter_of_another_optimizer_is_refused() -> None:
    left, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with pytest.raises(OptimizerMismatchError, match="in none of its groups"):
        probe_states(torch.optim.AdamW([left]), other)
