"""Tests that rankless reads from ``torch.save`` files what ``torch.load`` does, bit for bit, without torch's help."""

from __future__ import annotations

import collections
import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from typer.testing import CliRunner

import rankless
from rankless.cli.main import app
from rankless.errors import (
    FormatError,
    InvalidArgumentError,
    MismatchError,
    OptimizerMismatchError,
    UnsupportedValueError,
)
from rankless.state.tensor_views import DTYPES
from tests.helpers.commands import assert_needs_no_torch
from tests.helpers.equality import equal_bits
from tests.helpers.fingerprint import fingerprint
from tests.helpers.processes import run_command
from tests.helpers.torch_files import LEGACY_OPTIONS, SAVE_OPTIONS, make_net, save_tree, write_archive
from tests.helpers.value_strategies import devices, numpy_arrays, scalars, sizes, torch_dtypes, torch_tensors

# ---------------------------------------------------------------------------------------------------------------
# What is read


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A view of some storage, with any offset and any strides."""
    base = draw(torch_tensors)
    flat = base.reshape(-1)
    if not flat.numel():
        return base
    flat = flat[draw(st.integers(0, flat.numel() - 1)) :]
    shape, strides, left = [], [], flat.numel() - 1
    for _ in range(draw(st.integers(0, 3))):
        stride = draw(st.integers(1, max(1, left)))
        size = draw(st.integers(1, left // stride + 1))
        shape.append(size)
        strides.append(stride)
        left -= (size - 1) * stride
    return torch.as_strided(flat, shape, strides, flat.storage_offset())


@given(
    st.dictionaries(st.text("abc.", min_size=1), views(), min_size=1, max_size=4), st.sampled_from([{}, LEGACY_OPTIONS])
)
@settings(max_examples=200)
def test_every_tensor_is_what_torch_reads(tmp_path: Path, state: dict[str, torch.Tensor], options: Any) -> None:
    if options and any(t.dtype in FEW for t in state.values()):
        options = {}  # torch writes these dtypes in its newer files only
    file = save_tree(tmp_path, state, **options)
    opened = rankless.open(file)
    expected = torch.load(file, weights_only=True)
    assert {*opened.keys(), *further(opened)} == {f"model/{name}" for name in expected}
    for name, tensor in expected.items():
        assert equal_bits(opened[f"model/{name}"], tensor), name
        middle = tensor.numel() // 2
        assert equal_bits(opened.read(f"model/{name}", 0, middle), tensor.flatten()[:middle])
        assert equal_bits(opened.read(f"model/{name}", middle, tensor.numel()), tensor.flatten()[middle:])
    assert [check.problem for check in opened.verify()] == [None] * len([*opened.verify()])


FEW = {dtype for name, dtype in DTYPES.items() if name.startswith(("F4", "F8", "U16", "U32", "U64"))}


def further(opened: rankless.Checkpoint) -> list[str]:
    return [f"{group}/{alias}" for group, names in opened._reader.tied.items() for alias in names]


values = st.recursive(
    torch_tensors
    | numpy_arrays
    | scalars
    | torch_dtypes
    | devices
    | sizes
    | st.integers()
    | st.floats()
    | st.text("aé", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(values, st.sampled_from([2, 4, 5]))
@settings(max_examples=200)
def test_values_come_back_as_they_were(tmp_path: Path, tree: Any, protocol: int) -> None:
    file = save_tree(tmp_path, {"values": [tree]}, pickle_protocol=protocol)
    content = rankless.open(file).values["user_content"]["values"]
    assert fingerprint(content) == fingerprint(torch.load(file, weights_only=False)["values"])


@pytest.mark.parametrize("options", SAVE_OPTIONS)
def test_tied_weights_are_one_tensor_with_two_names(tmp_path: Path, options: Any) -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 3), "head": torch.nn.Linear(3, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    opened = rankless.open(save_tree(tmp_path, model.state_dict(), **options))
    assert opened.keys() == ["model/embed.weight"]
    assert equal_bits(opened["model/head.weight"], model["embed"].weight)


class Marked(torch.nn.Module):
    """With extra state, a buffer that is a view of a parameter, and attributes on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
        self.weight.note = "mine"
        self.register_buffer("column", self.weight.detach()[:, 1])

    def get_extra_state(self) -> Any:
        return {"version": 3, "scale": torch.tensor(2.5)}

    def set_extra_state(self, state: Any) -> None:
        self.restored = state


