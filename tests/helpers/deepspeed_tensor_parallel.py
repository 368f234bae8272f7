"""Files of DeepSpeed's AutoTP: two tensor-parallel ranks, and the description of their parts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.helpers.deepspeed_files import ZeroSave, random_save, write_zero

#: The sizes that each rank has in a dimension, of each part of the parameter after another; all others are whole.
Cut = tuple[int, list[list[int]]]

SHAPES = {"emb": (6, 4), "qkv": (12, 4), "out": (4, 7), "conv": (3, 6, 2), "norm": (4,), "kv": (5, 4), "none": (0, 4)}
CUTS: dict[str, Cut] = {
    "qkv": (0, [[2, 2], [1, 3], [3, 1]]),
    "out": (1, [[4, 3]]),
    "conv": (1, [[2, 4]]),
}

#: A parameter of which one part is divided, and all ranks have the other.
MIXED = "kv"


def strides_of(shape: tuple[int, ...]) -> list[int]:
    return list(torch.empty(shape, device="meta").stride())


def describe(name: str, shape: tuple[int, ...], ranks: int) -> dict[int, list[tuple[int, int, int, int, list[int]]]]:
    """For each rank: dimension, start in the whole, start in the shard, size, and who has it."""
    everyone = [*range(ranks)]
    if name == MIXED:  # rows 0 to 3 are divided, row 4 is everyone's
        return {0: [(0, 0, 0, 2, [0]), (0, 4, 2, 1, everyone)], 1: [(0, 2, 0, 2, [1]), (0, 4, 2, 1, everyone)]}
    if name not in CUTS:
        return {rank: [(0, 0, 0, shape[0], everyone)] for rank in everyone}
    dim, parts = CUTS[name]
    pieces: dict[int, list[Any]] = {rank: [] for rank in everyone}
    start = 0
    for widths in parts:
        for rank, width in enumerate(widths):
            inside = sum(size for _, _, _, size, _ in pieces[rank])
            pieces[rank].append((dim, start, inside, width, [rank]))
            start += width
    return pieces


def cut(tensor: torch.Tensor, pieces: list[Any]) -> torch.Tensor:
    return torch.cat([tensor.narrow(dim, start, size) for dim, start, _, size, _ in pieces], pieces[0][0]).contiguous()


def affine_map(ranks: int) -> dict[str, Any]:
    params = {}
    for name, shape in SHAPES.items():
        by_rank: dict[int, Any] = {}
        for rank, pieces in describe(name, shape, ranks).items():
            dim = pieces[0][0]
            shard = tuple(sum(p[3] for p in pieces) if d == dim else size for d, size in enumerate(shape))
            rows = [
                {
                    "shape": [size if d == dim else whole for d, whole in enumerate(shape)],
                    "source": [start * strides_of(shape)[dim], strides_of(shape)],
                    "dest": [inside * strides_of(shard)[dim], strides_of(shard)],
                    "locations": holders,
                }
                for _, start, inside, size, holders in pieces
            ]
            by_rank[rank] = {"shard_shape": list(shard), "pieces": rows}
        params[f"^{re.escape(name)}$"] = {"logical_shape": list(shape), "ranks": by_rank}
    return {"universal_checkpoint_version": 0.4, "affine_map": {"version": 1, "params": params}}


def write_tensor_parallel(path: Path, tmp: Path, **options: Any) -> ZeroSave:
    """Write the files of two tensor-parallel ranks, each divided among data-parallel ranks. Return the whole state."""
    groups = [["emb", "qkv", "out", "kv"], ["conv", "norm", "none"]]
    save = random_save(SHAPES, groups, ("exp_avg", "exp_avg_sq"), step=torch.tensor(3.0), **options)
    client = {"mp_world_size": 2, "universal_checkpoint_info": affine_map(2), "epoch": 4}
    path.mkdir(parents=True)
    for rank in range(2):
        pieces = {name: describe(name, shape, 2)[rank] for name, shape in SHAPES.items()}
        part = replace(
            save,
            masters={name: cut(tensor, pieces[name]) for name, tensor in save.masters.items()},
            states={
                state: {name: cut(tensor, pieces[name]) for name, tensor in row.items()}
                for state, row in save.states.items()
            },
            buffers={"table": torch.arange(3.0)},
            client_state=client,
        )
        for file in write_zero(tmp / f"rank{rank}", part).iterdir():
            file.rename(path / file.name.replace("mp_rank_00", f"mp_rank_{rank:02d}"))
    return save
