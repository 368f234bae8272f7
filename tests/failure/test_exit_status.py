"""Tests that the exit status of a job's processes is right, whatever they did last."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch.distributed as dist

from campaigns.exit_status import ENDINGS, Ending, format_script, run_job
from tests.helpers.pairwise import first_of
from tests.helpers.processes import run_code, start_code

RANKS = 2

ENDING = {ending.name: ending for ending in ENDINGS}

#: One of each way to end: with and without a group, a save in the background, a status of its own, an error, a signal.
IN_THE_DAY = {
    *("load", "asynchronous save, group destroyed", "sys.exit(3)", "failed asynchronous save", "signal"),
    *("failed asynchronous save, caught", "checkpointer left open"),
}

#: What torchrun makes of the statuses of ranks, of which the others are above: a failure and its opposite, and where it
#: sends signals itself. The first is in make test, where ``test_watch_torchrun.py`` has a job that succeeds.
UNDER_TORCHRUN = (
    *("failed asynchronous save", "asynchronous save, group destroyed", "sys.exit(3)"),
    *("checkpointer left open", "checkpointer, signal to one rank", "signal"),
)


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param(ending, id=ending.name, marks=() if ending.name in IN_THE_DAY else pytest.mark.full)
        for ending in ENDINGS
    ],
)
def test_the_exit_status_of_each_rank_tells_how_it_has_ended(ending: Ending, tmp_path: Path) -> None:
    """This process has the key-value store, as torchrun has it. No rank is killed before its end."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "WORLD_SIZE": RANKS}
    common = {name: str(value) for name, value in {**place, "TORCHELASTIC_USE_AGENT_STORE": True}.items()}
    with ExitStack() as job:
        ranks = []
        for rank in range(RANKS):
            environment = {**common, "RANK": str(rank)}
            ranks.append(
                job.enter_context(start_code(format_script(ending), tmp_path / "run", environment=environment))
            )
        errors = [process.communicate(120)[1] for process in ranks]
        statuses = [process.wait() for process in ranks]
    assert [status == 0 for status in statuses] == [ending.succeeds] * RANKS, errors
    assert all(status >= 0 for status in statuses), errors  # none was aborted
    assert (tmp_path / "run/last/manifest.json").is_file() == ending.saves


@first_of(1, "ending", [ENDING[name] for name in UNDER_TORCHRUN], ids=UNDER_TORCHRUN)
def test_the_exit_status_of_torchrun_tells_how_a_job_has_ended(ending: Ending) -> None:
    assert not run_job(ending).violation


def test_a_failure_that_nobody_asked_for_is_logged_and_is_the_exit_status(tmp_path: Path) -> None:
    code = """
import atexit, logging, sys, torch, rankless, rankless.save.shard_writer
from rankless.errors import StorageError
def fail(*_, **__):
    raise StorageError(28, "the disk is full")
rankless.save.shard_writer.write_file_ranges = fail
print("this is flushed", end="")
rankless.save_checkpoint(sys.argv[1], "s", {"w": torch.ones(1)}, async_save=True)
atexit.register(lambda: print(", and this is called", end=""))
"""
    job = run_code(code, tmp_path / "run")
    assert job.returncode == 1
    assert job.stdout == "this is flushed, and this is called"
    assert "the exit status is 1" in job.stderr
    assert "the disk is full" in job.stderr


#: A module, because spawned processes import it.
SPAWNED = """
import pathlib, torch, torch.multiprocessing as mp, torch.distributed as dist
import rankless, rankless.save.shard_writer
from rankless.errors import StorageError
from tests.helpers.rendezvous import join_store, serve_store
def rank(number, size, path, port_file, outcome):
    store = (join_store if number else serve_store)(pathlib.Path(port_file))
    dist.init_process_group("gloo", store=store, rank=number, world_size=size)
    rankless.save_checkpoint(path, "a", {"w": torch.ones(4)})
    rankless.load_checkpoint(path, model={"w": torch.ones(4)})
    if outcome == "fail":
        def fail(*_, **__):
            raise StorageError(28, "the disk is full")
        rankless.save.shard_writer.write_file_ranges = fail
    rankless.save_checkpoint(path, "b", {"w": torch.ones(4)}, async_save=True)
"""

SPAWNING = """
import sys
method, size, folder, outcome = sys.argv[1:]
sys.path.insert(0, folder)
import spawned
arguments = (int(size), folder + "/run", folder + "/port", outcome)
spawned.mp.start_processes(spawned.rank, arguments, nprocs=int(size), start_method=method)
"""


@first_of(
    3,
    ("method", "size", "outcome"),
    [("fork", 2, "succeed"), ("fork", 2, "fail"), ("spawn", 1, "fail"), ("spawn", 2, "succeed"), ("spawn", 2, "fail")],
)
def test_ranks_started_by_torch_commit_their_last_save_or_fail(
    tmp_path: Path, method: str, size: int, outcome: str
) -> None:
    (tmp_path / "spawned.py").write_text(SPAWNED)
    job = run_code(SPAWNING, method, str(size), tmp_path, outcome)
    assert (job.returncode == 0) == (outcome == "succeed"), job.stderr
    assert (tmp_path / "run/a").is_dir()
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
def fail(*_, **__):
    raise StorageError(28, "the disk is full")
rankless.save.shard_writer.write_file_ranges = fail
handle = rankless.save_checkpoint(sys.argv[1], "s", {{"w": torch.ones(1)}}, async_save=True)
while not handle.done():
    pass
{odd}
"""
    assert run_code(code, tmp_path / "run").returncode == 1


def test_a_save_in_an_early_function_of_atexit_is_committed(tmp_path: Path) -> None:
    code = """
import atexit, sys
atexit.register(lambda: rankless.save_checkpoint(sys.argv[1], "s", {"w": torch.ones(1)}, async_save=True))
import torch, rankless, rankless.api
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True)
    assert (tmp_path / "run/s/manifest.json").is_file()
