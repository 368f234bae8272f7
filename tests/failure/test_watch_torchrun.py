"""Tests whole jobs under ``torchrun`` whose ranks watch each other, from their start to the exit status."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

#: Ranks do not obey torchrun, which ends all ranks of a host as soon as one has died, so that their errors can be seen.
SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
import rankless

signal.signal(signal.SIGTERM, signal.SIG_IGN)
env = os.environ
store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore("attempt " + env["TORCHELASTIC_RESTART_COUNT"], store)  # else gloo finds old addresses
dist.init_process_group("gloo", store=store, rank=int(env["RANK"]), world_size=int(env["WORLD_SIZE"]))
rank, first = dist.get_rank(), env["TORCHELASTIC_RESTART_COUNT"] == "0"
with rankless.watch(timeout=10.0):
    for step in range(200):
        if rank == dist.get_world_size() - 1 and step == 60 and first:
            print(f"killed {{time.time()}}", flush=True)
            {action}
        try:
            {work}
        except Exception:
            print(f"raised {{time.time()}}", flush=True)
            raise
        time.sleep(0.01)
print(f"finished {{rank}}", flush=True)
"""


def run_job(
    tmp_path: Path, ranks: int, action: str, *options: str, work: str = "dist.all_reduce(torch.ones(1000))"
) -> tuple[int, str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(action=action, work=work))
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *options, str(script)]
    job = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    return job.returncode, job.stdout + job.stderr


KILL = "os.kill(os.getpid(), signal.SIGKILL)"
STOP = """os.spawnlp(os.P_NOWAIT, "sh", "sh", "-c", f"sleep 4; kill -CONT {os.getpid()}")
            os.kill(os.getpid(), signal.SIGSTOP)"""


@pytest.mark.full
def test_the_others_end_with_an_error_that_names_the_killed_rank(tmp_path: Path) -> None:
    started = time.monotonic()
    status, output = run_job(tmp_path, 4, KILL)
    assert status == 1
    assert time.monotonic() - started < 100
    for rank in range(3):
        assert re.search(rf"\[rank{rank}\]: rankless.errors.RankFailedError: rank 3 died", output), output
    assert "finished" not in output


@pytest.mark.full  # make test has ranks without torchrun: one is stopped, another closes its watch
@pytest.mark.parametrize("action", [STOP, "break"])
def test_a_rank_that_is_stopped_for_a_while_or_ends_early_is_no_failure(tmp_path: Path, action: str) -> None:
    status, output = run_job(tmp_path, 4, action, work="time.sleep(0.02)")
    assert (status, output.count("finished")) == (0, 4), output


def test_a_job_that_is_restarted_after_a_death_finishes(tmp_path: Path) -> None:
    status, output = run_job(tmp_path, 2, KILL, "--max-restarts", "1")
    assert (status, output.count("finished")) == (0, 2), output
    assert "rank 1 died" in output
