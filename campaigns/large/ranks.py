"""Memory of a model that is built on the meta device, saved and loaded by FSDP2 ranks."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import rankless

#: The memory that a rank may need in addition to its shard, in bytes.
SLACK = 256 * 2**20

#: The width of a layer, and its size in bytes.
_WIDTH = 4096
_LAYER = _WIDTH * _WIDTH * 4

Work = Callable[[Path, int], int]


class Task(NamedTuple):
    """The work of ``ranks`` ranks with a model of about ``nbytes`` in a directory."""

    work: Work
    ranks: int
    folder: Path
    nbytes: int


def run_rank(rank: int, task: Task, results: MutableSequence[int]) -> None:
    """Run one rank in a process group. ``results`` receives the result."""
    torch.set_num_threads(1)
    store = task.folder / f"store.{task.work.__name__}"
    dist.init_process_group("gloo", store=dist.FileStore(str(store), task.ranks), rank=rank, world_size=task.ranks)
    results[rank] = task.work(task.folder / "model", task.nbytes)
    dist.destroy_process_group()


def compute_model_size(nbytes: int) -> int:
    """Return the bytes of the smallest model of at least ``nbytes``: whole layers."""
    return -(-nbytes // _LAYER) * _LAYER


def build_meta_model(nbytes: int) -> nn.Module:
    """Build a sharded float32 model of at least ``nbytes`` on the meta device."""
    with torch.device("meta"):
        model = nn.Sequential(
            *(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(compute_model_size(nbytes) // _LAYER))
        )
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model


def save_model(folder: Path, nbytes: int) -> int:
    """Save a model whose layers are filled with their index."""
    model = build_meta_model(nbytes).to_empty(device="cpu")
    for number, part in enumerate(_list_shards(model)):
        part.fill_(number)
    rankless.save_model(model, folder, shard=True)
    return 0


def load_and_measure_memory(folder: Path, nbytes: int) -> int:
    """Load it. Return by how many bytes the peak resident memory grew."""
    model = build_meta_model(nbytes)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _read_peak_memory()
    rankless.load_model(model, folder)
    grown = _read_peak_memory() - before
    for number, part in enumerate(_list_shards(model)):
        if not bool((part == number).all()):
            raise SystemExit(f"layer {number} is not what was saved")
    return grown


def _list_shards(model: nn.Module) -> list[torch.Tensor]:
    parameters = list(model.parameters())
    return [parameter.to_local().detach() for parameter in parameters if isinstance(parameter, DTensor)]


def _read_peak_memory() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
