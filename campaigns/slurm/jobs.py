"""A training in the queue: its folder, what its attempts have noted, and what must be true of that."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from campaigns.common.programs import ask, run
from campaigns.slurm import training
from campaigns.slurm.cluster import Cluster
from campaigns.slurm.guide import TRAINING, write_files

#: The states in which a job ends for good.
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


#: How many checkpoints the training keeps.
_KEPT = 3

#: How many seconds a job waits between two attempts, at least.
_SECONDS_BETWEEN = 3.0


class Note(NamedTuple):
    """A line of the log: which attempt, what has happened, and the step or digest."""

    attempt: str
    kind: str
    value: Any


class Training:
    """A folder with a training and the guide's scripts, and the jobs that were submitted from there."""

    def __init__(self, cluster: Cluster, folder: Path, steps: int, *, has_tier: bool = False) -> None:
        self.cluster, self.folder, self.steps = cluster, folder, steps
        self.jobs: list[str] = []
        self._waiting: dict[str, float] = {}
        write_files(folder)
        shutil.copy(training.__file__, folder / TRAINING)
        tier = f"/dev/shm/{folder.name}" if has_tier else None  # of each node
        settings = json.dumps({"steps": steps, "tier": tier})
        (folder / training.SETTINGS).write_text(settings, encoding="utf-8")

    def submit(self, script: str, nodes: int, *options: str) -> str:
        """Submit a script of the guide, with one rank on each node. Return the number of the job."""
        few = (f"--nodes={nodes}", "--gpus-per-node=1", "--ntasks-per-node=1", "--time=10", f"--output={script}.out")
        self.jobs.append(self.cluster.submit(self.folder / script, *few, *options))
        return self.jobs[-1]

    def notes(self) -> list[Note]:
        """Return what rank 0 of all attempts has noted, in order."""
        log = self.folder / training.LOG
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        return [Note(*json.loads(line)) for line in lines if line.endswith("]")]

    def count(self, kind: str) -> int:
        """Return how often something was noted."""
        return sum(note.kind == kind for note in self.notes())

    def reach(self, is_reached: Callable[[], bool], what: str, seconds: float = 120) -> None:
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
        """
        for job in self.jobs:
            described = self.cluster.describe(job)
            if described["JobState"] != "PENDING" or described["Reason"] != "BeginTime" or self._has_processes():
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

    def end(self, seconds: float = 240) -> str:
        """Wait until the last job has ended. Return its state."""
        self.reach(lambda: self.state() in ENDED, "the end of the job", seconds)
        return self.state()

    def state(self, job: str | None = None) -> str:
        """Return the state of a job; of the last one by default."""
        return self.cluster.describe(job or self.jobs[-1])["JobState"]

    def describe(self) -> str:
        """Return what is known, for an error message."""
        states = {job: self.state(job) for job in self.jobs}
        outputs = "\n".join(path.read_text(errors="replace")[-3000:] for path in self.folder.glob("*.out"))
        return f"{self.folder}: jobs {states}, notes {self.notes()[-12:]}\n{outputs}"

    def judge(self, expected: str) -> list[int]:
        """Check all attempts, and return the steps from which they went on.

        An attempt goes on from the newest durable checkpoint that was noted before, or from a newer one that was
        complete by then. The training ends with the digest of one that was never interrupted.
        """
        durable, newest, resumed = 0, 0, []
        for note in self.notes():
            if note.kind == "resumed":
                self._check(durable <= note.value <= newest, f"resumed at {note.value}, and not at {durable} or later")
                resumed.append(int(note.value))
            elif note.kind == "durable":
                durable = max(durable, int(note.value))
            elif note.kind == "step":
                newest = max(newest, int(note.value))
            elif note.kind == "finished":
                self._check(note.value == expected, "the bits differ from a training without an interruption")
        self._check(self.count("finished") >= 1, "no attempt has finished")
        listed = json.loads(
            run(str(Path(sys.executable).parent / "rankless"), "ls", "--json", training.RUN, cwd=self.folder)
        )
        steps = [entry["step"] for entry in listed["checkpoints"]]
        self._check(steps[-1] == self.steps and len(steps) <= _KEPT, f"the run has the steps {steps}")
        left = [
            path.name
            for path in (self.folder / training.RUN).iterdir()
            if "pending" in path.name or ".tmp" in path.name
        ]
        self._check(not left, f"left in the run: {left}")
        return resumed

    def _check(self, is_right: bool, what: str) -> None:
        if not is_right:
            raise AssertionError(f"{what}. {self.describe()}")

    def lines_of_ours(self) -> list[str]:
        """Return the lines in the outputs of the jobs that rankless has written."""
        texts = (path.read_text(errors="replace") for path in self.folder.glob("*.out"))
        return [line for text in texts for line in text.splitlines() if "rankless" in line and "File" not in line]


def expected_digest(folder: Path, steps: int) -> str:
    """Train in this machine's own process, without Slurm and without an interruption. Return the digest."""
    folder.mkdir(parents=True)
    (folder / training.SETTINGS).write_text(json.dumps({"steps": steps, "tier": None}), encoding="utf-8")
    shutil.copy(training.__file__, folder / TRAINING)
    run(sys.executable, TRAINING, cwd=folder)
    (line,) = [line for line in (folder / training.LOG).read_text().splitlines() if '"finished"' in line]
    return str(json.loads(line)[2])
