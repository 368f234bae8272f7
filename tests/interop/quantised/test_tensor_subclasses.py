"""Tests models with tensors of wrapper subclasses, of which no package is needed: saved exactly, or refused by name."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import rankless
from rankless.errors import MismatchError, StateError, UnsupportedTensorError
from tests.helpers.file_contents import read_state_files
from tests.helpers.pool import Ranks
from tests.interop.quantised.block_scaled import Adapted, BlockScaled, Unsliceable, inner_tensors, make_scaled


class Quantized(nn.Module):
    """A parameter, a buffer and a wrapper in a wrapper beside plain tensors."""

    def __init__(self, seed: int | None = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.linear.weight = nn.Parameter(make_scaled(8, 6, seed=seed), requires_grad=False)
        self.register_buffer("table", make_scaled(2, 4, seed=seed))
        self.adapted = nn.Parameter(Adapted(make_scaled(4, 2, seed=seed), torch.ones(2) * (seed is not None)), False)

    def inner(self) -> list[torch.Tensor]:
        tensors = (self.linear.weight, self.table, self.adapted.weight)
        return [*itertools.chain(*map(inner_tensors, tensors)), self.adapted.offset]


def assert_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for value, wanted in zip(actual, expected, strict=True):
        assert torch.equal(value, wanted)


def test_inner_tensors_are_saved_and_filled_in_place(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", Quantized())
    blank = Quantized(seed=None)
    before = blank.inner()
    rankless.load_checkpoint(tmp_path, model=blank)
    assert_equal(before, Quantized().inner())
    assert all(now is then for now, then in zip(blank.inner(), before, strict=True))
    stored = {key for key in rankless.open(tmp_path) if "adapted" in key}
    assert stored == {f"model/adapted.{name}" for name in ("weight.codes", "weight.scale", "weight.table", "offset")}


def test_a_state_dict_is_a_model_too(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", Quantized().state_dict())
    blank = Quantized(seed=None)
    rankless.load_checkpoint(tmp_path, model=blank.state_dict())
    assert_equal(blank.inner(), Quantized().inner())


def test_a_model_is_saved_and_loaded_alone(tmp_path: Path) -> None:
    rankless.save_model(Quantized(), tmp_path / "model.safetensors")
    blank = Quantized(seed=None)
    rankless.load_model(blank, tmp_path / "model.safetensors")
    assert_equal(blank.inner(), Quantized().inner())


class Tied(nn.Module):
    def __init__(self, seed: int | None, tied: bool = True) -> None:
        super().__init__()
        self.first = nn.Parameter(make_scaled(2, 2, seed=seed), requires_grad=False)
        self.second = self.first if tied else nn.Parameter(make_scaled(2, 2, seed=seed), requires_grad=False)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_tensors_are_stored_once(tied: bool, tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", Tied(3))
    blank = Tied(None, tied)
    rankless.load_checkpoint(tmp_path, model=blank)
    for tensor in (blank.first, blank.second):
        assert_equal(inner_tensors(tensor), inner_tensors(Tied(3).first))


def one(tensor: Any) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(tensor, requires_grad=False)
    return module


OTHER = {
    "plain": (lambda: torch.zeros(4, 4), "weight: a BlockScaled in the checkpoint, a plain tensor here"),
    "class": (lambda: make_scaled(4, 4, kind=Unsliceable), "tensor subclass 'BlockScaled' in the checkpoint"),
    "context": (lambda: make_scaled(4, 4, 2), "weight: context .*'block': 4.* in the checkpoint, .*'block': 2"),
    "shape": (lambda: make_scaled(2, 4), r"weight: shape \[4, 4\] in the checkpoint, \[2, 4\] here"),
    "dtype": (
        lambda: BlockScaled(*inner_tensors(make_scaled(4, 4)), 4, torch.bfloat16),
        "weight: dtype 'float32' in the checkpoint, 'bfloat16' here",
    ),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", OTHER)
def test_another_kind_of_tensor_is_refused_by_name(kind: str, strict: bool, tmp_path: Path) -> None:
    make, message = OTHER[kind]
    rankless.save_checkpoint(tmp_path, "s", one(make_scaled(4, 4)))
    with pytest.raises(MismatchError, match=message):
        rankless.load_checkpoint(tmp_path, model=one(make()), strict=strict)


def test_a_plain_tensor_is_not_loaded_into_a_subclass(tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path, "s", one(torch.zeros(4, 4)))
    with pytest.raises(MismatchError, match="weight: a plain tensor in the checkpoint, a BlockScaled here"):
        rankless.load_checkpoint(tmp_path, model=one(make_scaled(4, 4)))


UNSUPPORTED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "context": (
        lambda: one(make_scaled(4, 4, block=len)),
        UnsupportedTensorError,
        "'weight' is a BlockScaled.*context",
    ),
    "meta": (
        lambda: one(make_scaled(4, 4).convert(lambda inner: inner.to("meta"))),
        UnsupportedTensorError,
        "'weight', its codes is on the meta device",
    ),
    "name": (
        lambda: {"weight": make_scaled(4, 4), "weight.scale": torch.ones(1)},
        StateError,
        "'weight' .* name is taken: 'weight.scale'",
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_what_cannot_be_stored_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    make, error, message = UNSUPPORTED[kind]
    with pytest.raises(error, match=message):
        rankless.save_checkpoint(tmp_path, "s", make())
    assert not list(tmp_path.iterdir())


def shard_rows(whole: BlockScaled, rows: int) -> DTensor:
    """Shard a tensor by rows, as torch.chunk does."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    chunk = -(-rows // dist.get_world_size())
    start = min(dist.get_rank() * chunk, rows)
    local = whole[start : min(start + chunk, rows)]
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())


