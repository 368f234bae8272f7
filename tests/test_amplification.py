"""How many bytes the ranks ask storage for, for each byte of the checkpoint: one, whatever the layouts."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import holdfast
from tests.pool import Ranks

SHAPE = (2048, 2048)
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
    holdfast.save_checkpoint(path, "s", state(placement))


def asked_for() -> int:
    """The bytes that this process has asked to read, from storage or from caches."""
    return int(Path("/proc/self/io").read_text().split()[1])


def load(path: str, placement: Placement) -> int:
    holdfast.load_checkpoint(path, model=state(placement), exchange="always")  # what Python reads at first use
    target = state(placement, fill=-1.0)
    before = asked_for()
    holdfast.load_checkpoint(path, model=target, exchange="always")
    asked = asked_for() - before
    for name, tensor in state(placement).items():
        assert torch.equal(target[name].to_local(), tensor.to_local())
    return asked


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (Shard(0), Shard(0)),
        (Shard(0), Shard(1)),
        (Shard(1), Shard(0)),
        (Shard(1), Shard(1)),
        (Replicate(), Replicate()),
        (Shard(0), Replicate()),
    ],
    ids=str,
)
def test_each_byte_is_read_once(ranks: Ranks, tmp_path: Path, n: int, saved: Placement, loaded: Placement) -> None:
    ranks(n, save, str(tmp_path), saved)
    asked = sum(ranks(n, load, str(tmp_path), loaded))
    assert 1 <= asked / (NUMBER * SHAPE[0] * SHAPE[1] * 4) <= 1.05
