"""``python -m campaigns.large FOLDER`` needs 7 GB of memory, 7 GB of disk in FOLDER, and a minute or two."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import torch
import torch.multiprocessing as mp

from campaigns.large.ranks import SLACK, Task, compute_model_size, load_and_measure_memory, run_rank, save_model
from campaigns.large.tensor import check_round_trip

RANKS = 4


def main() -> None:
    """Run both parts, and print the results."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("folder", nargs="?", default=".", type=Path)
    arguments.add_argument("--gigabytes", type=float, default=3.0)
    given = arguments.parse_args()
    folder = Path(tempfile.mkdtemp(dir=given.folder, prefix="large-"))
    nbytes = int(given.gigabytes * 1e9)
    try:
        with mp.Manager() as manager:
            growths = manager.list([0] * RANKS)
            for work in (save_model, load_and_measure_memory):
                mp.spawn(run_rank, (Task(work, RANKS, folder, nbytes), growths), nprocs=RANKS)
            for rank, grown in enumerate(growths):
                over = grown - compute_model_size(nbytes) // RANKS
                print(f"rank {rank}: peak memory is its shard and {over / 2**20:.0f} MiB")
                if over > SLACK:
                    raise SystemExit(f"that is more than {SLACK / 2**20:.0f} MiB")
        shutil.rmtree(folder / "model")
        check_round_trip(folder, nbytes)
        print(f"a tensor of {nbytes:,} bytes was restored from a safetensors file and from a torch.save file")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
