"""Tests the plan of what each rank of an engine would read: from headers alone, and as in real loads."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch

import rankless
from rankless.formats.detect import open_reader
from rankless.inference.planned_reads import PlannedLoad, plan_reads

_RANKS = 4

#: Rows of 128 KiB: columns of one rank are further apart than the gap over which reads are joined.
STATE = {
    "rows": torch.arange(64 * 1000.0).view(64, 1000),
    "columns": torch.arange(8 * 32768.0).view(8, 32768),
    "norm": torch.arange(1000.0),
    "decay": torch.arange(1.0, 9.0),
    "unused": torch.zeros(500),
}


def load(rank: int, weights: Iterable[tuple[str, torch.Tensor]], device: str = "meta") -> int:
    """Divide the weights among the ranks as an engine does. Return the size of the parameters."""
    parts = {
        "rows": lambda tensor: tensor.chunk(_RANKS)[rank],
        "columns": lambda tensor: tensor.chunk(_RANKS, dim=1)[rank],
        "norm": lambda tensor: tensor,
        "decay": lambda tensor: -torch.exp(tensor[2 * rank : 2 * rank + 2]),
    }
    nbytes = 0
    for name, tensor in weights:
        if name in parts:
            part = parts[name](tensor)
            torch.empty(part.shape, device=device).copy_(part)
            nbytes += part.nbytes
    return nbytes


def plan(folder: Path) -> PlannedLoad:
    return plan_reads(open_reader(folder), _RANKS, load)


def test_each_rank_has_its_own_rows_and_shares_what_all_need(tmp_path: Path) -> None:
    rankless.save_model(STATE, tmp_path / "model", shard=True)
    planned = plan(tmp_path / "model")
    rows, columns, norm, decay = (STATE[name].nbytes for name in ("rows", "columns", "norm", "decay"))
    for reads in planned.ranks:
        assert reads.parameters == reads.needed == (rows + columns + decay) // _RANKS + norm
        # The columns of a rank are 32 KiB, with gaps of 96 KiB: they are read apart from each other.
        assert reads.alone == (rows + columns + decay) // _RANKS
        assert reads.shared == norm
        assert list(reads.computed) == ["decay"]
    assert planned.from_disk == rows + columns + norm + decay
    # In a store, reads are joined over gaps of 1 MiB: one rank reads each stripe.
    assert sum(reads.from_store for reads in planned.ranks) == rows + columns + norm + decay


def test_it_agrees_with_what_a_real_load_needs(tmp_path: Path) -> None:
    rankless.save_model(STATE, tmp_path / "model", shard=True)
    for rank, reads in enumerate(plan(tmp_path / "model").ranks):
        with rankless.open_weights(tmp_path / "model", process_group="self") as weights:
            load(rank, weights, "cpu")
        assert reads.needed == weights.report.needed
        assert reads.computed == weights.report.computed


def test_no_tensor_is_read(tmp_path: Path) -> None:
    rankless.save_model(STATE, tmp_path / "model", shard=True)
    expected = plan(tmp_path / "model")
    for file in (tmp_path / "model").glob("*.safetensors"):
        size, header = file.stat().st_size, 8 + int.from_bytes(file.read_bytes()[:8], "little")
        os.truncate(file, header)
        os.truncate(file, size)  # a hole instead of each tensor
    assert plan(tmp_path / "model") == expected
