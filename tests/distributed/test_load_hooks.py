"""Tests that a load has the effects of ``load_state_dict`` hooks, as torch's own load does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.nn.intrinsic import qat
from torch.ao.quantization import (
    FakeQuantize,
    HistogramObserver,
    MinMaxObserver,
    PerChannelMinMaxObserver,
    get_default_qat_qconfig,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import rankless
from rankless.errors import MismatchError, StateError
from tests.helpers.pairwise import each_value
from tests.helpers.pool import Ranks


class Derived(nn.Module):
    """Keeps something that is made of its weight, and no part of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 3))
        self.derive()

    def derive(self) -> None:
        weight = self.weight.full_tensor() if isinstance(self.weight, DTensor) else self.weight
        self.sum = weight.detach().sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class PostHook(Derived):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(lambda module, _: module.derive())


class KeysSeen(Derived):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(self.look)

    def look(self, _: nn.Module, keys: Any) -> None:
        assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
        self.derive()


class PreHook(Derived):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(self.before)

    @staticmethod
    def before(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        weight = state[f"{prefix}weight"]
        module.sum = (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().sum()


class Overridden(Derived):
    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.derive()


KINDS = [PostHook, KeysSeen, PreHook, Overridden]


def plain(model: nn.Module) -> nn.Module:
    return model


def compiled(model: nn.Module) -> Any:
    return torch.compile(model)


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module) -> nn.Module:
    return fully_shard(model)


def checkpointed(model: nn.Module) -> nn.Module:
    return nn.Sequential(checkpoint_wrapper(model))


def derived(model: Any) -> Derived:
    return next(module for module in model.modules() if isinstance(module, Derived))


def load(path: str, kind: type[Derived], make: Callable[[nn.Module], Any]) -> torch.Tensor:
    torch.manual_seed(1)
    model = make(kind())
    restored = rankless.restore(path, model=model)
    assert restored.exact == ("model",)
    return derived(model).sum


@each_value({"kind": KINDS, "make": [plain, compiled, ddp, fsdp2]})
def test_what_is_derived_of_tensors_is_made_anew(
    ranks: Ranks, tmp_path: Path, kind: type[Derived], make: Callable[[nn.Module], Any]
) -> None:
    model, by_torch = kind(), kind()
    by_torch.load_state_dict(model.state_dict())
    rankless.save_checkpoint(tmp_path, "s", model)
    for result in ranks(2, load, str(tmp_path), kind, make):
        assert torch.allclose(result, by_torch.sum)


def test_a_wrapper_that_renames_is_passed_through(tmp_path: Path) -> None:
    model, other = checkpointed(PostHook()), checkpointed(PostHook())
    rankless.save_checkpoint(tmp_path, "s", model)
    rankless.load_checkpoint(tmp_path, model=other)
    assert torch.equal(derived(other).sum, derived(model).weight.sum())


def test_a_model_on_meta_gets_its_memory_first(tmp_path: Path) -> None:
    model = PostHook()
    rankless.save_checkpoint(tmp_path, "s", model)
    with torch.device("meta"):
        other = PostHook()
    rankless.load_checkpoint(tmp_path, model=other)
    assert torch.equal(other.sum, model.weight.sum())


def test_hooks_run_before_the_optimizer_is_loaded_and_once(tmp_path: Path) -> None:
    model = PostHook()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    rankless.save_checkpoint(tmp_path, "s", model, optimizer)
    other = PostHook()
    its = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    seen: list[float] = []
    other.register_load_state_dict_post_hook(lambda *_: seen.append(its.param_groups[0]["lr"]))
    rankless.load_checkpoint(tmp_path, model=other, optimizer=its)
    assert seen == [0.1]
    assert its.param_groups[0]["lr"] == 0.5


class Order(nn.Module):
    """Logs what it has seen in a buffer that grows: a model of transformers' tests of its Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2, bias=False)
        self.register_buffer("seen", torch.empty(0, dtype=torch.long))

    def load_state_dict(self, state: Any, strict: bool = True) -> Any:
        if self.seen.shape != state["seen"].shape:
            self.seen = state["seen"].clone()
        return super().load_state_dict(state, strict=strict)


class Resized(nn.Module):
    def __init__(self, parts: int = 0) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(parts))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.seen.resize_(state[f"{prefix}seen"].shape)
        super()._load_from_state_dict(state, prefix, *rest)


class ResizedByHook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0))
        self.register_load_state_dict_pre_hook(self.before)

    @staticmethod
    def before(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        module.seen = torch.empty_like(state[f"{prefix}seen"])


def resizing(kind: type[nn.Module]) -> nn.Module:
    return nn.Sequential(kind()) if kind is not Order else kind()


@pytest.mark.parametrize("kind", [Order, Resized, ResizedByHook])
def test_a_buffer_gets_the_shape_that_it_has_in_the_checkpoint(tmp_path: Path, kind: type[nn.Module]) -> None:
    model, other = resizing(kind), resizing(kind)
    for module in model.modules():
        if hasattr(module, "seen"):
            module.seen = torch.arange(12).to(module.seen.dtype)
    rankless.save_checkpoint(tmp_path, "s", model)
    restored = rankless.restore(tmp_path, model=other)
    assert restored.exact == ("model",)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


def test_a_buffer_that_nobody_resizes_is_a_mismatch_before_anything_is_changed(tmp_path: Path) -> None:
    def make(size: int) -> nn.Module:
        model = nn.Sequential(Derived(), PostHook())
        model[0].register_buffer("seen", torch.zeros(size))
        return model

    rankless.save_checkpoint(tmp_path, "s", make(3))
    other = make(2)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(MismatchError, match=r"0\.seen: shape \[3\] in the checkpoint, \[2\] here"):
        rankless.load_checkpoint(tmp_path, model=other)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


def test_code_that_fails_is_named(tmp_path: Path) -> None:
    class Strict(Derived):
        def _load_from_state_dict(self, *args: Any) -> None:
            super()._load_from_state_dict(*args)
            raise ValueError("not on Fridays")

    rankless.save_checkpoint(tmp_path, "s", Derived())
    with pytest.raises(StateError, match=r"Strict that runs in load_state_dict failed.*not on Fridays"):
        rankless.load_checkpoint(tmp_path, model=Strict())


class Told(nn.Module):
    """Puts something into its state dict that is no tensor."""

    def __init__(self, reported: str = "") -> None:
        super().__init__()
        self.weight, self.told = nn.Parameter(torch.rand(2)), reported

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}told"] = self.told

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.told = state.pop(f"{prefix}told")
        super()._load_from_state_dict(state, prefix, *rest)


def test_values_that_are_no_tensors_go_back_the_way_that_they_came(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", nn.Sequential(Told("a"), Told("b")))
    other = nn.Sequential(Told(), Told())
    rankless.load_checkpoint(tmp_path, model=other)
    assert [item.told for item in other] == ["a", "b"]


def wrapped(kind: type[Derived]) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(nn.Sequential(kind()), device_id=torch.device("cpu"), use_orig_params=True)


def load_fsdp1(path: str, kind: type[Derived], *, strict: bool) -> Any:
    return rankless.restore(path, model=wrapped(kind), strict=strict)


def load_fsdp1_lax(path: str, kind: type[Derived]) -> Any:
    restored = load_fsdp1(path, kind, strict=False)
    return restored.exact, restored.missing


def load_fsdp1_strict(path: str, kind: type[Derived]) -> Any:
    return load_fsdp1(path, kind, strict=True).exact


@pytest.mark.parametrize("kind", KINDS)
def test_under_fsdp1_what_cannot_run_is_named(ranks: Ranks, tmp_path: Path, kind: type[Derived]) -> None:
    rankless.save_checkpoint(tmp_path, "s", nn.Sequential(kind()))
    for error in ranks.outcomes(2, load_fsdp1_strict, str(tmp_path), kind):
        assert isinstance(error, MismatchError)
        assert f"0 ({kind.__qualname__}) has code of its own that runs in load_state_dict" in str(error)
        assert "fully_shard()" in str(error)
    for exact, missing in ranks(2, load_fsdp1_lax, str(tmp_path), kind):
        assert exact == ()
        assert "load_state_dict" in missing[0]


def test_under_fsdp1_a_model_without_such_code_is_loaded(ranks: Ranks, tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", nn.Sequential(Derived()))
    assert ranks(2, load_fsdp1_strict, str(tmp_path), Derived) == [("model",)] * 2


# Modules of torch that have such code themselves.


def ran(module: nn.Module, shape: tuple[int, ...] = (4, 3, 5, 5)) -> nn.Module:
    torch.manual_seed(0)
    module(torch.rand(shape))
    return module


def conv_bn() -> nn.Module:
    return qat.ConvBn2d(3, 3, 2, qconfig=get_default_qat_qconfig("fbgemm"))


def per_channel() -> nn.Module:
    quantized = FakeQuantize.with_args(
        observer=PerChannelMinMaxObserver, quant_min=-128, quant_max=127, dtype=torch.qint8, ch_axis=1
    )
    return quantized.with_args(qscheme=torch.per_channel_symmetric)()


TORCH: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm2d(3),
    "instance norm": lambda: nn.InstanceNorm2d(3, track_running_stats=True, affine=True),
    "min-max observer": MinMaxObserver,
    "per-channel observer": lambda: PerChannelMinMaxObserver(ch_axis=1),
    "histogram observer": HistogramObserver,
    "fake quantize": FakeQuantize,
    "fake quantize per channel": per_channel,
    "quantization-aware convolution": conv_bn,
    "weight norm": lambda: parametrizations.weight_norm(nn.Conv2d(3, 3, 2)),
    "weight norm of old": lambda: weight_norm(nn.Conv2d(3, 3, 2)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Conv2d(3, 3, 2)),
    "spectral norm of old": lambda: spectral_norm(nn.Conv2d(3, 3, 2)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Conv2d(3, 3, 2)),
    "lazy, run": lambda: ran(nn.LazyConv2d(3, 2)),
    "lazy batch norm, run": lambda: ran(nn.LazyBatchNorm2d()),
    "checkpointed": lambda: checkpoint_wrapper(nn.Conv2d(3, 3, 2)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TORCH)
def test_modules_of_torch_are_as_torch_loads_them(tmp_path: Path, kind: str) -> None:
    make = TORCH[kind]
    model, other, by_torch = ran(nn.Sequential(make())), nn.Sequential(make()), nn.Sequential(make())
    by_torch.load_state_dict(model.state_dict())
    rankless.save_checkpoint(tmp_path, "s", model)
    restored = rankless.restore(tmp_path, model=other)
    assert restored.exact == ("model",)
    expected = by_torch.state_dict()
    assert other.state_dict().keys() == expected.keys()
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    x = torch.rand(4, 3, 5, 5)
    assert torch.equal(other.eval()(x), by_torch.eval()(x))


@pytest.mark.filterwarnings("ignore")
def test_a_module_with_packed_weights_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="'scale' in the model's state_dict is computed by a hook"):
        rankless.save_checkpoint(tmp_path, "s", torch.ao.nn.quantized.Linear(2, 2))


def double_before(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2


def double_after(module: nn.Module, _: Any) -> None:
    module.weight.data.mul_(2)


def leave_alone(module: nn.Module, _: Any) -> None:
    """Does nothing."""


class Doubling(nn.Linear):
    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict({name: value * 2 for name, value in state_dict.items()}, *args, **kwargs)


@pytest.mark.parametrize("kind", ["before", "after", "own", "none"])
def test_a_model_whose_code_changes_values_is_not_called_exact(tmp_path: Path, kind: str) -> None:
    rankless.save_checkpoint(tmp_path, "x", nn.Linear(2, 2))
    model = Doubling(2, 2) if kind == "own" else nn.Linear(2, 2)
    if kind == "before":
        model.register_load_state_dict_pre_hook(double_before)
    if kind in {"after", "none"}:
        model.register_load_state_dict_post_hook(double_after if kind == "after" else leave_alone)
    restored = rankless.restore(tmp_path, None, model)
    assert ("model" in restored.exact, "model" in restored.reconstructed) == (kind == "none", kind != "none")
