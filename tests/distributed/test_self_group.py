"""Ranks of one job, each of which saves and loads by itself: ``process_group="self"``."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

import rankless
from tests.helpers.pool import Ranks


def save_and_load_by_itself(path: Path) -> None:
    own, value = path / str(dist.get_rank()), float(dist.get_rank())
    rankless.save_checkpoint(own, "a", {"w": torch.full((3,), value)}, process_group="self")
    loaded = {"w": torch.zeros(3)}
    rankless.load_checkpoint(own, model=loaded, process_group="self")
    assert torch.equal(loaded["w"], torch.full((3,), value))


def test_each_rank_saves_by_itself(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, save_and_load_by_itself, tmp_path)
