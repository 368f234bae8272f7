"""What Slurm does to jobs, one scene each: how the job ends, from which steps it went on, and what it printed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from campaigns.common.programs import run
from campaigns.slurm.cluster import Cluster
from campaigns.slurm.guide import SRUN, TORCHRUN
from campaigns.slurm.jobs import Training


class Seen(NamedTuple):
    """The result of a scene: the state in which the job ended, and the steps from which its attempts went on."""

    state: str
    resumed: list[int]


def finish(training: Training, script: str) -> str:
    """Let the job run to its end."""
    training.submit(script, 2)
    return training.end()


def reach_the_time_limit(training: Training, script: str) -> str:
    """Let Slurm send SIGTERM before the time limit, again and again."""
    training.submit(script, 2, "--time=1", "--signal=TERM@45")
    return training.end(600)


def requeue(training: Training, script: str) -> str:
    """Requeue the job, twice, as an administrator does."""
    job = training.submit(script, 2)
    for step in (15, 35):
        training.reach_step(step)
        run("scontrol", "requeue", job)
        training.reach(lambda: training.state() != "RUNNING", "the requeue")
    return training.end()


def cancel(training: Training, script: str) -> str:
    """Cancel the job, and submit another one, on fewer nodes."""
    job = training.submit(script, 2)
    training.reach_step(15)
    run("scancel", job)
    training.reach(lambda: training.state(job) == "CANCELLED", "the cancellation")
    training.submit(script, 1)
    return training.end()


def signal(training: Training, script: str) -> str:
    """Send SIGTERM to all ranks."""
    job = training.submit(script, 2)
    training.reach_step(15)
    attempts = training.count("resumed")
    run("scancel", "--signal=TERM", job)
    training.reach(lambda: training.count("resumed") > attempts, "the next attempt")
    return training.end()


def lose_a_rank(training: Training, script: str) -> str:
    """Kill a rank, as the kernel does if memory is short."""
    training.submit(script, 2)
    training.reach_step(15)
    attempts = training.count("resumed")
    run("pkill", "--signal", "KILL", "--newest", "--full", "python.* train.py")
    training.reach(lambda: training.count("resumed") > attempts, "the next attempt")
    return training.end()


def preempt(training: Training, script: str) -> str:
    """Submit a job to a partition with a higher priority: it needs all nodes."""
    training.submit(script, 4)
    training.reach_step(15)
    urgent = training.cluster.submit_command("sleep 2", "--partition=urgent", "--nodes=4", "--exclusive")
    training.reach(lambda: training.state(urgent) == "COMPLETED", "the urgent job")
    return training.end()


def set_a_node_down(training: Training, script: str) -> str:
    """Set a node down in mid-save, and resume it later."""
    training.submit(script, 2)
    training.reach_step(20)  # a save begins
    node = training.cluster.describe(training.jobs[-1])["BatchHost"]
    run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    training.reach(lambda: training.state() != "RUNNING", "the end of the attempt")
    run("scontrol", "update", f"nodename={node}", "state=resume")
    return training.end()


def lose_a_node(training: Training, script: str) -> str:
    """Crash a node, as without power, and start it again later."""
    job = training.submit(script, 2)
    training.reach_step(15)
    names = run("scontrol", "show", "hostnames", training.cluster.describe(job)["NodeList"]).split()
    node = training.cluster.nodes[names[-1]]
    node.crash()
    attempts = training.count("resumed")
    training.reach(lambda: training.count("resumed") > attempts, "the attempt on other nodes", 180)
    node.start()
    return training.end()


def use_an_array(training: Training, script: str) -> str:
    """Run the elements of an array one after the other, in one run."""
    job = training.submit(script, 2, "--array=1-3%1")
    training.jobs[-1] = f"{job}_3"
    training.reach(lambda: training.cluster.is_known(f"{job}_3"), "the third element", 300)
    return training.end()


def start_twice(training: Training, script: str) -> str:
    """Submit a second job to the same run: the first one ends with status 0, and is not requeued."""
    first = training.submit(script, 1)
    training.reach_step(15)
    training.submit(script, 1)
    state = training.end()
    training.reach(lambda: training.state(first) == "COMPLETED", "the end of the superseded job")
    return state


def go_to_other_nodes(training: Training, script: str) -> str:
    """Requeue a job with a local tier on its own nodes, then on others."""
    job = training.submit(script, 2, "--nodelist=n1,n2")
    training.reach_step(25)
    run("scontrol", "requeue", job)
    training.reach_step(45)
    run("scontrol", "requeue", job)
    training.reach(lambda: training.state() == "PENDING", "the requeue")
    run("scontrol", "update", f"jobid={job}", "ReqNodeList=n3,n4")
    return training.end()


#: The scenes by name.
SCENES: dict[str, Callable[[Training, str], str]] = {
    scene.__name__: scene
    for scene in (
        finish,
        reach_the_time_limit,
        requeue,
        cancel,
        signal,
        lose_a_rank,
        preempt,
        set_a_node_down,
        lose_a_node,
        use_an_array,
        start_twice,
        go_to_other_nodes,
    )
}
SCRIPTS = (TORCHRUN, SRUN)

#: The scenes whose training has a local tier.
WITH_TIER = {"go_to_other_nodes"}


def wait_for_idle_nodes(cluster: Cluster) -> None:
    """Wait until all nodes are idle again."""
    deadline = time.monotonic() + 120
    while (states := cluster.states()) != dict.fromkeys(cluster.nodes, "idle"):
        if time.monotonic() > deadline:
            raise AssertionError(f"nodes are {states}")
        time.sleep(0.3)
