"""Tests tensors of F4 and F6, whose values share bytes: copied bit for bit, and restored where torch has the dtype.

The oracle is the safetensors library, and for F6, which it does not load, the bytes of the file.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import rankless
from rankless.errors import CorruptCheckpointError, FormatError, MismatchError, UnsupportedTensorError
from tests.helpers.commands import invoke
from tests.helpers.corruption import flip_tensor_bit
from tests.helpers.pool import Ranks

FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)
needs_float4 = pytest.mark.skipif(FLOAT4 is None, reason="torch 2.8 and newer have the dtype")


def write_file(path: Path, tensors: Mapping[str, tuple[str, list[int], bytes]]) -> None:
    """Write a safetensors file without the library, which cannot write F6."""
    entries, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read_entries(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Read a safetensors file without the library, which cannot load F6."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    table: dict[str, Any] = json.loads(raw[8:start])
    table.pop("__metadata__", None)
    return {
        name: (entry["dtype"], entry["shape"], raw[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]])
        for name, entry in table.items()
    }


TENSORS = {
    "four": ("F4", [3, 4], bytes(range(6))),
    "six": ("F6_E2M3", [2, 4], bytes(range(6))),
    "other_six": ("F6_E3M2", [8], bytes(range(6))),
    "scale": ("F8_E8M0", [3], bytes(range(3))),
    "plain": ("F32", [2], bytes(8)),
    "empty": ("F4", [0, 2], b""),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    write_file(tmp_path / "source/model.safetensors", TENSORS)
    return tmp_path / "source"


def test_conversions_copy_them_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    rankless.convert(folder, tmp_path / "run/s", to="native")
    rankless.convert(tmp_path / "run", tmp_path / "back", to="hf")
    rankless.convert(folder, tmp_path / "file.safetensors", to="safetensors")
    assert read_entries(tmp_path / "back/model.safetensors") == TENSORS
    assert read_entries(tmp_path / "file.safetensors") == TENSORS


def test_casts_leave_them_as_they_are(folder: Path, tmp_path: Path) -> None:
    rankless.convert(folder, tmp_path / "cast", to="hf", dtype="bfloat16")
    entries = read_entries(tmp_path / "cast/model.safetensors")
    assert entries["plain"] == ("BF16", [2], bytes(4))
    packed = ("four", "six", "other_six")
    assert {name: entries[name] for name in packed} == {name: TENSORS[name] for name in packed}


def test_formats_of_torch_refuse_those_that_torch_lacks(folder: Path, tmp_path: Path) -> None:
    for to, name in (("torch", "a.pt"), ("dcp", "folder")):
        with pytest.raises(FormatError, match=r"F6_E3M2|F6_E2M3"):
            rankless.convert(folder, tmp_path / name, to=to)
        assert not (tmp_path / name).exists()


def test_commands_show_shapes_in_values(folder: Path, tmp_path: Path) -> None:
    table = json.loads(invoke("show", folder, "--json").stdout)
    shapes = {tensor["name"].removeprefix("model/"): tensor["shape"] for tensor in table["tensors"]}
    assert shapes == {name: shape for name, (_, shape, _) in TENSORS.items()}
    assert invoke("verify", folder).exit_code == 0
    rankless.convert(folder, tmp_path / "run/s", to="native")
    changed = {**TENSORS, "six": ("F6_E2M3", [2, 4], bytes(6))}
    write_file(folder / "model.safetensors", changed)
    assert [tensor.name for tensor in rankless.diff(folder, tmp_path / "run/s").tensors] == ["model/six"]
    assert set(rankless.compute_statistics(folder).tensors) == {"model/scale", "model/plain"}


def test_their_bytes_are_read(folder: Path) -> None:
    opened = rankless.open(folder)
    assert opened.array("model/six").tobytes() == bytes(range(6))
    assert opened.read_array("model/other_six", 2, 4).tolist() == [2, 3]
    with pytest.raises(FormatError, match=r"F6_E2M3.*array"):
        opened["model/six"]


def test_a_corrupt_byte_is_found(folder: Path, tmp_path: Path) -> None:
    rankless.convert(folder, tmp_path / "run/s", to="native")
    flip_tensor_bit(tmp_path / "run/s/model/model.safetensors", "four")
    with pytest.raises(CorruptCheckpointError, match="four"):
        rankless.convert(tmp_path / "run", tmp_path / "back", to="hf")


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"), [("F4", [3], 2), ("F4", [2, 3], 3), ("F6_E2M3", [2, 2], 3), ("F4", [], 1)]
)
def test_rows_that_end_inside_a_byte_are_refused_by_name(
    tmp_path: Path, dtype: str, shape: list[int], nbytes: int
) -> None:
    write_file(tmp_path / "a.safetensors", {"weight": (dtype, shape, bytes(nbytes))})
    with pytest.raises(FormatError, match=f"'weight': rows of {dtype}"):
        rankless.open(tmp_path / "a.safetensors")


class Packed(nn.Module):
    def __init__(self, raw: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(raw.view(FLOAT4), requires_grad=False)  # type: ignore[arg-type]


def make_bytes(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (4, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@needs_float4
def test_a_model_with_float4_is_restored_from_each_kind_of_file(tmp_path: Path) -> None:
    model = Packed(make_bytes())
    save_file(model.state_dict(), tmp_path / "theirs.safetensors")
    rankless.save_model(model, tmp_path / "ours.safetensors")
    rankless.save_model(model, tmp_path / "ours.pt")
    rankless.save_checkpoint(tmp_path / "run", "s", model)
    assert read_entries(tmp_path / "ours.safetensors") == read_entries(tmp_path / "theirs.safetensors")
    loaded = load_file(tmp_path / "run/s/model/model.safetensors")["weight"]
    assert torch.equal(loaded.view(torch.uint8), make_bytes())
    for name in ("theirs.safetensors", "ours.safetensors", "ours.pt", "run"):
        other = Packed(make_bytes(1))
        rankless.load_model(other, tmp_path / name)
        assert torch.equal(other.weight.view(torch.uint8), make_bytes()), name
    opened = rankless.open(tmp_path / "run")["model/weight"]
    assert (opened.dtype, opened.shape) == (FLOAT4, (4, 6))
    with pytest.raises(MismatchError, match=r"weight: .*F4"):
        rankless.load_model({"weight": torch.zeros(4, 6)}, tmp_path / "run")


def shard_rows(seed: int) -> dict[str, torch.Tensor]:
    mesh, rows = init_device_mesh("cpu", (2,)), 2 * dist.get_rank()
    local = make_bytes(seed)[rows : rows + 2].view(FLOAT4)  # type: ignore[arg-type]
    return {"weight": DTensor.from_local(local, mesh, (Shard(0),), run_check=False)}


def save_and_load_sharded(path: Path) -> bool:
    rankless.save_checkpoint(path, "s", shard_rows(0))
    loaded = shard_rows(1)
    rankless.load_checkpoint(path, model=loaded)
    rows = 2 * dist.get_rank()
    local = loaded["weight"].to_local()  # type: ignore[attr-defined]
    return torch.equal(local.view(torch.uint8), make_bytes()[rows : rows + 2])


@needs_float4
def test_sharded_float4_is_stored_like_a_whole_one(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, save_and_load_sharded, tmp_path / "run") == [True, True]
    expected = ("F4", [4, 12], make_bytes().numpy().tobytes())
    assert read_entries(tmp_path / "run/s/model/model.safetensors") == {"weight": expected}


@needs_float4
def test_a_float4_scalar_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTensorError, match="'weight' of F4 has no dimension"):
        rankless.save_checkpoint(tmp_path, "s", {"weight": torch.zeros((), dtype=torch.uint8).view(FLOAT4)})
