"""The training script that users copy: it resumes on other numbers of ranks, and transformers opens what it saves."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

TRAIN = Path(__file__).parents[1] / "examples" / "train.py"


def train(run: Path, ranks: int) -> dict[int, float]:
    """The losses of a job, by step."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*torchrun, str(TRAIN), str(run), "--steps=4", "--save-every=2"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["ranks"] for line in lines} <= {ranks}
    return {line["step"]: line["loss"] for line in lines}


def test_the_example_goes_on_where_its_last_checkpoint_is(tmp_path: Path) -> None:
    losses = train(tmp_path, 2)
    assert list(losses) == [1, 2, 3, 4]
    shutil.rmtree(tmp_path / "step_4")

    again = train(tmp_path, 3)

    assert again == {step: pytest.approx(losses[step], abs=1e-5) for step in (3, 4)}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "step_4" / "model")
    assert model.generate(torch.tensor([[100, 101]]), max_new_tokens=3, do_sample=False).shape[0] == 1
