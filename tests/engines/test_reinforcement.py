"""The example of reinforcement learning: a policy on two ranks, a real vLLM that generates, twenty versions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rankless
from tests.helpers.vllm_programs import ENVIRONMENT

pytest.importorskip("vllm")

_EXAMPLE = Path(__file__).parents[2] / "examples/reinforcement"
_VERSIONS = 20


def test_a_policy_learns_from_the_rollouts_of_its_own_versions(tmp_path: Path) -> None:
    arguments = [str(tmp_path), str(_VERSIONS)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    engine = subprocess.Popen(
        [sys.executable, _EXAMPLE / "rollouts.py", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        training = subprocess.run(
            [*torchrun, str(_EXAMPLE / "policy.py"), *arguments],
            env={**environment, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert training.returncode == 0, training.stdout[-2000:] + training.stderr[-3000:]
        log, _ = engine.communicate(timeout=60)
        assert engine.returncode == 0, log[-3000:]
    finally:
        engine.kill()
    rewards = [float(reward) for reward in re.findall(r"reward ([0-9.]+)", training.stdout)]
    assert len(rewards) == _VERSIONS
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15
    versions = rankless.list_weight_versions(tmp_path / "weights")
    assert versions[-1].number == _VERSIONS
    assert [version.number for version in versions if version.is_anchor] == [1, 11]
