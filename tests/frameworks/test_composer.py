"""Tests of the callback in ``docs/guides/composer.md``, in an environment that has Composer, which needs torch 2.7.

``python -m pytest --noconftest tests/frameworks/test_composer.py`` needs nothing but Composer, rankless and pytest.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("composer")

ROOT = Path(__file__).parents[2]


def train(path: Path, ranks: int, batches: int, dropout: float) -> Any:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    job = subprocess.run(
        [*torchrun, "-m", "tests.helpers.composer_training", str(path), str(batches), str(dropout)],
        check=False,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert job.returncode == 0, job.stderr
    (line,) = [line for line in job.stdout.splitlines() if line.startswith("result ")]
    return json.loads(line.removeprefix("result "))


@pytest.mark.parametrize(("before", "after", "dropout"), [(1, 1, 0.1), (2, 2, 0.1), (2, 1, 0.0), (1, 2, 0.0)])
def test_a_run_resumes_in_the_middle_of_an_epoch(tmp_path: Path, before: int, after: int, dropout: float) -> None:
    """Bit for bit on as many ranks."""
    whole = train(tmp_path / "run", before, 10, dropout)
    for tag in ("ba8", "ba10"):
        shutil.rmtree(tmp_path / "run" / tag)
    resumed = train(tmp_path / "run", after, 10, dropout)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"ba2", "ba4", "ba6", "ba8", "ba10"}
    exact = before == after
    assert resumed.pop("weights") == (whole["weights"] if exact else pytest.approx(whole["weights"], rel=1e-4))
    assert resumed.items() <= whole.items()
