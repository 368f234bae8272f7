"""Tests a Trainer with a PEFT model: it resumes on other numbers of ranks, and PEFT opens the result.

One of the jobs runs under torchrun; the ranks of the pool have torch and transformers from the start.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch

import rankless
from tests.helpers import peft_training
from tests.helpers.peft_models import make_base, make_peft
from tests.helpers.pool import Ranks
from tests.helpers.trainer_runs import launch

ROOT = Path(__file__).parents[3]


def train_under_torchrun(run: Path, ranks: int, steps: int, content: str) -> list[float]:
    """Return the losses of all steps of the run so far."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    job = subprocess.run(
        [*torchrun, str(peft_training.__file__), str(run), str(steps), content],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert job.returncode == 0, job.stderr
    losses: list[float] = json.loads(job.stdout.splitlines()[-1])
    return losses


def train(run: Path, steps: int, content: str) -> list[float]:
    with launch():
        return peft_training.train(run, steps, content)


@pytest.mark.parametrize("content", ["all", "adapter"])
def test_it_resumes_on_other_numbers_of_ranks(ranks: Ranks, tmp_path: Path, content: str) -> None:
    whole = ranks(1, train, tmp_path / "whole", 6, content)[0]
    for n, steps in ((2, 2), (1, 4)):
        losses = ranks(n, train, tmp_path / "run", steps, content)[0]
        assert losses == pytest.approx(whole[:steps], rel=1e-4)
    if content == "all":
        losses = train_under_torchrun(tmp_path / "run", 2, 6, content)
    else:
        losses = ranks(2, train, tmp_path / "run", 6, content)[0]
    assert losses == pytest.approx(whole, rel=1e-4)
    opened = peft.PeftModel.from_pretrained(make_base(), tmp_path / "run/checkpoint-6/adapter").state_dict()
    model = make_peft("lora")
    rankless.load_checkpoint(tmp_path / "run", model=model)
    assert all(torch.equal(value, opened[name]) for name, value in model.state_dict().items())
