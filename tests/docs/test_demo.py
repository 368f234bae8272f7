"""Tests the example training script: it resumes on other numbers of ranks, and transformers opens its checkpoints."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

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


def train(run: Path, ranks: int) -> dict[int, float]:
    """The losses of a job, by step."""
    with start(run, ranks, 4) as job:
        out, errors = job.communicate(timeout=120)
    assert job.returncode == 0, errors
    lines = [json.loads(line) for line in out.splitlines()]
    assert {line["ranks"] for line in lines} <= {ranks}
    return {line["step"]: line["loss"] for line in lines}


@pytest.mark.full
def test_the_example_goes_on_where_its_last_checkpoint_is(tmp_path: Path) -> None:
    losses = train(tmp_path, 2)
    assert list(losses) == [1, 2, 3, 4]
    shutil.rmtree(tmp_path / "step_4")

    again = train(tmp_path, 3)

    assert again == {step: pytest.approx(losses[step], abs=1e-5) for step in (3, 4)}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "step_4" / "model")
    assert model.generate(torch.tensor([[100, 101]]), max_new_tokens=3, do_sample=False).shape[0] == 1


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
