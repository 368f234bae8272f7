"""``python -m campaigns.exit_status``: ends jobs under ``torchrun`` in every way, while the CPU is busy.

It proves, for "Killed and stopped ranks" of ``docs/failure-model.md``, that no failed save goes unnoticed. The exit
status of each job must say whether it succeeded: 0 if it did; another if its last save failed, if it raised, or if it
asked for another status. No rank may be aborted. It exits with 1 on any violation.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from campaigns.common import case_runner

#: The script of a rank; ``{action}`` is its last action.
_SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
import rankless, rankless.save.shard_writer
from rankless.errors import StorageError

path = sys.argv[1]
dist.init_process_group("gloo")
state = {{"w": torch.ones(8)}}

def break_writing():
    def fail(*_, **__):
        raise StorageError(28, "the disk is full")
    rankless.save.shard_writer.write_file_ranges = fail

rankless.save_checkpoint(path, "first", state)
{action}
"""

_LOAD = "rankless.load_checkpoint(path, model=state)"
_SAVE = 'rankless.save_checkpoint(path, "last", state)'
_CHECKPOINTER = 'with rankless.Checkpointer(path + "2", model=state, async_save=True) as run:'
_SAVE_ASYNC = 'rankless.save_checkpoint(path, "last", state, async_save=True)'


@dataclass(frozen=True)
class Ending:
    """The last action of all ranks, and its expected outcome."""

    name: str
    action: str
    succeeds: bool = True
    saves: bool = False


ENDINGS = (
    Ending("load", _LOAD),
    Ending("load of a model", 'rankless.load_model(state, path + "/first/model")'),
    Ending("load, group destroyed", f"{_LOAD}; dist.destroy_process_group()"),
    Ending("save", _SAVE, saves=True),
    Ending("asynchronous save", _SAVE_ASYNC, saves=True),
    Ending("asynchronous save, group destroyed", f"{_SAVE_ASYNC}; dist.destroy_process_group()", saves=True),
    Ending("sys.exit(0)", f"{_LOAD}; sys.exit(0)"),
    Ending("sys.exit(3)", f"{_SAVE_ASYNC}; sys.exit(3)", succeeds=False, saves=True),
    Ending("exception", f'{_SAVE_ASYNC}; raise ValueError("mine")', succeeds=False, saves=True),
    Ending("failed save", f"break_writing(); {_SAVE}", succeeds=False),
    Ending("failed asynchronous save", f"break_writing(); {_SAVE_ASYNC}", succeeds=False),
    Ending(
        "failed asynchronous save of a model",
        'break_writing(); rankless.save_model(state, path + "/model.pt", async_save=True)',
        succeeds=False,
    ),
    Ending(
        "failed asynchronous save, caught",
        f"break_writing(); {_SAVE_ASYNC}\ntry:\n    rankless.finalize()\nexcept StorageError:\n    pass",
    ),
    Ending(
        "signal",
        "with rankless.preemption(signal.SIGTERM) as stop:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    while not stop.requested():\n"
        "        pass\n"
        f"    {_SAVE}",
        saves=True,
    ),
    Ending("preemption left open", f"stop = rankless.preemption(); {_LOAD}"),
    Ending("checkpointer", f"{_CHECKPOINTER}\n    run.step(1)\nassert len(run.list()) == 1"),
    Ending("checkpointer left open", _CHECKPOINTER.removeprefix("with ").replace(" as run:", ".step(1)")),
    Ending("checkpointer, failed save", f"break_writing()\n{_CHECKPOINTER}\n    run.step(1)", succeeds=False),
    Ending(
        "checkpointer, signal to one rank",
        f"{_CHECKPOINTER}\n"
        "    while not run.step(run.last_step + 1):\n"
        "        if dist.get_rank() == 1 and run.last_step == 10:\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "        time.sleep(0.01)\n"
        "assert run.list()[-1].step == run.last_step",
    ),
)


@dataclass(frozen=True)
class JobOutcome:
    """The outcome of one job."""

    status: int
    violation: str = ""


def format_script(ending: Ending) -> str:
    """Return the script of a rank, whose argument is the path of the run."""
    return _SCRIPT.format(action=ending.action)


def run_job(ending: Ending, ranks: int = 2) -> JobOutcome:
    """Run a job under ``torchrun``. Return its outcome."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "rank.py"
        script.write_text(format_script(ending))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*torchrun, str(script), f"{folder}/run"]
        job = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        problems = []
        if (job.returncode == 0) != ending.succeeds:
            problems.append(f"exit status {job.returncode}")
        if "terminate called" in job.stderr or "SIGABRT" in job.stderr:
            problems.append("a rank was aborted")
        # If a rank fails, torchrun kills the others, perhaps before the save is complete.
        if ending.saves and ending.succeeds and not (Path(folder) / "run/last/manifest.json").is_file():
            problems.append("the last checkpoint is missing")
        violation = f"{ending.name}: {', '.join(problems)}\n{job.stderr}" if problems else ""
        return JobOutcome(job.returncode, violation)


@contextmanager
def _keep_cpu_busy(processes: int) -> Iterator[None]:
    """Keep the CPU busy."""
    busy = [multiprocessing.get_context("spawn").Process(target=_spin_forever, daemon=True) for _ in range(processes)]
    for process in busy:
        process.start()
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.join()


def _spin_forever() -> None:
    while True:
        pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20, help="number of jobs for each ending (default: 20)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--load", type=int, default=os.cpu_count() or 1, help="processes that keep the CPU busy")
    options = parser.parse_args(arguments)
    cases = [ending for ending in ENDINGS for _ in range(options.times)]
    counts: dict[str, list[JobOutcome]] = {}
    with _keep_cpu_busy(options.load):
        for ending, ended in case_runner.run_cases(cases, lambda case: run_job(case, options.ranks), workers=2):
            counts.setdefault(ending.name, []).append(ended)
    rows = [
        (
            name,
            len(jobs),
            " ".join(map(str, sorted({job.status for job in jobs}))),
            sum(bool(j.violation) for j in jobs),
        )
        for name, jobs in counts.items()
    ]
    print(case_runner.format_table(["last action of the ranks", "jobs", "exit status", "violations"], rows))
    return case_runner.report_violations([job.violation for jobs in counts.values() for job in jobs if job.violation])


if __name__ == "__main__":
    sys.exit(main())