def test_extra_state_and_attributes_of_tensors(tmp_path: Path) -> None:
    model, other = Marked(), Marked()
    file = save_tree(tmp_path, {"model": dict(model.state_dict(keep_vars=True)), "epoch": 3})
    torch.nn.init.zeros_(other.weight)
    assert rankless.load_checkpoint(file, model=other) == {"epoch": 3}
    assert equal_bits(other.weight, model.weight)
    assert equal_bits(other.column, model.column)
    assert other.restored == {"version": 3, "scale": torch.tensor(2.5)}


def dtensor() -> torch.Tensor:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)])
    finally:
        dist.destroy_process_group()


UNREADABLE = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "meta": lambda: torch.ones(2, device="meta"),
    "conjugated": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "negated": lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
    "complex128": lambda: torch.ones(2, dtype=torch.complex128),
    "DTensor": dtensor,
    "complex32": lambda: torch.ones(2, dtype=torch.complex32),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", SAVE_OPTIONS)
@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_tensor_that_cannot_be_read_is_named_and_the_others_are_read(tmp_path: Path, kind: str, options: Any) -> None:
    tree = {"model": {"a": torch.arange(3.0), "layers.b": UNREADABLE[kind](), "c": torch.ones(2, dtype=torch.int8)}}
    file = save_tree(tmp_path, tree, **options)
    opened = rankless.open(file)
    assert equal_bits(opened["model/a"], tree["model"]["a"])
    assert equal_bits(opened["model/c"], tree["model"]["c"])
    named = rf"{file}.*layers\.b.*{kind[:5]}"
    for ask in (
        lambda: opened["model/layers.b"],
        lambda: rankless.load_checkpoint(file, model={"a": torch.empty(3), "c": torch.empty(2, dtype=torch.int8)}),
        lambda: rankless.convert(file, tmp_path / "out", to="safetensors"),
    ):
        with pytest.raises(FormatError, match=named):
            ask()
    assert [check.problem for check in opened.verify() if check.problem] == [mock.ANY]
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore")
def test_a_tensor_in_values_that_cannot_be_read_keeps_nobody_from_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, other = make_net(), make_net()
    file = save_tree(tmp_path, {"model": model.state_dict(), "epoch": 3, "quantized": UNREADABLE["quantized"]()})
    content = rankless.load_checkpoint(file, model=other)
    assert content["epoch"] == 3
    assert "is quantized" in repr(content["quantized"])
    assert "user_content value quantized is quantized" in caplog.text
    assert all(equal_bits(other.state_dict()[name], value) for name, value in model.state_dict().items())
    with pytest.raises(FormatError, match="user_content value 'quantized' is quantized"):
        _ = rankless.open(file).values
    with pytest.raises(FormatError, match="user_content value 'quantized' is quantized"):
        rankless.convert(file, tmp_path / "out", to="native")
    with pytest.raises(UnsupportedValueError, match=r"user_content\.quantized"):
        rankless.save_checkpoint(tmp_path / "run", "s", user_content=content)


@pytest.mark.filterwarnings("ignore")
def test_the_commands_tell_what_is_not_read(tmp_path: Path) -> None:
    file = save_tree(tmp_path, {"model": {"a": torch.ones(1), "b": UNREADABLE["sparse"]()}})
    shown = {
        command[0]: CliRunner().invoke(app, [str(word) for word in command], env={"COLUMNS": "400"})
        for command in (["show", file], ["verify", file], ["diff", file, file])
    }
    assert all("model b: is sparse" in shown[command].output for command in ("show", "diff"))
    assert "model 'b' is sparse" in shown["verify"].output
    assert shown["verify"].exit_code == 1


