"""Tests jobs whose training moves to other ranks midway, and goes on there as if nothing had been."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.fsdp import FSDPModule

from tests.helpers.live_job import train_alone, train_and_move
from tests.helpers.pool import Ranks

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"), reason="means over three ranks round otherwise"
)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param([0, 1], [0, 1, 2, 3], id="2to4"),
        pytest.param([0, 1, 2, 3], [0, 1, 2], id="4to3"),
        pytest.param([0, 1, 2], [3], id="3to1"),
    ],
)
def test_the_training_goes_on_over_other_ranks_as_the_uninterrupted_one(
    ranks: Ranks, tmp_path: Path, before: list[int], after: list[int]
) -> None:
    ranks(4, train_and_move, before, after, tmp_path)
    assert pickle.loads((tmp_path / "state").read_bytes()) == train_alone()  # noqa: S301


@pytest.mark.full
def test_a_job_under_torchrun_goes_on_over_other_ranks(tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "tests.helpers.live_job"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, "0,1", "0,1,2,3", str(tmp_path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert pickle.loads((tmp_path / "state").read_bytes()) == train_alone()  # noqa: S301
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