def reshard_all(path: Path, shapes: list[tuple[int, int]], seed: int | None) -> None:
    """Save with a seed, or load without one and save what was loaded."""
    state = {f"{rows}x{columns}": shard_rows(make_scaled(rows, columns, seed=seed), rows) for rows, columns in shapes}
    if seed is None:
        rankless.load_checkpoint(path.parent / "1", model=state)
    rankless.save_checkpoint(path, "s", state)


#: Rows and columns; a block has 4 elements. On two and three ranks every shard has whole blocks, and two rows or more.
SHAPES = [(4, 4), (5, 4), (6, 8), (7, 12), (11, 4), (12, 2), (24, 1), (100, 4), (96, 3)]


@pytest.mark.parametrize("size", [2, 3])
def test_rows_are_divided_with_their_blocks(ranks: Ranks, size: int, tmp_path: Path) -> None:
    shapes = [shape for shape in SHAPES if -(-shape[0] // size) * (size - 1) < shape[0] - 1]
    whole = {f"{rows}x{columns}": make_scaled(rows, columns) for rows, columns in shapes}
    rankless.save_checkpoint(tmp_path / "1", "s", whole)
    expected = read_state_files(tmp_path / "1/s")
    ranks(size, reshard_all, tmp_path / "sharded", shapes, 0)
    ranks(size, reshard_all, tmp_path / "loaded", shapes, None)
    for name in ("sharded", "loaded"):
        assert read_state_files(tmp_path / name / "s") == expected, name
    blank = {f"{rows}x{columns}": make_scaled(rows, columns, seed=None) for rows, columns in shapes}
    rankless.load_checkpoint(tmp_path / "sharded", model=blank)
    for name, tensor in blank.items():
        assert_equal(inner_tensors(tensor), inner_tensors(whole[name]))


def save_replicas(path: Path, layout: str) -> None:
    whole = make_scaled(4, 4)
    mesh = init_device_mesh("cpu", (2, 2) if layout == "hsdp" else (2,))
    tensors = {
        "plain": lambda: whole,
        "replicated": lambda: DTensor.from_local(whole, mesh, [Replicate()]),
        "hsdp": lambda: DTensor.from_local(
            whole[2 * mesh.get_local_rank(1) :][:2], mesh, [Replicate(), Shard(0)], run_check=False
        ),
    }
    rankless.save_checkpoint(path, "s", {"w": tensors[layout]()})


@pytest.mark.parametrize(("layout", "size"), [("plain", 2), ("replicated", 2), ("hsdp", 4)])
def test_replicas_are_stored_once(ranks: Ranks, layout: str, size: int, tmp_path: Path) -> None:
    rankless.save_checkpoint(tmp_path / "whole", "s", {"w": make_scaled(4, 4)})
    ranks(size, save_replicas, tmp_path / layout, layout)
    assert read_state_files(tmp_path / layout / "s") == read_state_files(tmp_path / "whole/s")


def save_unsupported(path: Path, kind: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    kinds = {
        "columns": (make_scaled(4, 4), Shard(1), (4, 8)),
        "unsliceable": (make_scaled(4, 4, kind=Unsliceable), Shard(0), (8, 4)),
        "one row": (make_scaled(1, 4), Shard(0), (2, 4)),
        "empty": (make_scaled(1 - dist.get_rank(), 4), Shard(0), (1, 4)),
        "straddling": (make_scaled(4, 2), Shard(0), (7, 2)),
    }
    local, placement, shape = kinds[kind]
    stride = (shape[1], 1)
    tensor = DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride)
    rankless.save_checkpoint(path, "s", {"w": tensor})


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("columns", "only rows can be divided"),
        ("unsliceable", "slices of its shard do not show"),
        ("one row", "slices of its shard do not show"),
        ("empty", "a rank holds no rows"),
        ("straddling", "blocks of its scale contain elements of several shards"),
    ],
)
def test_other_layouts_are_refused_by_name(ranks: Ranks, kind: str, message: str, tmp_path: Path) -> None:
    for error in ranks.outcomes(2, save_unsupported, tmp_path, kind):
        assert isinstance(error, UnsupportedTensorError)
        assert "'w' is a " in str(error)
        assert message in str(error)
    assert not list(tmp_path.iterdir())
