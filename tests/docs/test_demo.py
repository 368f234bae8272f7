"""Tests that the example training script saves when it is told to end.

``make demo`` resumes it on other numbers of ranks, compares the losses, and opens its checkpoints in transformers.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rankless

TRAIN = Path(__file__).parents[2] / "examples" / "train.py"


def start(run: Path, ranks: int, steps: int) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.Popen(
        [*torchrun, str(TRAIN), str(run), f"--steps={steps}", "--save-every=2"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.full
def test_the_example_saves_when_it_is_told_to_end(tmp_path: Path) -> None:
    with start(tmp_path, 2, 100_000) as job:
        assert job.stdout is not None
        first = json.loads(job.stdout.readline())["step"]
        job.send_signal(signal.SIGTERM)
        steps = [first, *(json.loads(line)["step"] for line in job.stdout.read().splitlines())]
        job.wait(60)
    assert steps == list(range(1, steps[-1] + 1))
    newest = rankless.list_checkpoints(tmp_path)[-1]
    assert (newest.tag, newest.status) == (f"step_{steps[-1]}", "complete")