def test_a_tensor_of_another_device_is_read_all_the_same(tmp_path: Path) -> None:
    """The pickle says where it was; nobody needs to have such a device."""
    raw = save_tree(tmp_path, {"w": torch.arange(3.0)}).read_bytes()
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    entries["some/data.pkl"] = entries["some/data.pkl"].replace(b"X\x03\0\0\0cpu", b"X\x06\0\0\0cuda:7")
    assert equal_bits(rankless.open(write_archive(tmp_path / "x.pt", entries))["model/w"], torch.arange(3.0))


class Elsewhere:
    """Pickled as torch pickles tensors of devices that it has no storages for."""

    def __init__(self, tensor: torch.Tensor, *, by: str) -> None:
        self.tensor, self.by = tensor, by

    def __reduce__(self) -> Any:
        data = self.tensor.numpy() if self.by.endswith("numpy") else self.tensor
        return getattr(torch._utils, self.by), (data, self.tensor.dtype, "cpu", False)


@pytest.mark.parametrize("by", ["_rebuild_device_tensor_from_numpy", "_rebuild_device_tensor_from_cpu_tensor"])
def test_tensors_of_devices_without_storages(tmp_path: Path, by: str) -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    opened = rankless.open(save_tree(tmp_path, {"model": {"w": Elsewhere(tensor, by=by)}}))
    assert equal_bits(opened["model/w"], tensor)
    assert equal_bits(opened.read("model/w", 5, 7), tensor.flatten()[5:7])


def test_a_range_of_a_large_tensor_reads_no_more_than_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rankless.storage.direct_io import BufferedReader

    big = torch.arange(8 * 2**20, dtype=torch.int32)
    opened = rankless.open(save_tree(tmp_path, {"model": {"w": big, "v": torch.ones(1)}}))
    sizes, plain = [], BufferedReader.read
    monkeypatch.setattr(
        BufferedReader, "read", lambda self, at, into: (sizes.append(len(into)), plain(self, at, into))[1]
    )
    assert equal_bits(opened.read("model/w", 5_000_000, 5_000_010), big[5_000_000:5_000_010])
    assert sum(sizes) <= 16 * 2**20 + 100  # whole blocks, and the header of the entry


