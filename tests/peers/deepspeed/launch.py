"""Jobs of real processes, started by ``torchrun`` as users start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

#: Seconds that a job may take.
_TIMEOUT = 600

_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Record:
    """What a run wrote down."""

    path: Path

    @property
    def values(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self.path.with_suffix(".json").read_text())
        return values

    def state(self, point: str) -> dict[str, torch.Tensor]:
        return load_file(f"{self.path}.{point}.safetensors")


def run_job(
    ranks: int, folder: Path, specs: Sequence[dict[str, Any]], job: str = "tests.peers.deepspeed.jobs"
) -> list[Record]:
    """Run some runs one after another on so many ranks. A job that fails fails the test, with its output."""
    folder.mkdir(parents=True, exist_ok=True)
    outs = [folder / f"run{number}" for number in range(len(specs))]
    runs = folder / "runs.json"
    runs.write_text(json.dumps([{**spec, "out": str(out)} for spec, out in zip(specs, outs, strict=True)]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, "-m", job, str(runs)],
        cwd=_ROOT,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=False,
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("[rank")] or done.stderr.splitlines()
    assert done.returncode == 0, "\n".join(errors[-40:])
    return [Record(out) for out in outs]
