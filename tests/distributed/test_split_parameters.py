"""Tests parameters that ``state_dict`` hooks split, rename or create, against torch's own checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import rankless
from rankless.errors import CorruptCheckpointError, MismatchError, StateError, UnsupportedTensorError
from tests.helpers.pool import Ranks

WIDTH, HEADS, GROUPS, SIZE = 6, 2, 3, 4


class FusedQKV(nn.Module):
    """One projection, which hooks save as three and put together again, as torchtitan's ``FusedQKVLinear`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Linear(WIDTH, GROUPS * (HEADS + 2) * SIZE)
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._merge)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wqkv(x)

    @staticmethod
    def _split(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for name in ("weight", "bias"):
            tensor = state.pop(f"{prefix}wqkv.{name}")
            if isinstance(tensor, DTensor):
                tensor = tensor.redistribute(tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim)
            tail = tensor.shape[1:]
            parts = tensor.reshape(-1, HEADS + 2, SIZE, *tail)
            state[f"{prefix}wq.{name}"] = parts[:, :HEADS].reshape(-1, *tail).contiguous()
            state[f"{prefix}wk.{name}"] = parts[:, HEADS : HEADS + 1].reshape(-1, *tail).contiguous()
            state[f"{prefix}wv.{name}"] = parts[:, HEADS + 1 :].reshape(-1, *tail).contiguous()

    @staticmethod
    def _merge(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for name in ("weight", "bias"):
            keys = [f"{prefix}{part}.{name}" for part in ("wq", "wk", "wv")]
            if all(key in state for key in keys):
                q, k, v = (state.pop(key) for key in keys)
                if isinstance(q, DTensor):
                    q, k, v = (item.redistribute(item.device_mesh, [Replicate()]) for item in (q, k, v))
                tail = q.shape[1:]
                parts = [item.reshape(GROUPS, -1, SIZE, *tail) for item in (q, k, v)]
                state[f"{prefix}wqkv.{name}"] = torch.cat(parts, dim=1).reshape(-1, *tail)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = FusedQKV()
        self.out = nn.Linear(GROUPS * (HEADS + 2) * SIZE, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.attention(x))


Make = Callable[[nn.Module], Any]


def plain(model: nn.Module) -> nn.Module:
    return model


def fsdp2(model: nn.Module) -> nn.Module:
    """Cut between groups of heads, and with three ranks or more inside of one."""
    fully_shard(model.attention)
    return fully_shard(model)


def rows(model: nn.Module) -> nn.Module:
    """Cut along the other dimension: every rank has a bit of each row."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"attention.wqkv": RowwiseParallel(), "out": ColwiseParallel()})
    return model


def fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def trained(make: Make, steps: int = 2, seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = make(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, steps)
    return model, optimizer


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        with torch.no_grad():  # so that layouts that cannot run are trained, too
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.5 + step).mul_(parameter.detach())
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    actual = {name: whole(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        actual |= {f"{name}/{key}": whole(item) for key, item in optimizer.state.get(parameter, {}).items()}
    return actual


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def expected_files() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What torch's own hooks make of the parameters and, the same way, of each state."""
    model, optimizer = trained(plain)
    states: dict[str, torch.Tensor] = {}
    for key in ("exp_avg", "exp_avg_sq"):
        other = Net()
        with torch.no_grad():
            for mine, parameter in zip(other.parameters(), model.parameters(), strict=True):
                mine.copy_(optimizer.state[parameter][key])
        states |= {f"{name}/{key}": tensor for name, tensor in other.state_dict().items()}
    states |= {f"{name}/step": torch.tensor(2.0) for name in model.state_dict()}
    return dict(model.state_dict()), states


def save(path: str, make: Make, **options: Any) -> dict[str, torch.Tensor]:
    model, optimizer = trained(make)
    rankless.save_checkpoint(path, "s", model, optimizer, **options)
    return state(model, optimizer)


def load(path: str, make: Make, exchange: str = "auto", tag: str | None = None) -> dict[str, torch.Tensor]:
    model, optimizer = trained(make, seed=1)
    restored = rankless.restore(path, tag, model, optimizer, share_reads=exchange)
    assert restored.verified
    assert {"model", "optimizer"} <= {*restored.exact}
    return state(model, optimizer)


LAYOUTS = [(plain, 1), (plain, 2), (fsdp2, 2), (fsdp2, 3), (fsdp2, 5), (rows, 2)]


@pytest.mark.parametrize(("make", "n"), LAYOUTS)
def test_a_split_parameter_is_stored_as_torch_stores_it_in_every_layout(
    ranks: Ranks, tmp_path: Path, make: Make, n: int
) -> None:
    ranks(n, save, str(tmp_path), make)
    model, states = expected_files()
    assert_equal(load_file(tmp_path / "s/model/model.safetensors"), model)
    assert_equal(load_file(tmp_path / "s/optimizer/optimizer.safetensors"), states)
    assert all(check.problem is None for check in rankless.open(tmp_path).verify())


@pytest.mark.parametrize("exchange", ["never", "always"])
@pytest.mark.parametrize(("make", "n"), LAYOUTS)
def test_and_is_one_parameter_again_in_every_layout(
    ranks: Ranks, tmp_path: Path, make: Make, n: int, exchange: str
) -> None:
    expected = save(str(tmp_path), plain)
    for result in ranks(n, load, str(tmp_path), make, exchange):
        assert_equal(result, expected)


def resume(path: str, make: Make) -> dict[str, torch.Tensor]:
    model, optimizer = trained(make, steps=0, seed=1)
    rankless.load_checkpoint(path, model=model, optimizer=optimizer)
    train(model, optimizer, 2)
    return state(model, optimizer)


def test_two_ranks_of_fsdp_save_and_one_process_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save, str(tmp_path), fsdp2)
    model, optimizer = trained(plain)
    train(model, optimizer, 2)
    assert_equal(resume(str(tmp_path), plain), state(model, optimizer))


def overlapped(path: str) -> None:
    model, optimizer = trained(fsdp2)
    handle = rankless.save_checkpoint(path, "s", model, optimizer, async_save=True, staging="overlapped")
    train(model, optimizer, 1)
    handle.wait()


def test_what_is_split_may_be_copied_later(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, overlapped, str(tmp_path))
    assert_equal(load_file(tmp_path / "s/model/model.safetensors"), expected_files()[0])


@pytest.mark.parametrize("make", [plain, fsdp2])
def test_parameters_can_be_saved_as_the_model_has_them(ranks: Ranks, tmp_path: Path, make: Make) -> None:
    (expected, _) = ranks(2, save_raw, str(tmp_path), make)
    stored = load_file(tmp_path / "s/model/model.safetensors")
    assert_equal(stored, {name: value for name, value in expected.items() if "/" not in name})
    for result in ranks(2, load, str(tmp_path), fsdp2):
        assert_equal(result, expected)


def save_raw(path: str, make: Make) -> dict[str, torch.Tensor]:
    return save(path, make, state_dict_hooks=False)


def save_and_load_fsdp1(path: str) -> None:
    model, optimizer = trained(fsdp1)
    rankless.save_checkpoint(path, "s", model, optimizer)
    other, its = trained(fsdp1, seed=1)
    with pytest.raises(MismatchError, match=r"attention \(FusedQKV\) has code .* cannot be run under FSDP1"):
        rankless.load_checkpoint(path, model=other, optimizer=its)
    rankless.load_checkpoint(path, model=other, optimizer=its, strict=False)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_fsdp1_has_parameters_as_the_model_has_them(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_and_load_fsdp1, str(tmp_path))
    stored = load_file(tmp_path / "s/model/model.safetensors")
    assert sorted(stored) == ["attention.wqkv.bias", "attention.wqkv.weight", "out.bias", "out.weight"]
    other, its = trained(plain, seed=1)
    rankless.load_checkpoint(tmp_path, model=other, optimizer=its)
    assert_equal({name: whole(tensor) for name, tensor in other.named_parameters()}, stored)


def stage(path: str, *, first: bool) -> None:
    """Each rank has a model of its own with parts of which the other knows nothing."""
    torch.manual_seed(0)
    every = [nn.ModuleDict({str(number): FusedQKV()}) for number in range(2)]
    rank = dist.get_rank()
    model = every[rank]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    if first:
        rankless.save_checkpoint(path, "s", model, optimizer)
    expected = state(model, optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for exchange in ("never", "always"):
        rankless.load_checkpoint(path, model=model, optimizer=optimizer, share_reads=exchange)
        assert_equal(state(model, optimizer), expected)


def test_each_stage_of_a_pipeline_puts_its_own_parameters_together(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, stage_first, str(tmp_path))


def stage_first(path: str) -> None:
    stage(path, first=True)


def save_dcp(path: str) -> None:
    """As torchtitan does: the model as hooks say."""
    model, _ = trained(fsdp2)
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)


def load_alone(path: str) -> dict[str, torch.Tensor]:
    model, _ = trained(fsdp2, seed=1)
    rankless.load_checkpoint(path, model=model)
    return {name: whole(tensor) for name, tensor in model.named_parameters()}


def test_a_split_model_of_dcp_is_put_together(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_dcp, str(tmp_path / "dcp"))
    expected = dict(trained(plain)[0].named_parameters())
    for result in ranks(2, load_alone, str(tmp_path / "dcp")):
        assert_equal(result, expected)


def parts(path: str, make: Make) -> dict[str, torch.Tensor]:
    model, optimizer = trained(make)
    rankless.save_model(model, f"{path}/model.safetensors").wait()
    rankless.save_model(model, f"{path}/folder", shard=True).wait()
    rankless.save_optimizer(optimizer, f"{path}/optimizer", shard=True, model=model).wait()
    other, its = trained(make, seed=1)
    rankless.load_model(other, f"{path}/folder")
    rankless.load_optimizer(its, f"{path}/optimizer", model=other)
    return state(other, its)


@pytest.mark.parametrize("make", [plain, fsdp2, rows])
def test_files_of_one_part_have_what_hooks_say(ranks: Ranks, tmp_path: Path, make: Make) -> None:
    model, states = expected_files()
    for result in ranks(2, parts, str(tmp_path), make):
        assert_equal(result, state(*trained(plain)))
    assert_equal(load_file(tmp_path / "model.safetensors"), model)
    assert_equal(load_file(tmp_path / "optimizer/optimizer.safetensors"), states)


def test_a_torch_file_with_split_parameters_is_what_torch_loads(tmp_path: Path) -> None:
    model, _ = trained(plain)
    rankless.save_model(model, tmp_path / "model.pt").wait()
    other = Net()
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert_equal(dict(other.named_parameters()), dict(model.named_parameters()))


@pytest.mark.parametrize("part", ["model/attention.wk.weight", "optimizer/attention.wv.bias/exp_avg"])
def test_a_damaged_part_of_a_split_parameter_is_found(tmp_path: Path, part: str) -> None:
    save(str(tmp_path), plain)
    group, _, name = part.partition("/")
    file = tmp_path / f"s/{group}/{group}.safetensors"
    raw = bytearray(file.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    start = json.loads(raw[8 : 8 + length])[name]["data_offsets"][0]
    raw[8 + length + start] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CorruptCheckpointError, match=f"{group} tensor '{name}'"):
        load(str(tmp_path), plain)


def test_a_state_that_cannot_be_split_says_how_to_save_it(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.Adafactor(model.parameters())
    train(model, optimizer, 1)
    with pytest.raises(UnsupportedTensorError, match=r"wqkv.weight/(row|col)_var.*state_dict_hooks=False"):
        rankless.save_checkpoint(tmp_path, "s", model, optimizer)
    rankless.save_checkpoint(tmp_path, "s", model, optimizer, state_dict_hooks=False)
    other = Net()
    its = torch.optim.Adafactor(other.parameters())
    rankless.load_checkpoint(tmp_path, model=other, optimizer=its)
    assert_equal(state(other, its), state(model, optimizer))


class Hooked(nn.Module):
    """Two tensors, and a hook that does something to the state dict."""

    def __init__(self, hook: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.arange(24.0).reshape(4, 6))
        self.b = nn.Parameter(torch.arange(12.0).reshape(2, 6))
        self.register_state_dict_post_hook(lambda _, state, *__: hook(state))


def renames(state: dict[str, Any]) -> None:
    state["c"] = state.pop("a")


def copies(state: dict[str, Any]) -> None:
    for name, tensor in state.items():
        state[name] = tensor.clone().cpu().detach()


def halves(state: dict[str, Any]) -> None:
    a = state.pop("a").clone()
    state["left"], state["right"] = a[:, :3].contiguous(), a[:, 3:].contiguous()


def joins_itself(state: dict[str, Any]) -> None:
    state["turned"] = torch.cat(list(state.pop("a").split(1)[::-1]))


@pytest.mark.parametrize("hook", [renames, copies, halves, joins_itself])
def test_what_hooks_rename_copy_or_split_is_stored_as_torch_stores_it(
    tmp_path: Path, hook: Callable[[dict[str, Any]], None]
) -> None:
    model = Hooked(hook)
    rankless.save_checkpoint(tmp_path, "s", model)
    assert_equal(load_file(tmp_path / "s/model/model.safetensors"), dict(model.state_dict()))
    other = Hooked(hook)
    with torch.no_grad():
        other.a.zero_()
    rankless.load_checkpoint(tmp_path, model=other)
    assert torch.equal(other.a, model.a)


def computes(state: dict[str, Any]) -> None:
    state["norm"] = state["a"].norm()


def casts(state: dict[str, Any]) -> None:
    state["a"] = state["a"].half()


def turns(state: dict[str, Any]) -> None:
    state["a"] = state["a"].T


def keeps_some(state: dict[str, Any]) -> None:
    state["some"] = state.pop("a")[:3]


def joins(state: dict[str, Any]) -> None:
    state["ab"] = torch.cat([state.pop("a"), state.pop("b")])


def doubles(state: dict[str, Any]) -> None:
    state["a"].mul_(2)


def bits(state: dict[str, Any]) -> None:
    raw = state.pop("a").view(torch.int32)
    state["upper"], state["lower"] = raw[:2], raw[2:]


def looks(state: dict[str, Any]) -> None:
    state["largest"] = torch.tensor(max(state["a"].flatten().tolist()))


@pytest.mark.parametrize(
    ("hook", "name"),
    [
        (computes, "norm"),
        (casts, "a"),
        (turns, "a"),
        (doubles, "a"),
        (keeps_some, "some"),
        (joins, "ab"),
        (bits, "upper"),
        (looks, "largest"),
    ],
)
def test_what_hooks_make_otherwise_is_refused_and_the_way_out_works(
    tmp_path: Path, hook: Callable[[dict[str, Any]], None], name: str
) -> None:
    model = Hooked(hook)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    with pytest.raises(StateError, match=f"'{name}' .*computed by a hook.*state_dict_hooks=False"):
        rankless.save_checkpoint(tmp_path, "s", model, optimizer)
    rankless.save_checkpoint(tmp_path, "s", model, optimizer, state_dict_hooks=False)
    other = Hooked(hook)
    its = torch.optim.AdamW(other.parameters())
    rankless.load_checkpoint(tmp_path, model=other, optimizer=its)
    assert_equal(state(other, its), state(model, optimizer))


def drops(state: dict[str, Any]) -> None:
    del state["b"]


@pytest.mark.parametrize("hook", [renames, drops])
def test_what_was_saved_as_the_model_has_it_is_loaded_so(
    tmp_path: Path, hook: Callable[[dict[str, Any]], None]
) -> None:
    model, other = Hooked(hook), Hooked(hook)
    rankless.save_checkpoint(tmp_path, "s", model, state_dict_hooks=False)
    with torch.no_grad():
        other.a.zero_()
        other.b.zero_()
    rankless.load_checkpoint(tmp_path, model=other)
    assert_equal(dict(other.named_parameters()), dict(model.named_parameters()))


def test_names_that_are_not_there_in_either_form_are_a_mismatch(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", {"attention.wq.weight": torch.zeros(24, WIDTH)})
    with pytest.raises(MismatchError, match=r"(?s)missing.*attention\.wqkv\.weight.*only.*attention\.wq\.weight"):
        rankless.load_checkpoint(tmp_path, model=Net())


def test_no_data_is_copied_to_learn_what_hooks_say(tmp_path: Path) -> None:
    seen = []

    def look(state: dict[str, Any]) -> None:
        seen.append({name: item.device.type for name, item in state.items()})

    rankless.save_checkpoint(tmp_path, "s", Hooked(look))
    assert seen
    assert all(devices == {"a": "meta", "b": "meta"} for devices in seen)


def save_after_an_evaluation(path: str) -> list[str]:
    """Save a model under FSDP2 whose root still has its whole parameters, as after a forward without a backward."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), FusedQKV())
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    with torch.no_grad():
        model(torch.zeros(2, WIDTH))
    rankless.save_checkpoint(path, "s", model, rng=False)
    return sorted(rankless.open(f"{path}/s"))


def test_a_model_whose_parameters_are_whole_after_an_evaluation(ranks: Ranks, tmp_path: Path) -> None:
    names = [f"model/{part}.{kind}" for part in ("0", "1.wk", "1.wq", "1.wv") for kind in ("bias", "weight")]
    assert ranks(2, save_after_an_evaluation, str(tmp_path)) == [names] * 2
