"""``python -m benchmarks.amplification``: bytes read for each byte of a checkpoint, by us and by PyTorch DCP.

*asked* is what all ranks together ask storage for (``rchar``), as if each were a host of its own; *device* is
what the disk delivers to ranks of one host that begin with cold caches.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import holdfast
from benchmarks import raw

SHAPE = (8192, 4096)
NUMBER = 4

CASES: dict[str, tuple[Placement, Placement]] = {
    "same layout": (Shard(0), Shard(0)),
    "Shard(0) to Shard(1)": (Shard(0), Shard(1)),
    "Shard(1) to Shard(0)": (Shard(1), Shard(0)),
    "replicated to replicated": (Replicate(), Replicate()),
    "sharded to replicated": (Shard(0), Replicate()),
}

State = dict[str, DTensor]
Load = Callable[[State], object]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.amplification", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where to write; the disk that is measured")
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=parser.parse_args().folder))
    print("| case | ranks | holdfast `always`, asked | `auto`, device | PyTorch DCP, asked | device |")
    print("|---|---:|---:|---:|---:|---:|")
    try:
        for ranks in (2, 4):
            mp.spawn(_rank, (ranks, folder / str(ranks)), nprocs=ranks)
    finally:
        shutil.rmtree(folder)


def _rank(rank: int, ranks: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}.store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    for name, (saved, loaded) in CASES.items():
        path = folder / name.replace(" ", "-")
        holdfast.save_checkpoint(path / "holdfast", "s", _state(saved))
        dcp.save(_state(saved), checkpoint_id=path / "dcp")
        ours, always, peer = _loads(path)
        figures = [_asked(always, loaded), _delivered(ours, loaded, path)]
        figures += [_asked(peer, loaded), _delivered(peer, loaded, path)]
        if rank == 0:
            print(f"| {name} | {ranks} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |", flush=True)
            shutil.rmtree(path)
        dist.barrier()
    dist.destroy_process_group()


def _loads(path: Path) -> tuple[Load, Load, Load]:
    """Ours as it is by default, ours with an exchange, and the peer's."""
    return (
        lambda state: holdfast.load_checkpoint(path / "holdfast", model=state),
        lambda state: holdfast.load_checkpoint(path / "holdfast", model=state, exchange="always"),
        lambda state: dcp.load(state, checkpoint_id=path / "dcp"),
    )


def _state(placement: Placement) -> State:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shape = list(SHAPE)
    if isinstance(placement, Shard):
        shape[placement.dim] //= dist.get_world_size()
    return {
        str(n): DTensor.from_local(torch.full(shape, float(n)), mesh, [placement], run_check=False)
        for n in range(NUMBER)
    }


def _asked(load: Load, placement: Placement) -> float:
    """Bytes asked for by all ranks, for each byte of the state."""
    load(_state(placement))  # what Python reads at first use
    state = _state(placement)
    before = _rchar()
    load(state)
    total = torch.tensor([_rchar() - before])
    dist.all_reduce(total)
    return float(total) / _nbytes()


def _delivered(load: Load, placement: Placement, path: Path) -> float:
    """Bytes that the disk delivered, for each byte of the state."""
    state = _state(placement)
    dist.barrier()
    if dist.get_rank() == 0:
        raw.forget(path)
    dist.barrier()
    before = _device_bytes(path)
    dist.barrier()
    load(state)
    dist.barrier()
    return (_device_bytes(path) - before) / _nbytes()


def _nbytes() -> int:
    return NUMBER * SHAPE[0] * SHAPE[1] * 4


def _rchar() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def _device_bytes(path: Path) -> int:
    """What the disk under a path has delivered since the machine started."""
    device = path.stat().st_dev
    for line in Path("/proc/diskstats").read_text().splitlines():
        fields = line.split()
        if (int(fields[0]), int(fields[1])) == (os.major(device), os.minor(device)):
            return int(fields[5]) * 512
    raise OSError(f"there is no disk under {path}")


if __name__ == "__main__":
    main()
