"""Tests a Trainer with a PEFT model under torchrun: it resumes on other numbers of ranks, and PEFT opens the result."""

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

ROOT = Path(__file__).parents[3]


def train(run: Path, ranks: int, steps: int, content: str) -> list[float]:
    """The losses of all steps of the run so far."""
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


@pytest.mark.parametrize("content", ["all", "adapter"])
def test_it_resumes_on_other_numbers_of_ranks(tmp_path: Path, content: str) -> None:
    whole = train(tmp_path / "whole", 1, 6, content)
    for ranks, steps in ((2, 2), (1, 4), (2, 6)):
        losses = train(tmp_path / "run", ranks, steps, content)
        assert losses == pytest.approx(whole[:steps], rel=1e-4)
    opened = peft.PeftModel.from_pretrained(make_base(), tmp_path / "run/checkpoint-6/adapter").state_dict()
    model = make_peft("lora")
    rankless.load_checkpoint(tmp_path / "run", model=model)
    assert all(torch.equal(value, opened[name]) for name, value in model.state_dict().items())
