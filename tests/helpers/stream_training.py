"""A training on a stream, which says which samples it has used. Also a program for ``torchrun``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

import rankless

#: The number of samples of each shard.
LENGTHS = [5 + 3 * (number % 4) for number in range(40)]


def read(shard: int, start: int) -> Iterator[int]:
    """Yield samples that say where they are from."""
    for number in range(start, LENGTHS[shard]):
        yield 1000 * shard + number


def all_samples() -> set[int]:
    """Return the samples of one epoch."""
    return {1000 * shard + number for shard, length in enumerate(LENGTHS) for number in range(length)}


def make_loader(workers: int = 0, count: int = 40) -> rankless.StreamLoader:
    """Return a loader of so many of the shards."""
    return rankless.StreamLoader(range(count), read, 3, shuffle_buffer=4, num_workers=workers)


def train(path: str, until: int, workers: int = 0) -> list[int]:
    """Train on this number of ranks until a step. Return the samples of this rank."""
    torch.manual_seed(0)
    model, loader, used = torch.nn.Linear(1, 1), make_loader(workers), []
    with rankless.Checkpointer(path, model=model, dataloader=loader, signals=()) as checkpointer:
        begin = checkpointer.resume()
        for step, batch in enumerate(islice(loader, until - begin), begin + 1):
            used += batch.tolist()
            checkpointer.step(step)
    return used


def main(folder: Path, until: int) -> None:
    """Train, and write the samples into a file of this rank."""
    dist.init_process_group("gloo")
    used = train(str(folder / "run"), until, workers=2)
    (folder / f"{dist.get_world_size()}-{dist.get_rank()}.json").write_text(json.dumps(used))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
