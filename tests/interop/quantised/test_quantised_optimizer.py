"""Tests an optimizer with quantized states that needs no package: it makes them like those of torchao."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import rankless
from rankless.errors import OptimizerMismatchError
from tests.helpers.file_contents import read_state_files
from tests.helpers.pool import Ranks
from tests.interop.quantised.block_scaled import BlockScaled
from tests.interop.quantised.runs import Run, assert_equal_bits, start_run, train_steps, trained_tensors


class ScaledSGD(torch.optim.Optimizer):
    """SGD with a momentum of 8 bits: multiples of the largest value in each block of 64."""

    def __init__(self, parameters: Any, block: int = 64) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.block = block

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for parameter in self.param_groups[0]["params"]:
            local, grad = map(local_shard, (parameter, parameter.grad))
            state = self.state[parameter]
            if not state:
                state["momentum"] = like_parameter(self.blank_state(local), parameter)
            momentum = local_shard(state["momentum"])
            if isinstance(momentum, BlockScaled):
                codes = momentum.codes.view(-1, self.block)
                values = (codes.float() - 128) * momentum.scale[:, None] * 0.9 + grad.reshape(-1, self.block)
                momentum.scale.copy_(values.abs().amax(1) / 127)
                codes.copy_((values / momentum.scale[:, None]).round() + 128)
                grad = values.view(local.shape)
            local.sub_(grad, alpha=0.1)

    def blank_state(self, local: torch.Tensor) -> torch.Tensor:
        if local.numel() % self.block:
            return torch.zeros_like(local)
        codes = torch.full_like(local, 128, dtype=torch.uint8)
        return BlockScaled(codes, torch.zeros(local.numel() // self.block), torch.arange(256.0), self.block)


def local_shard(tensor: Any) -> Any:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def like_parameter(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return local
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def save(path: Path, sharded: bool) -> None:
    run = start_run(ScaledSGD, sharded=sharded)
    train_steps(run, 0, 3)
    rankless.save_checkpoint(path, "s", *run)


def load(path: Path, sharded: bool) -> Run:
    run = start_run(ScaledSGD, sharded=sharded)
    rankless.load_checkpoint(path, model=run[0], optimizer=run[1])
    return run


def save_again(path: Path, other: Path) -> None:
    rankless.save_checkpoint(other, "s", *load(path, sharded=True))


def resume(path: Path, sharded: bool) -> dict[str, torch.Tensor]:
    run = load(path, sharded)
    train_steps(run, 3, 5)
    return trained_tensors(run)


def test_every_number_of_ranks_saves_the_same_and_resumes(ranks: Ranks, tmp_path: Path) -> None:
    save(tmp_path / "1", sharded=False)
    uninterrupted = start_run(ScaledSGD)
    train_steps(uninterrupted, 0, 5)
    ranks(2, save, tmp_path / "2", True)
    ranks(3, save_again, tmp_path / "2", tmp_path / "3")
    for size in (2, 3):
        assert read_state_files(tmp_path / f"{size}/s") == read_state_files(tmp_path / "1/s"), size
    for parameters in (*ranks(2, resume, tmp_path / "3", True), resume(tmp_path / "3", False)):
        assert_equal_bits(parameters, trained_tensors(uninterrupted))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (128, r"'0\.weight/momentum': context .*'block': 64.* in the checkpoint, .*'block': 128"),
        (7, r"'0\.weight/momentum': a BlockScaled in the checkpoint, a plain tensor here"),
    ],
)
def test_other_settings_are_refused_by_name(block: int, message: str, tmp_path: Path) -> None:
    save(tmp_path, sharded=False)
    run = start_run(lambda parameters: ScaledSGD(parameters, block))
    with pytest.raises(OptimizerMismatchError, match=message):
        rankless.load_checkpoint(tmp_path, model=run[0], optimizer=run[1])
