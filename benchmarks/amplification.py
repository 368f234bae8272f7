"""Read amplification: bytes read for each byte of a checkpoint that four ranks load, by rankless and by PyTorch DCP.

*Asked* is the number of bytes that all ranks together request from storage (``rchar``), as if each rank were on a host
of its own; rankless then exchanges data between ranks. *Delivered* is the number of bytes that the disk delivers to
ranks of one host that start with cold caches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import rankless
from benchmarks import raw
from benchmarks.measure import Figure, Table
from benchmarks.parallel import run_on_ranks
from benchmarks.peers import DCP, OURS
from benchmarks.setting import Setting

RANKS, TENSORS, COLUMNS = 4, 4, 4096

#: The layouts in which a state is saved and loaded.
CASES: dict[str, tuple[Placement, Placement]] = {
    "the same layout": (Shard(0), Shard(0)),
    "Shard(0) to Shard(1)": (Shard(0), Shard(1)),
    "Shard(1) to Shard(0)": (Shard(1), Shard(0)),
    "replicated to replicated": (Replicate(), Replicate()),
    "sharded to replicated": (Shard(0), Replicate()),
}

State = dict[str, DTensor]
Load = Callable[[State], object]
Target = Callable[[], State]


def measure_amplification(setting: Setting) -> Iterator[Table]:
    """Measure each case with a quarter of the size, because each rank may hold all of it several times."""
    for case in CASES:
        yield from run_on_ranks(RANKS, setting, partial(_measure_case, case))
        raw.empty_directory(setting.folder)


def _measure_case(case: str, setting: Setting) -> list[Table]:
    saved, loaded = CASES[case]
    state = partial(_build_state, _compute_shape(setting.nbytes // 4))
    ours, theirs = setting.folder / OURS, setting.folder / DCP
    rankless.save_checkpoint(ours, "s", state(saved))
    dcp.save(state(saved), checkpoint_id=theirs)
    peer: Load = partial(dcp.load, checkpoint_id=theirs)
    asked: dict[str, Load] = {
        f"{OURS}, share_reads='always'": lambda target: rankless.load_checkpoint(
            ours, model=target, share_reads="always"
        ),
        DCP: peer,
    }
    delivered: dict[str, Load] = {OURS: lambda target: rankless.load_checkpoint(ours, model=target), DCP: peer}
    target = partial(state, loaded)
    of = f"each byte of a load, {case}, {RANKS} ranks"
    return [
        _build_table(
            f"bytes asked for, for {of}", {name: _measure_requested(load, target) for name, load in asked.items()}
        ),
        _build_table(
            f"bytes delivered, for {of}",
            {name: _measure_delivered(load, target, setting.folder) for name, load in delivered.items()},
        ),
    ]


def _build_table(title: str, figures: dict[str, float]) -> Table:
    return Table(title, "bytes", {name: Figure((figure,)) for name, figure in figures.items()})


def _compute_shape(nbytes: int) -> tuple[int, int]:
    """Return the shape of one tensor, whose rows the ranks divide evenly."""
    return max(1, nbytes // 4 // TENSORS // COLUMNS // RANKS) * RANKS, COLUMNS


def _build_state(shape: tuple[int, int], placement: Placement) -> State:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = list(shape)
    if isinstance(placement, Shard):
        local[placement.dim] //= dist.get_world_size()
    return {
        str(n): DTensor.from_local(torch.full(local, float(n)), mesh, [placement], run_check=False)
        for n in range(TENSORS)
    }


def _measure_requested(load: Load, target: Target) -> float:
    """Return the bytes that all ranks request, for each byte of the state."""
    load(target())  # files that Python reads at first use
    state = target()
    before = _read_rchar()
    load(state)
    total = torch.tensor([_read_rchar() - before])
    dist.all_reduce(total)
    return float(total) / _count_bytes(state)


def _measure_delivered(load: Load, target: Target, path: Path) -> float:
    """Return the bytes that the disk delivers, for each byte of the state."""
    state = target()
    dist.barrier()
    if dist.get_rank() == 0:
        raw.evict_from_cache(path)
    dist.barrier()
    before = _read_device_bytes(path)
    dist.barrier()
    load(state)
    dist.barrier()
    return (_read_device_bytes(path) - before) / _count_bytes(state)


def _count_bytes(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def _read_rchar() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def _read_device_bytes(path: Path) -> int:
    """Return the bytes that the disk of a path has delivered since the machine started."""
    device = path.stat().st_dev
    for line in Path("/proc/diskstats").read_text().splitlines():
        fields = line.split()
        if (int(fields[0]), int(fields[1])) == (os.major(device), os.minor(device)):
            return int(fields[5]) * 512
    raise OSError(f"there is no disk under {path}")
