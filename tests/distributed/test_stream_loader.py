"""Tests of streams that a training on some ranks leaves in the middle of an epoch, and one on others goes on with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import rankless
from rankless.errors import MismatchError, RankMismatchError
from tests.helpers.pool import Ranks
from tests.helpers.stream_training import all_samples, make_loader, train

#: Numbers of ranks, each with the step until which they train: of 380 samples they use 84 + 63 + 90 = 237.
PARTS = ((4, 7), (3, 14), (5, 20))


def test_no_sample_is_lost_or_used_twice_over_4_then_3_then_5_ranks(ranks: Ranks, tmp_path: Path) -> None:
    used = Counter[int]()
    for size, until in PARTS:
        for samples in ranks(size, train, str(tmp_path), until):
            used.update(samples)
    assert (used.total(), set(used.values())) == (237, {1})
    for samples in ranks(2, train, str(tmp_path), 60):
        used.update(samples)
    assert used.keys() == all_samples()
    assert set(used.values()) <= {1, 2}


def test_jobs_of_torchrun_with_workers_use_each_sample_once(tmp_path: Path) -> None:
    used = Counter[int]()
    for size, until in PARTS:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        command = [*torchrun, "-m", "tests.helpers.stream_training", str(tmp_path), str(until)]
        job = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
        )
        assert job.returncode == 0, job.stderr[-3000:]
        for rank in range(size):
            used.update(json.loads((tmp_path / f"{size}-{rank}.json").read_text()))
    assert (used.total(), set(used.values())) == (237, {1})


def load_into_other_shards(path: str) -> str:
    model, loader = torch.nn.Linear(1, 1), make_loader(count=39)
    with pytest.raises(MismatchError) as caught:
        rankless.Checkpointer(path, model=model, dataloader=loader, signals=()).resume()
    return str(caught.value)


def test_a_stream_with_other_shards_is_refused_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, train, str(tmp_path), 2)
    for message in ranks(3, load_into_other_shards, str(tmp_path)):
        assert "saved with 40 shards, and has 39 now" in message


def save_with_other_shards(path: str) -> str:
    loader = make_loader(count=39 + dist.get_rank())
    with pytest.raises(RankMismatchError) as caught:
        rankless.save_checkpoint(path, "s", torch.nn.Linear(1, 1), dataloader=loader)
    return str(caught.value)


def test_ranks_with_other_shards_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks(2, save_with_other_shards, str(tmp_path)):
        assert "39 shards" in message
        assert "40 shards" in message
