"""Tests the example of an elastic training: after a rank was killed, all ranks go on from the memory of the host."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "elastic.py"
STEPS = 12


def start(base: Path, name: str) -> subprocess.Popen[str]:
    """Start a training that drains no checkpoint before its end."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    arguments = [str(base / name), f"--memory={base / name}-memory", f"--steps={STEPS}", "--drain-every=1000"]
    new_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # for each attempt, as the example says
    return subprocess.Popen(
        [*torchrun, str(SCRIPT), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **new_store},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def ranks_of(torchrun: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


def train(base: Path, name: str, *, kill_at: int = 0) -> list[dict[str, Any]]:
    """Return what the job has printed. A rank is killed after a step."""
    lines = []
    with start(base, name) as job:
        assert job.stdout is not None
        for line in job.stdout:
            lines.append(json.loads(line))
            if kill_at and lines[-1].get("step") == kill_at:
                os.kill(ranks_of(job)[-1], signal.SIGKILL)
                kill_at = 0
    assert job.returncode == 0
    return lines


@pytest.mark.full
def test_a_killed_rank_costs_a_few_steps_and_no_bit(tmp_path: Path) -> None:
    undisturbed = {line["step"]: line for line in train(tmp_path, "undisturbed") if "step" in line}
    lines = train(tmp_path, "disturbed", kill_at=5)

    first, again = (at for at, line in enumerate(lines) if "loaded" in line)
    assert lines[first]["loaded"] == 0
    assert lines[again]["source"] == "local tier"
    assert lines[again]["state"] == undisturbed[lines[again]["loaded"]]["state"]
    assert {line["step"]: line for line in lines if "step" in line} == undisturbed
