"""The scenes: what Slurm does to a training, and what must be seen of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from campaigns.common.programs import ask, run
from campaigns.slurm.cluster import Cluster
from campaigns.slurm.guide import SRUN, TORCHRUN
from campaigns.slurm.jobs import Training

SCRIPTS = (TORCHRUN, SRUN)


class Scene(NamedTuple):
    """What happens to a training, and what must be seen of it.

    ``ends`` are the states in which its jobs end, ``starts`` the least and the largest number of attempts. ``cuts`` are
    the attempts that end without a save of their last step: all others but the last one are stopped by a signal, and
    the next attempt goes on from that very step. Each cut may print one line of ours, and nothing else may.
    ``sources`` are the places from which the attempts have loaded, if that matters.
    """

    play: Callable[[Training, str], None]
    ends: tuple[str, ...] = ("COMPLETED",)
    starts: tuple[int, int] = (1, 1)
    cuts: int = 0
    steps: int = 60
    has_tier: bool = False
    keeps_memory: bool = False
    sources: tuple[str, ...] | None = None

    def judge(self, training: Training, expected: str) -> list[str]:
        """Check what must be seen when all jobs have ended. Return the lines of ours in their outputs."""
        training.judge(expected, keeps_memory=self.keeps_memory)
        states = tuple(training.states().values())
        training.check(states == self.ends, f"the jobs ended {states}, and not {self.ends}")
        attempts, starts = training.attempts(), training.count_starts()
        training.check(len(attempts) == starts, f"Slurm counts {starts} starts, and the log has {attempts}")
        training.check(self.starts[0] <= starts <= self.starts[1], f"{starts} starts, and not {self.starts}")
        cuts = [attempt for attempt in attempts if attempt.end in {"cut", "superseded"}]
        training.check(len(cuts) == self.cuts, f"{len(cuts)} attempts were cut, and not {self.cuts}: {attempts}")
        training.check(attempts[-1].end == "finished", f"the last attempt has not finished: {attempts}")
        sources = tuple(attempt.source for attempt in attempts)
        training.check(self.sources in {None, sources}, f"loaded from {sources}, and not {self.sources}")
        return training.check_lines(most=self.cuts)


def finish(training: Training, script: str) -> None:
    """Let the job run to its end."""
    training.submit(script, 2)


def reach_the_time_limit(training: Training, script: str) -> None:
    """Let Slurm send SIGTERM before the time limit, again and again."""
    training.submit(script, 2, "--time=2", "--signal=TERM@45")


def requeue(training: Training, script: str) -> None:
    """Requeue the job, twice, as an administrator does."""
    job = training.submit(script, 2)
    for step in (15, 35):
        training.reach_step(step)
        run("scontrol", "requeue", job)
        training.reach(lambda: training.state() != "RUNNING", "the requeue")


def cancel(training: Training, script: str) -> None:
    """Cancel the job, and submit another one, on fewer nodes."""
    job = training.submit(script, 2)
    training.reach_step(15)
    run("scancel", job)
    training.reach(lambda: training.state(job) == "CANCELLED", "the cancellation")
    training.submit(script, 1)


def signal(training: Training, script: str) -> None:
    """Send SIGTERM to all ranks, two on each node."""
    job = training.submit(script, 2, ranks=2)
    training.reach_step(15)
    run("scancel", "--signal=TERM", job)
    training.reach(lambda: training.count("resumed") > 1, "the next attempt")


def lose_a_rank(training: Training, script: str) -> None:
    """Kill a rank, as the kernel does if memory is short. All nodes keep their local tier."""
    training.submit(script, 2, "--nodelist=n1,n2")
    training.reach_step(15)
    run("pkill", "--signal", "KILL", "--newest", "--full", "python.* train.py")
    training.reach(lambda: training.count("resumed") > 1, "the next attempt")


def fail_without_requeue(training: Training, script: str) -> None:
    """Kill a rank of a job that must not be requeued, as in a first try, and submit another one."""
    job = training.submit(script, 2, "--no-requeue")
    training.reach_step(15)
    run("pkill", "--signal", "KILL", "--newest", "--full", "python.* train.py")
    training.reach(lambda: training.state(job) == "FAILED", "the end of the job")
    training.submit(script, 2)


def preempt(training: Training, script: str) -> None:
    """Submit a job to a partition with a higher priority: it needs all nodes."""
    training.submit(script, 4)
    training.reach_step(15)
    urgent = training.cluster.submit_command("sleep 2", "--partition=urgent", "--nodes=4", "--exclusive")
    training.reach(lambda: training.state(urgent) == "COMPLETED", "the urgent job")


def set_a_node_down(training: Training, script: str) -> None:
    """Set a node down in mid-save, and resume it when the job runs on others."""
    training.submit(script, 2)
    training.reach_step(20)  # a save begins
    node = training.cluster.describe(training.jobs[-1])["BatchHost"]
    run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    training.reach(lambda: training.count("resumed") > 1, "the attempt on other nodes")
    ask("scontrol", "update", f"nodename={node}", "state=resume")  # unless it has come back: ReturnToService=2


def lose_a_node(training: Training, script: str) -> None:
    """Crash a node, as without power, and start it again later."""
    job = training.submit(script, 2)
    training.reach_step(15)
    names = run("scontrol", "show", "hostnames", training.cluster.describe(job)["NodeList"]).split()
    node = training.cluster.nodes[names[-1]]
    node.crash()
    training.reach(lambda: training.count("resumed") > 1, "the attempt on other nodes")
    node.start()


def use_an_array(training: Training, script: str, *options: str) -> None:
    """Run the elements of an array one after the other, in one run. The first one is stopped."""
    job = training.submit(script, 2, "--array=1-3%1", *options, elements=(1, 2, 3))
    training.reach_step(15)
    element = training.cluster.describe(f"{job}_1")["JobId"]
    run("scancel", "--signal=TERM", f"{element}.0")  # of an array, Slurm 22.05 would try to signal all elements
    training.reach(lambda: training.count("resumed") > 1, "the next attempt")


def use_an_array_without_requeue(training: Training, script: str) -> None:
    """Do the same where no job may be requeued: the element that is stopped fails, and the next one goes on."""
    use_an_array(training, script, "--no-requeue")


def start_twice(training: Training, script: str) -> None:
    """Submit a second job to the same run: the first one ends with status 0, and is not requeued."""
    training.submit(script, 2)
    training.reach_step(15)
    training.submit(script, 2)


def go_to_other_nodes(training: Training, script: str) -> None:
    """Requeue a job with a local tier on its own nodes, then on others."""
    job = training.submit(script, 2, "--nodelist=n1,n2")
    training.reach_step(25)
    run("scontrol", "requeue", job)
    training.reach_step(45)
    run("scontrol", "requeue", job)
    training.reach(lambda: training.state() == "PENDING", "the requeue")
    run("scontrol", "update", f"jobid={job}", "ReqNodeList=n3,n4")


#: All scenes. Some take more steps: Slurm compares times every half minute, and two jobs must train at once.
SCENES = (
    Scene(finish),
    Scene(reach_the_time_limit, starts=(2, 6), steps=900),
    Scene(requeue, starts=(3, 3)),
    Scene(cancel, ends=("CANCELLED", "COMPLETED"), starts=(2, 2)),
    Scene(signal, starts=(2, 2)),
    Scene(lose_a_rank, starts=(2, 2), cuts=1, has_tier=True, keeps_memory=True),
    Scene(fail_without_requeue, ends=("FAILED", "COMPLETED"), starts=(2, 2), cuts=1),
    Scene(preempt, starts=(2, 2)),
    Scene(set_a_node_down, starts=(2, 2)),
    Scene(lose_a_node, starts=(2, 2), cuts=1),
    Scene(use_an_array, ends=("COMPLETED",) * 3, starts=(4, 4)),
    Scene(use_an_array_without_requeue, ends=("FAILED", "COMPLETED", "COMPLETED"), starts=(3, 3)),
    Scene(start_twice, ends=("COMPLETED",) * 2, starts=(2, 2), cuts=1, steps=900),
    Scene(go_to_other_nodes, starts=(3, 3), has_tier=True, sources=("", "local tier", "run directory")),
)


def wait_for_idle_nodes(cluster: Cluster) -> None:
    """Wait until all nodes are idle again."""
    deadline = time.monotonic() + 300
    while (states := cluster.states()) != dict.fromkeys(cluster.nodes, "idle"):
        if time.monotonic() > deadline:
            raise AssertionError(f"nodes are {states}")
        time.sleep(0.3)
