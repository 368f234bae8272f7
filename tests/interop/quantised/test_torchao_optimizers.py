"""Tests torchao's optimizers, whose states are tensor subclasses: resumed bit for bit, or refused by name."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import rankless
from rankless.errors import OptimizerMismatchError, StateError, UnsupportedTensorError
from tests.helpers.file_contents import read_state_files
from tests.helpers.pool import Ranks
from tests.interop.quantised.runs import (
    Run,
    assert_equal_bits,
    make_model,
    start_run,
    state_tensors,
    train_steps,
    trained_tensors,
)

pytest.importorskip("torchao", reason="torchao is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

KINDS = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]


def make(kind: str, parameters: Any, **options: Any) -> torch.optim.Optimizer:
    import torchao.optim

    return getattr(torchao.optim, kind)(parameters, **options)


def start(kind: str, **options: Any) -> Run:
    return start_run(functools.partial(make, kind), **options)


@functools.cache
def uninterrupted(kind: str, dtype: torch.dtype = torch.float32) -> tuple[dict[str, torch.Tensor], ...]:
    """The parameters and states of one process after five steps."""
    run = start(kind, dtype=dtype)
    train_steps(run, 0, 5)
    return trained_tensors(run), state_tensors(run)


def save(path: Path, kind: str, sharded: bool, **options: Any) -> None:
    run = start(kind, sharded=sharded, **options)
    train_steps(run, 0, 3)
    rankless.save_checkpoint(path, "s", *run)


def resume(path: Path, kind: str, sharded: bool, **options: Any) -> dict[str, torch.Tensor]:
    """Load into a model and an optimizer that have not stepped, and go on."""
    run = start(kind, sharded=sharded, **options)
    rankless.load_checkpoint(path, model=run[0], optimizer=run[1])
    train_steps(run, 3, 5)
    return trained_tensors(run)


def save_again(path: Path, other: Path, kind: str) -> None:
    run = start(kind, sharded=True)
    rankless.load_checkpoint(path, model=run[0], optimizer=run[1])
    rankless.save_checkpoint(other, "s", *run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumes_bit_for_bit(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save(tmp_path, kind, sharded=False, dtype=dtype)
    run = start(kind, dtype=dtype)
    rankless.load_checkpoint(tmp_path, model=run[0], optimizer=run[1])
    train_steps(run, 3, 5)
    parameters, states = uninterrupted(kind, dtype)
    assert_equal_bits(trained_tensors(run), parameters)
    assert_equal_bits(state_tensors(run), states)
    assert any(name.endswith(".codes") for name in states)


@pytest.mark.parametrize("kind", KINDS)
def test_files_do_not_depend_on_the_ranks_and_every_number_of_ranks_resumes(
    ranks: Ranks, kind: str, tmp_path: Path
) -> None:
    """In float32: torchao 0.18 cannot step sharded bfloat16 parameters eagerly."""
    save(tmp_path / "1", kind, sharded=False)
    expected = read_state_files(tmp_path / "1/s")
    ranks(2, save, tmp_path / "2", kind, True)
    ranks(3, save_again, tmp_path / "2", tmp_path / "3", kind)  # 67, 67 and 66 rows
    ranks(4, save_again, tmp_path / "3", tmp_path / "4", kind)
    for writers in (2, 3, 4):
        assert read_state_files(tmp_path / f"{writers}/s") == expected, writers
    for parameters in ranks(2, resume, tmp_path / "4", kind, True):
        assert_equal_bits(parameters, uninterrupted(kind)[0])
    assert_equal_bits(resume(tmp_path / "4", kind, False), uninterrupted(kind)[0])


def test_the_inner_tensors_are_stored_under_names_of_their_own(tmp_path: Path) -> None:
    run = start("AdamW8bit")
    train_steps(run, 0, 3)
    rankless.save_checkpoint(tmp_path, "s", *run)
    checkpoint = rankless.open(tmp_path)
    state = run[1].state[run[0][0].weight]["exp_avg"]
    for inner in ("codes", "scale", "qmap"):
        assert torch.equal(checkpoint[f"optimizer/0.weight/exp_avg.{inner}"], getattr(state, inner))


def test_an_optimizer_that_has_stepped_is_filled_in_place(tmp_path: Path) -> None:
    save(tmp_path, "AdamW8bit", sharded=False)
    run = start("AdamW8bit")
    train_steps(run, 7, 8)
    before = run[1].state[run[0][0].weight]["exp_avg"]
    rankless.load_checkpoint(tmp_path, model=run[0], optimizer=run[1])
    assert run[1].state[run[0][0].weight]["exp_avg"] is before
    train_steps(run, 3, 5)
    assert_equal_bits(state_tensors(run), uninterrupted("AdamW8bit")[1])


def test_it_is_saved_and_loaded_alone(tmp_path: Path) -> None:
    run = start("AdamW4bit")
    train_steps(run, 0, 3)
    rankless.save_optimizer(run[1], tmp_path / "optimizer.safetensors", model=run[0])
    rankless.save_checkpoint(tmp_path, "s", optimizer=run[1])
    for load in (
        lambda other: rankless.load_optimizer(other[1], tmp_path / "optimizer.safetensors", model=other[0]),
        lambda other: rankless.load_checkpoint(tmp_path, optimizer=other[1]),
    ):
        other = start("AdamW4bit")
        load(other)
        assert_equal_bits(state_tensors(other), state_tensors(run))


@pytest.mark.parametrize("staging", ["eager", "overlapped"])
def test_an_asynchronous_save_holds_what_was_there_when_it_was_called(staging: str, tmp_path: Path) -> None:
    run = start("AdamW8bit")
    train_steps(run, 0, 3)
    rankless.save_checkpoint(tmp_path, "s", *run, async_save=True, staging=staging)
    train_steps(run, 3, 5)
    rankless.finalize()
    save(tmp_path / "now", "AdamW8bit", sharded=False)
    assert read_state_files(tmp_path / "s") == read_state_files(tmp_path / "now/s")


def test_a_shard_without_whole_blocks_is_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    """Of 31 rows the first rank has 16, with quantized states, the other one 15, whose states are too small."""
    for error in ranks.outcomes(2, functools.partial(save, rows=31), tmp_path, "AdamW8bit", True):
        assert isinstance(error, StateError)
        assert "a shard of optimizer tensor '0.weight/exp_avg.codes' is missing" in str(error)
    assert not list(tmp_path.glob("*"))


def test_ranks_whose_states_are_not_quantized_refuse_those_that_are(ranks: Ranks, tmp_path: Path) -> None:
    save(tmp_path, "AdamW8bit", sharded=False, rows=32)
    for error in ranks.outcomes(4, functools.partial(resume, rows=32), tmp_path, "AdamW8bit", True):
        assert isinstance(error, OptimizerMismatchError)
        assert "'0.weight/exp_avg': a OptimState8bit in the checkpoint, a plain tensor here" in str(error)


def test_another_block_size_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, "AdamW8bit", sharded=False)
    run = start_run(functools.partial(make, "AdamW8bit", block_size=128))
    with pytest.raises(OptimizerMismatchError, match=r"'0\.weight/exp_avg\.scale'"):
        rankless.load_checkpoint(tmp_path, model=run[0], optimizer=run[1])


def step_sharded_columns(path: Path, fsdp: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) if fsdp else init_device_mesh("cpu", (2,))
    style = ColwiseParallel() if fsdp else RowwiseParallel()
    model = parallelize_module(make_model(rows=128), mesh["tp"] if fsdp else mesh, {"0": style})
    if fsdp:
        fully_shard(model, mesh=mesh["dp"])
    run = model, make("AdamW8bit", model[0].parameters())
    for parameter in model[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    with torch.compiler.set_stance("force_eager"):
        run[1].step()
    rankless.save_checkpoint(path, "s", *run)


@pytest.mark.parametrize(("fsdp", "size"), [(False, 2), (True, 4)])
def test_columns_and_rows_over_two_mesh_dimensions_are_refused_by_name(
    ranks: Ranks, fsdp: bool, size: int, tmp_path: Path
) -> None:
    for error in ranks.outcomes(size, step_sharded_columns, tmp_path, fsdp):
        assert isinstance(error, UnsupportedTensorError)
        assert "'0.weight/exp_avg' is a OptimState8bit of shape" in str(error)
        assert "only rows can be divided" in str(error)
