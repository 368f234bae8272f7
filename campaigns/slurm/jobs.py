"""A training in the queue: its folder, its jobs, and what must be true when they have ended."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

from campaigns.common.programs import ask, run
from campaigns.slurm import training
from campaigns.slurm.cluster import Cluster
from campaigns.slurm.guide import TORCHRUN, TRAINING, write_files
from campaigns.slurm.judgement import (
    Attempt,
    Note,
    count_lines,
    find_lines_of_ours,
    find_wrong_steps,
    read_attempts,
)

#: The states in which a job ends for good.
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL")

#: How many checkpoints the training keeps, and what else is in its run directory.
_KEPT, _RUN_FILES = 3, {".history", ".journal.jsonl"}

#: How many seconds a job waits between two attempts, at least.
_SECONDS_BETWEEN = 3.0

#: How many seconds the processes of jobs that have ended may still be there.
_SECONDS_TO_END = 60.0

#: A tier holds at most three slots, and after a restart one checkpoint more: docs/guides/local-tier.md, *Memory*.
_CHECKPOINTS_IN_TIER = 4


class Training:
    """A folder with a training and the guide's scripts, and the jobs that were submitted from there."""

    def __init__(self, cluster: Cluster, folder: Path, steps: int, *, has_tier: bool = False) -> None:
        self.cluster, self.folder, self.steps = cluster, folder, steps
        self.jobs: list[str] = []
        self._waiting: dict[str, float] = {}
        write_files(folder)
        shutil.copy(training.__file__, folder / TRAINING)
        self._tier = Path("/dev/shm") / folder.name if has_tier else None  # of each node
        settings = json.dumps({"steps": steps, "tier": self._tier and str(self._tier)})
        (folder / training.SETTINGS).write_text(settings, encoding="utf-8")

    def submit(self, script: str, nodes: int, *options: str, ranks: int = 1, elements: Collection[int] = ()) -> str:
        """Submit a script of the guide, with so many ranks on each node. Return the number of the job.

        Each of the ``elements`` of an array counts as a job, whose number is that of the array and its own.
        """
        tasks = 1 if script == TORCHRUN else ranks
        few = (f"--nodes={nodes}", f"--gpus-per-node={ranks}", f"--ntasks-per-node={tasks}", "--cpus-per-task=1")
        job = self.cluster.submit(self.folder / script, *few, "--time=10", *options)
        self.jobs += [f"{job}_{element}" for element in elements] or [job]
        return job

    def notes(self) -> list[Note]:
        """Return what rank 0 of all attempts has noted, in order."""
        log = self.folder / training.LOG
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        return [Note(*json.loads(line)) for line in lines if line.endswith("]")]

    def count(self, kind: str) -> int:
        """Return how often something was noted."""
        return sum(note.kind == kind for note in self.notes())

    def reach(self, is_reached: Callable[[], bool], what: str, seconds: float = 600) -> None:
        """Wait until something is so; jobs that wait after a requeue start now."""
        deadline = time.monotonic() + seconds
        while not is_reached():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not after {seconds} s. {self.describe()}")
            self.start_now()
            time.sleep(0.2)

    def start_now(self) -> None:
        """Start jobs that wait two minutes after a requeue.

        Not at once: a node refuses a job whose attempt before it has ended in the same second, or has processes there.
        Then Slurm holds the job and drains the node.
        """
        for job in self.jobs:
            described = self.cluster.describe(job)
            if described["JobState"] != "PENDING" or described["Reason"] != "BeginTime" or self._has_steps(described):
                self._waiting.pop(job, None)
            elif time.monotonic() - self._waiting.setdefault(job, time.monotonic()) > _SECONDS_BETWEEN:
                ask("scontrol", "update", f"jobid={job}", "StartTime=now")

    def reach_step(self, step: int) -> None:
        """Wait until an attempt that is running now has taken a step."""
        seen = len(self.notes())
        self.reach(lambda: any(n.kind == "step" and n.value >= step for n in self.notes()[seen:]), f"step {step}")

    def _has_processes(self) -> bool:
        """Return whether a process of an attempt is still there: their working directory is the folder."""
        for process in Path("/proc").glob("[0-9]*/cwd"):
            with suppress(OSError):
                if process.readlink() == self.folder:
                    return True
        return False

    def _has_steps(self, described: Mapping[str, str]) -> bool:
        """Return whether a node still has processes of an attempt of a job, or Slurm's own that has started them."""
        title = f"slurmstepd: [{described['JobId']}.".encode()
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if process.read_bytes().startswith(title):
                    return True
        return self._has_processes()

    def end(self, seconds: float = 900) -> dict[str, str]:
        """Wait until all jobs have ended. Return their states."""
        self.reach(lambda: set(self.states().values()) <= set(ENDED), "the end of the jobs", seconds)
        return self.states()

    def state(self, job: str | None = None) -> str:
        """Return the state of a job; of the last one by default."""
        return self.cluster.describe(job or self.jobs[-1])["JobState"]

    def describe(self) -> str:
        """Return what is known, for an error message."""
        outputs = "\n".join(path.read_text(errors="replace")[-3000:] for path in self.folder.glob("*.out"))
        return f"{self.folder}: jobs {self.states()}, notes {self.notes()[-12:]}\n{outputs}"

    def attempts(self) -> list[Attempt]:
        """Return the attempts that have loaded a checkpoint or begun the run."""
        return read_attempts(self.notes())

    def states(self) -> dict[str, str]:
        """Return the state of each job, in the order of their submission."""
        return {job: self.state(job) for job in self.jobs}

    def count_starts(self) -> int:
        """Return how often Slurm has started the jobs, by its own count."""
        return sum(int(self.cluster.describe(job).get("Restarts", 0)) + 1 for job in self.jobs if self.has_started(job))

    def has_started(self, job: str) -> bool:
        """Return whether a job has ever run: one that was cancelled in the queue has not."""
        described = self.cluster.describe(job)
        return described["Restarts"] != "0" or described.get("BatchHost") is not None

    def judge(self, expected: str, *, keeps_memory: bool = False) -> None:
        """Check all that must be true whatever has happened. All jobs have ended.

        Each attempt goes on from a step from which it may. The training ends with the digest of one that was never
        interrupted. What it leaves is its checkpoints, and in a tier no more than its memory; no process is left.
        """
        notes = self.notes()
        for wrong in find_wrong_steps(notes, training.SAVE_EVERY, keeps_memory=keeps_memory):
            raise AssertionError(f"{wrong}. {self.describe()}")
        finished = [note.value for note in notes if note.kind == "finished"]
        self.check(bool(finished), "no attempt has finished")
        self.check(set(finished) == {expected}, "the bits differ from a training without an interruption")
        self._check_run()
        self._check_tiers()
        deadline = time.monotonic() + _SECONDS_TO_END
        while self._has_processes() and time.monotonic() < deadline:
            time.sleep(0.2)
        self.check(not self._has_processes(), f"processes are left after {_SECONDS_TO_END} s")

    def _check_run(self) -> None:
        listed = json.loads(
            run(str(Path(sys.executable).parent / "rankless"), "ls", "--json", training.RUN, cwd=self.folder)
        )
        steps = [entry["step"] for entry in listed["checkpoints"]]
        statuses = {entry["status"] for entry in listed["checkpoints"]}
        self.check(steps[-1] == self.steps and len(steps) <= _KEPT, f"the run has the steps {steps}")
        self.check(statuses == {"complete"}, f"the checkpoints are {statuses}")
        names = {path.name for path in (self.folder / training.RUN).iterdir()}
        left = names - _RUN_FILES - {entry["tag"] for entry in listed["checkpoints"]}
        self.check(not left, f"left in the run: {sorted(left)}")
        run(str(Path(sys.executable).parent / "rankless"), "verify", training.RUN, cwd=self.folder)

    def _check_tiers(self) -> None:
        """Check that nodes have no more in memory than the tier may keep. Remove that: it is the user's to remove."""
        for node in self.cluster.nodes.values():
            memory = node.memory()
            names = sorted(path.name for path in memory.iterdir())
            self.check(set(names) <= ({self._tier.name} if self._tier else set()), f"{node.name} has {names} in memory")
            for name in names:
                files = [path for path in (memory / name).rglob("*") if path.is_file()]
                most = _CHECKPOINTS_IN_TIER * training.STATE_BYTES + len(files) * 8192
                used = sum(path.stat().st_blocks * 512 for path in files)
                self.check(used <= most, f"{node.name} has {used} bytes in {name}, and not {most}: {files}")
                shutil.rmtree(memory / name)

    def check(self, is_right: bool, what: str) -> None:
        """Raise ``AssertionError`` with all that is known if something is not as it must be."""
        if not is_right:
            raise AssertionError(f"{what}. {self.describe()}")

    def check_lines(self, most: int) -> list[str]:
        """Check how many lines rankless has written into the outputs of all jobs. Return them.

        Raises ``AssertionError`` if there are more than ``most``, without those of ranks that wait for a dead one.
        """
        lines = [line for path in sorted(self.folder.glob("*.out")) for line in self._lines_of_ours(path)]
        self.check(count_lines(lines) <= most, f"more than {most} lines of ours: {lines}")
        return lines

    @staticmethod
    def _lines_of_ours(output: Path) -> list[str]:
        return find_lines_of_ours(output.read_text(encoding="utf-8", errors="replace"))


def expected_digest(folder: Path, steps: int) -> str:
    """Train in this machine's own process, without Slurm and without an interruption. Return the digest."""
    folder.mkdir(parents=True)
    (folder / training.SETTINGS).write_text(json.dumps({"steps": steps, "tier": None}), encoding="utf-8")
    shutil.copy(training.__file__, folder / TRAINING)
    run(sys.executable, TRAINING, cwd=folder)
    (line,) = [line for line in (folder / training.LOG).read_text().splitlines() if '"finished"' in line]
    return str(json.loads(line)[2])