# ---------------------------------------------------------------------------------------------------------------
# What is what


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    model = make_net()
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for number in range(3):
        step(model, optimizer, scheduler, number)
    return model, optimizer, scheduler


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW([{"params": decay, "lr": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=0.05)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, number: int) -> None:
    model(torch.full((2, 3), float(number))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


NAMES = [
    ("model", "optimizer", "scheduler"),
    ("model_state_dict", "optimizer_state_dict", "lr_scheduler"),
    ("state_dict", "optim", "scheduler_state_dict"),
    ("network", "opt", "sched"),
]


@pytest.mark.parametrize("names", NAMES, ids="-".join)
@pytest.mark.parametrize("options", SAVE_OPTIONS)
@pytest.mark.parametrize("wrap", [dict, lambda tree: {"app": tree}, lambda tree: {"app": tree, "args": {"lr": 1}}])
def test_a_run_resumes_from_what_people_save(
    tmp_path: Path, names: tuple[str, str, str], options: Any, wrap: Callable[[Any], Any]
) -> None:
    model, optimizer, scheduler = trained()
    parts = [item.state_dict() for item in (model, optimizer, scheduler)]
    file = save_tree(tmp_path, wrap({**dict(zip(names, parts, strict=True)), "epoch": 3}), **options)
    torch.manual_seed(7)
    other = make_net()
    again = make_optimizer(other)
    schedule = torch.optim.lr_scheduler.StepLR(again, 5)
    restored = rankless.restore(file, model=other, optimizer=again, scheduler=schedule)
    assert "epoch" in str(restored.user_content)
    assert not restored.verified
    for number in range(3, 6):
        step(model, optimizer, scheduler, number)
        step(other, again, schedule, number)
    assert fingerprint(list(other.state_dict().items())) == fingerprint(list(model.state_dict().items()))
    assert fingerprint(again.state_dict()) == fingerprint(optimizer.state_dict())
    assert schedule.state_dict() == scheduler.state_dict()


def test_parts_that_are_not_found_by_themselves_are_named_by_keys(tmp_path: Path) -> None:
    generator, critic = make_net(), make_net()
    with torch.no_grad():
        critic[0].weight.zero_()
    file = save_tree(tmp_path, {"nets": {"g": generator.state_dict(), "d": critic.state_dict()}, "model": {"x": 1}})
    assert set(rankless.open(file)._reader.groups) == {"model"}
    checkpoint = rankless.open(file, keys={"model/gen": "nets.g", "model/critic": "nets.d"})
    assert equal_bits(checkpoint["model/critic/0.weight"], critic[0].weight)
    other = make_net()
    rankless.load_checkpoint(file, model=other, keys={"model": "nets.d"})
    assert not other[0].weight.any()
    with pytest.raises(InvalidArgumentError, match=r"nets\.x.*nets, model"):
        rankless.load_checkpoint(file, model=other, keys={"model": "nets.x"})


def test_several_models_are_told_apart_by_their_names_and_asked_for(tmp_path: Path) -> None:
    generator, critic = make_net(), make_net()
    file = save_tree(tmp_path, {"G": generator.state_dict(), "D": critic.state_dict(), "epoch": 1})
    rankless.load_checkpoint(file, model={"G": make_net(), "D": make_net()})
    with pytest.raises(MismatchError, match=r"model/D, model/G.*keys=\{'model': 'D'\}"):
        rankless.load_checkpoint(file, model=make_net())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_wrappers_names_are_taken_off(tmp_path: Path, prefix: str) -> None:
    state = {prefix + name: tensor for name, tensor in make_net().state_dict().items()}
    assert set(rankless.open(save_tree(tmp_path, state)).keys()) == {
        f"model/{name}" for name in make_net().state_dict()
    }


def test_an_optimizer_with_names_needs_no_numbers(tmp_path: Path) -> None:
    """torch keeps the names of parameters in the groups where it is given them."""
    model = make_net()
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    file = save_tree(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other = make_net()
    backwards = torch.optim.AdamW(list(other.parameters())[::-1])
    rankless.load_checkpoint(file, model=other, optimizer=backwards)
    assert equal_bits(backwards.state[other[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


def test_an_optimizer_whose_parameters_come_in_another_order_is_refused(tmp_path: Path) -> None:
    model, optimizer, _ = trained()
    file = save_tree(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other = make_net()
    with pytest.raises(OptimizerMismatchError, match=r"groups|in the order"):
        rankless.load_checkpoint(file, model=other, optimizer=torch.optim.AdamW(other.parameters()))
    turned = torch.optim.AdamW(
        [{"params": list(group["params"])[::-1]} for group in make_optimizer(other).param_groups]
    )
    with pytest.raises(OptimizerMismatchError, match="in the order in which it was saved"):
        rankless.load_checkpoint(file, model=other, optimizer=turned)
    assert not turned.state


def test_what_has_no_model_is_all_values(tmp_path: Path) -> None:
    for number, tree in enumerate([torch.ones(2), [torch.ones(2), 1], 5, {"a": 1}, {}, [], collections.Counter("a")]):
        file = tmp_path / f"{number}.pt"
        torch.save(tree, file)
        content = rankless.open(file).values.get("user_content", {})
        assert fingerprint(content) == fingerprint(tree), tree


# ---------------------------------------------------------------------------------------------------------------
# The commands


def test_the_commands_take_such_a_file(tmp_path: Path) -> None:
    model, optimizer, _ = trained()
    file = save_tree(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3})
    shown = run_command("show", "--json", str(file))
    table = json.loads(shown.stdout)
    assert table["format"] == "torch"
    assert {entry["name"] for entry in table["tensors"]} >= {"model/0.weight", "optimizer/0/exp_avg"}
    assert table["values"]["user_content"] == {"epoch": 3}
    verified = run_command("verify", str(file))
    assert verified.returncode == 0
    assert " verified" in verified.stdout
    os.truncate(file, file.stat().st_size - 1)
    assert run_command("verify", str(file)).returncode == 1


def test_to_show_such_a_file_takes_neither_torch_nor_numpy(tmp_path: Path) -> None:
    assert_needs_no_torch("show", str(save_tree(tmp_path, {"model": make_net().state_dict(), "epoch": 3})))
