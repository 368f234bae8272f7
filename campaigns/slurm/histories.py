"""Random histories: trainings in the queue, to which random things happen until they are finished."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from campaigns.common.programs import ask, run
from campaigns.slurm.cluster import Cluster
from campaigns.slurm.guide import SRUN, TORCHRUN
from campaigns.slurm.jobs import ENDED, Training, expected_digest
from campaigns.slurm.scenes import wait_for_idle_nodes

#: The steps of a training, and the most events that happen to it.
STEPS, MOST_EVENTS = 120, 5

#: How many events come while the training takes steps, and after how many; the others hit a job in the queue, or one
#: that starts or ends.
_SHARE_IN_STEPS, _MOST_STEPS_BETWEEN = 0.8, 25

#: How long a node that was set down stays so, at least.
_SECONDS_DOWN = 20.0

#: The numbers of nodes that a job may have.
_NODES = (1, 2, 3, 4)

#: How many trainings have a local tier.
_SHARE_WITH_TIER = 0.5


class History:
    """One training, and what happens to it."""

    def __init__(self, cluster: Cluster, folder: Path, draw: random.Random) -> None:
        self._cluster, self._draw = cluster, draw
        self._training = Training(cluster, folder, STEPS, has_tier=draw.random() < _SHARE_WITH_TIER)
        self._down: list[str] = []
        self._down_until = 0.0
        self._cancelled: set[str] = set()
        #: How many events came while the training took steps.
        self.in_steps = 0

    def play(self, expected: str, counts: Counter[str]) -> list[str]:
        """Let random things happen, then let the training finish. Return how its attempts went on and ended.

        A job may end without the end of the training in one way only: this history has cancelled it. Everything else
        must go on by itself: a job is requeued by its script, or by Slurm.
        """
        script = self._draw.choice([TORCHRUN, SRUN])
        self._training.submit(script, self._draw.choice(_NODES))
        for _ in range(self._draw.randint(1, MOST_EVENTS)):
            is_in_steps = self._wait()
            if self._training.state() in ENDED:
                break
            event = self._draw.choice(EVENTS)
            counts[event.__name__] += 1
            self.in_steps += is_in_steps
            event(self)
        self.repair()
        while self._end() != "COMPLETED":
            self._training.submit(script, self._draw.choice(_NODES))
        self._training.judge(expected)
        attempts, starts = self._training.attempts(), self._training.count_starts()
        self._training.check(len(attempts) <= starts, f"Slurm counts {starts} starts, and the log has {attempts}")
        polite = sum(attempt.end in {"stopped", "finished"} for attempt in attempts)
        self._training.check_lines(most=(starts - polite) * max(_NODES))  # one a rank, if an attempt was cut
        return [f"{one.resumed}-{one.last} {one.end}" for one in attempts]

    def _end(self) -> str:
        """Let the last job end. Return its state: ``"COMPLETED"``, or ``"CANCELLED"`` if this history did that."""
        self._training.end()
        state = self._training.state()
        allowed = {"COMPLETED", "CANCELLED"} if self._training.jobs[-1] in self._cancelled else {"COMPLETED"}
        self._training.check(state in allowed, f"the job ended {state}, and not {' or '.join(sorted(allowed))}")
        is_finished = self._training.count("finished") > 0
        self._training.check(is_finished or state == "CANCELLED", f"the job ended {state} before the training did")
        return state

    def _wait(self) -> bool:
        """Wait for some steps, or for a while. Return whether the training was taking steps then."""
        if self._draw.random() >= _SHARE_IN_STEPS:
            end = time.monotonic() + self._draw.uniform(1, 12)
            self._training.reach(lambda: time.monotonic() > end, "the time of an event")
            return False
        enough = self._training.count("step") + self._draw.randint(1, _MOST_STEPS_BETWEEN)
        self._training.reach(lambda: self._has_steps(enough), f"{enough} steps")
        return self._training.state() not in ENDED

    def _has_steps(self, steps: int) -> bool:
        """Return whether there were so many steps, or the job has ended. It may need the nodes that are down."""
        if self._down and time.monotonic() > self._down_until:
            self.repair()
        return self._training.count("step") >= steps or self._training.state() in ENDED

    def repair(self) -> None:
        """Let all nodes be there again."""
        while self._down:
            ask("scontrol", "update", f"nodename={self._down.pop()}", "state=resume")

    def count_jobs(self) -> int:
        """Return how many jobs were submitted."""
        return len(self._training.jobs)

    def _names(self) -> list[str]:
        nodes = self._cluster.describe(self._training.jobs[-1]).get("NodeList", "")
        return run("scontrol", "show", "hostnames", nodes).split() if nodes not in {"", "(null)"} else []

    def requeue(self) -> None:
        """Requeue the job."""
        ask("scontrol", "requeue", self._training.jobs[-1])

    def requeue_on_others(self) -> None:
        """Requeue the job for another number of nodes."""
        job = self._training.jobs[-1]
        ask("scontrol", "requeue", job)
        self._training.reach(lambda: self._training.state() != "RUNNING", "the requeue")
        ask("scontrol", "update", f"jobid={job}", f"NumNodes={self._draw.choice(_NODES)}")

    def terminate(self) -> None:
        """Send SIGTERM to all ranks."""
        ask("scancel", "--signal=TERM", self._training.jobs[-1])

    def kill_a_rank(self) -> None:
        """Kill one rank."""
        ask("pkill", "--signal", "KILL", "--newest", "--full", "python.* train.py")

    def stop_a_rank(self) -> None:
        """Stop one rank for two seconds."""
        found = ask("pgrep", "--newest", "--full", "python.* train.py")
        for pid in found.split():
            ask("kill", "-STOP", pid)
            time.sleep(2)
            ask("kill", "-CONT", pid)

    def suspend(self) -> None:
        """Suspend the job for two seconds, as Slurm does."""
        job = self._training.jobs[-1]
        ask("scontrol", "suspend", job)
        time.sleep(2)
        ask("scontrol", "resume", job)

    def cancel(self) -> None:
        """Cancel the job."""
        self._cancelled.add(self._training.jobs[-1])
        ask("scancel", self._training.jobs[-1])

    def preempt(self) -> None:
        """Submit an urgent job that needs all nodes."""
        self._cluster.submit_command("sleep 1", "--partition=urgent", "--nodes=4", "--exclusive")

    def set_down(self) -> None:
        """Set a node of the job down for a while."""
        self._down_until = time.monotonic() + _SECONDS_DOWN
        for name in self._names()[-1:]:
            ask("scontrol", "update", f"nodename={name}", "state=down", "reason=test")
            self._down.append(name)

    def lose(self) -> None:
        """Crash a node of the job. It starts again at once."""
        for name in self._names()[-1:]:
            self._cluster.nodes[name].crash()
            self._cluster.nodes[name].start()

    def cut(self) -> None:
        """Cut a node of the job off the network for two seconds."""
        for name in self._names()[-1:]:
            self._cluster.nodes[name].cut()
            time.sleep(2)
            self._cluster.nodes[name].connect()


#: All events, in the order in which they are drawn from.
EVENTS: tuple[Callable[[History], None], ...] = (
    History.requeue,
    History.requeue_on_others,
    History.terminate,
    History.kill_a_rank,
    History.stop_a_rank,
    History.suspend,
    History.cancel,
    History.preempt,
    History.set_down,
    History.lose,
    History.cut,
)


def play_histories(cluster: Cluster, scratch: Path, events: int, seed: int) -> int:
    """Play histories until there were so many events. Return 1 if something was wrong."""
    expected, counts = expected_digest(scratch / "expected", STEPS), Counter[str]()
    jobs, in_steps, wrong, number = 0, 0, 0, seed
    while counts.total() < events:
        history = History(cluster, scratch / f"history-{number}", random.Random(number))
        try:
            attempts = "; ".join(history.play(expected, counts))
            print(f"history {number}: {attempts}. {counts.total()} events", flush=True)
        except (AssertionError, RuntimeError) as error:
            wrong += 1
            print(f"history {number}: WRONG: {error}", flush=True)
            run("scancel", "--user=root")
        jobs, in_steps = jobs + history.count_jobs(), in_steps + history.in_steps
        history.repair()
        wait_for_idle_nodes(cluster)
        number += 1
    print(f"{counts.total()} events in {jobs} jobs, {in_steps} while they trained, {wrong} wrong: {dict(counts)}")
    return int(wrong > 0)
