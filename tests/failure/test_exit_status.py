"""Tests that the exit status of a job's processes is right, whatever they did last."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from campaigns.exit_status import ENDINGS, Ending, run_job

#: One of each way to end: with and without a group, a save in the background, a status of its own, an error, a signal.
IN_THE_DAY = {
    *("load", "asynchronous save, group destroyed", "sys.exit(3)", "failed asynchronous save", "signal"),
    *("failed asynchronous save, caught", "checkpointer left open"),
}


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param(ending, id=ending.name, marks=() if ending.name in IN_THE_DAY else pytest.mark.full)
        for ending in ENDINGS
    ],
)
def test_the_exit_status_of_torchrun_tells_how_a_job_has_ended(ending: Ending) -> None:
    assert not run_job(ending).violation


def test_a_failure_that_nobody_asked_for_is_logged_and_is_the_exit_status(tmp_path: Path) -> None:
    code = """
import atexit, logging, sys, torch, rankless, rankless.save.shard_writer
from rankless.errors import StorageError
def fail(*_):
    raise StorageError(28, "the disk is full")
rankless.save.shard_writer.write_file_ranges = fail
print("this is flushed", end="")
rankless.save_checkpoint(sys.argv[1], "s", {"w": torch.ones(1)}, async_save=True)
atexit.register(lambda: print(", and this is called", end=""))
"""
    job = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, check=False
    )
    assert job.returncode == 1
    assert job.stdout == "this is flushed, and this is called"
    assert "the exit status is 1" in job.stderr
    assert "the disk is full" in job.stderr


SPAWNED = """
import pathlib, sys, torch, torch.multiprocessing as mp, torch.distributed as dist
import rankless, rankless.save.shard_writer
from rankless.errors import StorageError
from tests.helpers.rendezvous import join_store, serve_store
def rank(number, path, port_file):
    store = (join_store if number else serve_store)(pathlib.Path(port_file))
    dist.init_process_group("gloo", store=store, rank=number, world_size=2)
    rankless.save_checkpoint(path, "a", {"w": torch.ones(4)})
    rankless.load_checkpoint(path, model={"w": torch.ones(4)})
    if sys.argv[3] == "fail":
        def fail(*_):
            raise StorageError(28, "the disk is full")
        rankless.save.shard_writer.write_file_ranges = fail
    rankless.save_checkpoint(path, "b", {"w": torch.ones(4)}, async_save=True)
if __name__ == "__main__":
    mp.spawn(rank, (sys.argv[1], sys.argv[2]), nprocs=2)
"""


@pytest.mark.parametrize("outcome", ["succeed", "fail"])
def test_spawned_ranks_commit_their_last_save_or_fail(tmp_path: Path, outcome: str) -> None:
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    command = [sys.executable, str(script), str(tmp_path / "run"), str(tmp_path / "port"), outcome]
    about = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    job = subprocess.run(command, env=about, capture_output=True, text=True, timeout=300, check=False)
    assert (job.returncode == 0) == (outcome == "succeed"), job.stderr
    assert (tmp_path / "run/b").is_dir() == (outcome == "succeed")


@pytest.mark.parametrize(
    "odd",
    [
        "sys.stderr.close()",
        "sys.stdout.close(); sys.stderr.close()",
        "logging.getLogger('rankless').addHandler(type('Broken', (logging.Handler,), {'emit': lambda *_: 1 / 0})())",
        "logging.shutdown()",
    ],
)
def test_an_unreported_failure_is_the_exit_status_whatever_became_of_the_log(tmp_path: Path, odd: str) -> None:
    code = f"""
import logging, sys, torch, rankless, rankless.save.shard_writer
from rankless.errors import StorageError
def fail(*_):
    raise StorageError(28, "the disk is full")
rankless.save.shard_writer.write_file_ranges = fail
handle = rankless.save_checkpoint(sys.argv[1], "s", {{"w": torch.ones(1)}}, async_save=True)
while not handle.done():
    pass
{odd}
"""
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1


def test_a_save_in_an_early_function_of_atexit_is_committed(tmp_path: Path) -> None:
    code = """
import atexit, sys
atexit.register(lambda: rankless.save_checkpoint(sys.argv[1], "s", {"w": torch.ones(1)}, async_save=True))
import torch, rankless, rankless.api
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True)
    assert (tmp_path / "run/s/manifest.json").is_file()
