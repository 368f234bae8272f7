"""Tests that any shape, dtype and memory layout, on any number of ranks, is restored bit for bit."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import rankless
from rankless.state.tensor_views import DTYPES
from tests.helpers.examples import examples
from tests.helpers.pool import Ranks

Plan = dict[str, tuple[str, tuple[int, ...]]]

#: name -> dtype and shape: uneven, fewer rows than ranks, 0-d, empty.
plans = st.dictionaries(
    st.sampled_from(["a", "b.weight", "c", "long.name.of.a.tensor", "ünïcode", "slash/name"]),
    st.tuples(
        st.sampled_from(sorted(set(DTYPES) - {"F4"})),  # whose values share bytes: no scalars, no views
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
    ),
    min_size=1,
)
#: Hundreds of small checkpoints: where it can be, on a file system that costs nothing to sync.
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None

world_sizes = st.integers(1, 4)


def value(name: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bytes of a dtype, equal wherever they are made. Booleans are 0 or 1."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    torch_dtype = DTYPES[dtype]
    count = torch.Size(shape).numel()
    raw = torch.randint(0, 256, (count * torch_dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if torch_dtype == torch.bool:
        return (raw > 127).reshape(shape)
    return raw.view(torch_dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def make(plan: Plan, layout: str, *, empty: bool) -> dict[str, torch.Tensor]:
    tensors = {name: value(name, dtype, shape) for name, (dtype, shape) in plan.items()}
    if layout == "sharded":
        tensors = {name: shard(tensor) for name, tensor in tensors.items()}
    elif layout == "views":
        tensors = {name: scattered(tensor) for name, tensor in tensors.items()}
    if empty:
        for tensor in tensors.values():
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            for part in [local] if local.ndim == 0 else local:
                part.copy_(torch.zeros_like(part))
    return tensors


def shard(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor sharded on dim 0 as FSDP2 does, made without communication."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if tensor.ndim == 0:
        return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    chunks = torch.chunk(tensor, mesh.size()) if len(tensor) else ()
    rank = dist.get_rank()
    local = chunks[rank] if rank < len(chunks) else tensor[:0]
    return DTensor.from_local(
        local.clone(), mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def scattered(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in memory that is not contiguous: every second element of a transposed tensor."""
    if tensor.ndim == 0:
        return tensor.expand(3)[1]
    wide = torch.zeros((*reversed(tensor.shape[1:]), 2 * tensor.shape[0]), dtype=tensor.dtype)
    view = wide.permute(*reversed(range(tensor.ndim)))[::2]
    for target, row in zip(view, tensor, strict=True):
        target.copy_(row)
    return view


def save(path: str, plan: Plan, layout: str) -> None:
    rankless.save_checkpoint(path, "s", make(plan, layout, empty=False), max_shard_size=100)


def load(path: str, plan: Plan, layout: str) -> list[str]:
    """The names of tensors that are not what they should be."""
    actual = make(plan, layout, empty=True)
    rankless.load_checkpoint(path, model=actual)
    expected = make(plan, layout, empty=False)
    wrong = []
    for name, tensor in actual.items():
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        known = expected[name]
        other = known._local_tensor if isinstance(known, DTensor) else known
        if not torch.equal(bits(local), bits(other)):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize(("writer", "reader"), [("sharded", "sharded"), ("whole", "sharded"), ("sharded", "views")])
@settings(max_examples=8)
@given(plan=plans, n=world_sizes, m=world_sizes)
def test_any_tensors_go_from_any_ranks_to_any_ranks(
    ranks: Ranks, writer: str, reader: str, plan: Plan, n: int, m: int
) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as path:
        ranks(n, save, path, plan, writer)
        assert ranks(m, load, path, plan, reader) == [[]] * m


@pytest.mark.parametrize("layout", ["whole", "views"])
@settings(max_examples=examples(60))
@given(plan=plans)
def test_any_tensors_come_back_in_one_process(layout: str, plan: Plan) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as path:
        save(path, plan, layout)
        assert load(path, plan, layout) == []
        checkpoint = rankless.open(path)
        for name, (dtype, shape) in plan.items():
            expected = value(name, dtype, shape)
            assert torch.equal(bits(checkpoint[f"model/{name}"]), bits(expected))


def test_every_dtype_is_tried() -> None:
    everything: dict[str, Any] = {name: (name, (5, 3)) for name in set(DTYPES) - {"F4"}}
    with tempfile.TemporaryDirectory(dir=MEMORY) as path:
        save(path, everything, "whole")
        assert load(path, everything, "views") == []


def test_a_default_device_does_not_matter(tmp_path: Path) -> None:
    saved = {"w": torch.arange(10.0)}
    rankless.save_checkpoint(tmp_path, "s", saved, user_content={"t": torch.ones(2)})
    torch.set_default_device("meta")
    try:
        model = {"w": torch.zeros(10, device="cpu")}
        content = rankless.load_checkpoint(tmp_path, model=model)
        actual = rankless.open(tmp_path)["model/w"]
    finally:
        torch.set_default_device(None)
    assert content["t"].tolist() == [1.0, 1.0]
    assert torch.equal(actual, saved["w"])
