"""Tests that ranks request each byte of a checkpoint from storage once, in all layouts."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import rankless
from tests.helpers.pairwise import each_value
from tests.helpers.pool import Ranks

SHAPE = (1024, 1024)
NUMBER = 2


def state(placement: Placement, fill: float | None = None) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = [torch.rand(SHAPE, generator=torch.Generator().manual_seed(n)) for n in range(NUMBER)]
    spread = {str(n): distribute_tensor(t, mesh, [placement], src_data_rank=None) for n, t in enumerate(tensors)}
    if fill is not None:
        for tensor in spread.values():
            tensor.to_local().fill_(fill)
    return spread


def save(path: str, placement: Placement) -> None:
    rankless.save_checkpoint(path, "s", state(placement))


def asked_for() -> int:
    """The bytes that this process has asked to read, from storage or from caches."""
    return int(Path("/proc/self/io").read_text().split()[1])


def load(path: str, placement: Placement, exchange: str = "always") -> int:
    rankless.load_checkpoint(path, model=state(placement), share_reads=exchange)  # what Python reads at first use
    target = state(placement, fill=-1.0)
    before = asked_for()
    rankless.load_checkpoint(path, model=target, share_reads=exchange)
    asked = asked_for() - before
    for name, tensor in state(placement).items():
        assert torch.equal(target[name].to_local(), tensor.to_local())
    return asked


PLACEMENTS = [
    (Shard(0), Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Shard(1), Shard(1)),
    (Replicate(), Replicate()),
    (Shard(0), Replicate()),
]


@each_value({"n": [2, 4], "saved, loaded": PLACEMENTS})
def test_each_byte_is_read_once(ranks: Ranks, tmp_path: Path, n: int, saved: Placement, loaded: Placement) -> None:
    ranks(n, save, str(tmp_path), saved)
    asked = sum(ranks(n, load, str(tmp_path), loaded))
    assert 1 <= asked / (NUMBER * SHAPE[0] * SHAPE[1] * 4) <= 1.05


def load_on_two_hosts(path: str, placement: Placement) -> int:
    with mock.patch("rankless.load.load_operation.host_id", return_value=f"host{dist.get_rank() // 2}"):
        return load(path, placement, "auto")


def test_by_itself_it_passes_on_between_hosts_and_not_on_one(ranks: Ranks, tmp_path: Path) -> None:
    nbytes = NUMBER * SHAPE[0] * SHAPE[1] * 4
    ranks(4, save, str(tmp_path), Shard(0))
    assert sum(ranks(4, load_on_two_hosts, str(tmp_path), Replicate())) / nbytes <= 1.05
    assert sum(ranks(4, load, str(tmp_path), Replicate(), "auto")) / nbytes >= 4


def without_gloo(path: str) -> None:
    """As in a job that knows NCCL only: a group beside it is made, once, for what goes between ranks."""
    made = []
    make = dist.new_group

    def new_group(*arguments: Any, **options: Any) -> Any:
        made.append(options)
        return make(*arguments, **options)

    with (
        mock.patch("torch.distributed.get_backend_config", return_value="cuda:nccl"),
        mock.patch("torch.distributed.new_group", new_group),
    ):
        save(path, Shard(1))
        load(path, Shard(1))
    assert [options["backend"] for options in made] == ["gloo"]


def test_a_group_that_moves_no_cpu_memory_gets_one_beside_it_that_does(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, without_gloo, str(tmp_path))
