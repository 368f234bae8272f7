"""Every optimizer that torch can step in a layout is saved from it, and loaded into one that never stepped."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.errors import UnsupportedTensorError
from tests.pool import Ranks

Tensors = dict[str, torch.Tensor]

KINDS: dict[str, Callable[..., optim.Optimizer]] = {
    "adamw foreach": functools.partial(optim.AdamW, foreach=True),
    "adam fused": functools.partial(optim.Adam, fused=True),
    "adam amsgrad": functools.partial(optim.Adam, amsgrad=True),
    "adamw capturable": functools.partial(optim.AdamW, lr=torch.tensor(0.01), foreach=False),
    "adagrad": functools.partial(optim.Adagrad, lr=0.1, initial_accumulator_value=0.5),
    "rmsprop": functools.partial(optim.RMSprop, momentum=0.9, centered=True),
    "nadam": optim.NAdam,
    "adadelta": optim.Adadelta,
    "sgd nesterov": functools.partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
}
#: Torch itself steps these in some layouts only: Adafactor's norms of a DTensor are Partial, and it stops at them.
PARTLY: dict[str, tuple[Callable[..., optim.Optimizer], tuple[str, ...]]] = {
    "adafactor": (functools.partial(optim.Adafactor, lr=0.1), ("plain", "ddp")),
    "muon": (functools.partial(optim.Muon, lr=0.1), ("plain", "ddp", "fsdp", "tp", "fsdp_tp")),
}
LAYOUTS = {"plain": 1, "ddp": 2, "fsdp": 3, "tp": 2, "fsdp_tp": 4}
THREE = ("plain", "fsdp", "fsdp_tp")


def build(layout: str, kind: str, seed: int = 0) -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(8, 12, bias=False), nn.ReLU(), nn.Linear(12, 6, bias=False))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if layout == "ddp":
        model = DistributedDataParallel(model)
    elif layout == "fsdp":
        model = fully_shard(model)
    elif layout == "tp":
        model = parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    elif layout == "fsdp_tp":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
        model = fully_shard(parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp"])
    make = KINDS[kind] if kind in KINDS else PARTLY[kind][0]
    return model, make(model.parameters())


def step(model: nn.Module, optimizer: optim.Optimizer, number: int) -> float:
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
    loss = model(data).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def whole(model: nn.Module, optimizer: optim.Optimizer) -> Tensors:
    names = {id(p): name.removeprefix("module.") for name, p in model.named_parameters()}
    states = {f"{names[id(p)]}/{name}": t for p, found in optimizer.state.items() for name, t in found.items()}
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).clone()
        for name, t in states.items()
        if isinstance(t, torch.Tensor)
    }


def save(path: str, layout: str, kind: str) -> tuple[Tensors, float]:
    model, optimizer = build(layout, kind)
    for number in range(2):
        step(model, optimizer, number)
    holdfast.save_checkpoint(path, "s", model, optimizer)
    return whole(model, optimizer), step(model, optimizer, 2) + step(model, optimizer, 3)


def load(path: str, layout: str, kind: str) -> tuple[Tensors, float]:
    model, optimizer = build(layout, kind, seed=5)
    holdfast.load_checkpoint(path, model=model, optimizer=optimizer)
    return whole(model, optimizer), step(model, optimizer, 2) + step(model, optimizer, 3)


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].device == tensor.device, name
        assert torch.equal(found[name], tensor), name


def every_pair(layouts: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(layouts, layouts)


def each_to_the_next(layouts: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Each layout writes once and reads once what another has written."""
    return {writer: (reader,) for writer, reader in zip(layouts, (*layouts[1:], layouts[0]), strict=True)}


def check(ranks: Ranks, path: Path, kind: str, pairs: dict[str, tuple[str, ...]]) -> None:
    for writer, readers in pairs.items():
        expected, loss = ranks(LAYOUTS[writer], save, str(path / writer), writer, kind)[0]
        assert_same(load_file(path / writer / "s/optimizer/optimizer.safetensors"), expected)
        for reader in readers:
            for found, its_loss in ranks(LAYOUTS[reader], load, str(path / writer), reader, kind):
                assert_same(found, expected)
                # Muon's iterations are in bfloat16, and round otherwise in another layout.
                assert its_loss == pytest.approx(loss, rel=1e-2 if kind == "muon" else 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_states_go_from_any_layout_to_any(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    check(ranks, tmp_path, kind, every_pair(tuple(LAYOUTS)) if kind == "adamw foreach" else each_to_the_next(THREE))


@pytest.mark.parametrize("kind", PARTLY)
def test_where_torch_steps_it(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    check(ranks, tmp_path, kind, each_to_the_next(PARTLY[kind][1]))


class MasterWeights(optim.Optimizer):
    """As mixed-precision optimizers do: float32 weights and moments beside bfloat16 parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["master"] = p.detach().float()
                    state["momentum"] = torch.zeros_like(p, dtype=torch.float32)
                    state["count"] = 0
                state["momentum"].mul_(0.9).add_(p.grad.float())
                state["master"].add_(state["momentum"], alpha=-group["lr"] / 3)
                state["count"] += 1
                p.copy_(state["master"])


def masters(path: str, fresh: bool) -> Tensors:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(8, 6, dtype=torch.bfloat16), mp_policy=MixedPrecisionPolicy())
    optimizer = MasterWeights(model.parameters())
    if fresh:
        holdfast.load_checkpoint(path, model=model, optimizer=optimizer)
        assert all(state["count"] == 2 for state in optimizer.state.values())
        return whole(model, optimizer)
    for _ in range(2):
        model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    holdfast.save_checkpoint(path, "s", model, optimizer)
    return whole(model, optimizer)


def test_float32_masters_and_moments_of_bfloat16_parameters_keep_every_bit(ranks: Ranks, tmp_path: Path) -> None:
    """``Optimizer.load_state_dict`` would cast them to bfloat16."""
    expected = ranks(2, masters, str(tmp_path), False)[0]
    assert {t.dtype for t in expected.values()} == {torch.float32}
    assert any(not torch.equal(t, t.bfloat16().float()) for t in expected.values())
    for n in (1, 3):
        for found in ranks(n, masters, str(tmp_path), True):
            assert_same(found, expected)


def quantised(path: str) -> str:
    model = fully_shard(nn.Linear(8, 6))
    optimizer = optim.SGD(model.parameters(), lr=1)
    optimizer.state[model.weight] = {"absmax": torch.rand(12)}  # one value for each block of the local part
    with pytest.raises(UnsupportedTensorError, match=r"'weight/absmax'.*cannot be told"):
        holdfast.save_checkpoint(path, "s", model, optimizer)
    return "refused"


def test_states_of_which_the_layout_is_not_known_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, quantised, str(tmp_path)) == ["refused"] * 2
