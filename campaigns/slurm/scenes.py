"""What Slurm does to jobs, one scene each: how the job ends, from which steps it went on, and what it printed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from campaigns.common.programs import run
from campaigns.slurm.guide import SRUN, TORCHRUN
from campaigns.slurm.jobs import Training


class Seen(NamedTuple):
    """The result of a scene: the state in which the job ended, and the steps from which its attempts went on."""

    state: str
    resumed: list[int]


def finish(training: Training, script: str) -> str:
    """The job runs to its end."""
    training.submit(script, 2)
    return training.end()


def reach_the_time_limit(training: Training, script: str) -> str:
    """Slurm sends SIGTERM before the time limit, again and again."""
    training.submit(script, 2, "--time=1", "--signal=TERM@45")
    return training.end(600)


def requeue(training: Training, script: str) -> str:
    """An administrator requeues the job, twice."""
    job = training.submit(script, 2)
    for step in (15, 35):
        training.reach_step(step)
        run("scontrol", "requeue", job)
        training.reach(lambda: training.state() != "RUNNING", "the requeue")
    return training.end()


def cancel(training: Training, script: str) -> str:
    """A user cancels the job, and submits another one, on other nodes."""
    job = training.submit(script, 2)
    training.reach_step(15)
    run("scancel", job)
    training.reach(lambda: training.state(job) == "CANCELLED", "the cancellation")
    training.submit(script, 1)
    return training.end()


def signal(training: Training, script: str) -> str:
    """A user sends SIGTERM to the ranks, or SIGKILL."""
    job = training.submit(script, 2)
    for step, number in ((15, "TERM"), (35, "KILL")):
        training.reach_step(step)
        attempts = training.count("resumed")
        run("scancel", f"--signal={number}", job)
        training.reach(lambda attempts=attempts: training.count("resumed") > attempts, f"the attempt after {number}")
    return training.end()


def preempt(training: Training, script: str) -> str:
    """A job of a partition with a higher priority needs all nodes."""
    training.submit(script, 4, "--exclusive")
    training.reach_step(15)
    urgent = training.cluster.submit_command("sleep 2", "--partition=urgent", "--nodes=4", "--exclusive")
    training.reach(lambda: training.state(urgent) == "COMPLETED", "the urgent job")
    return training.end()


def set_a_node_down(training: Training, script: str) -> str:
    """A node is set down in mid-save, and is back later."""
    training.submit(script, 2)
    training.reach_step(20)  # a save begins
    node = training.cluster.describe(training.jobs[-1])["BatchHost"]
    run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    training.reach(lambda: training.state() != "RUNNING", "the end of the attempt")
    run("scontrol", "update", f"nodename={node}", "state=resume")
    return training.end()


def lose_a_node(training: Training, script: str) -> str:
    """A node loses its power, and starts again later."""
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
    """The elements of an array run one after the other, in one run."""
    job = training.submit(script, 2, "--array=1-3%1")
    training.jobs[-1] = f"{job}_3"
    training.reach(lambda: training.cluster.is_known(f"{job}_3"), "the third element", 300)
    return training.end()


def start_twice(training: Training, script: str) -> str:
    """A second job continues the run of the first one: the first one ends with status 0, and is not requeued."""
    first = training.submit(script, 1)
    training.reach_step(15)
    training.submit(script, 1)
    state = training.end()
    training.reach(lambda: training.state(first) == "COMPLETED", "the end of the superseded job")
    return state


def go_to_other_nodes(training: Training, script: str) -> str:
    """A job with a local tier is requeued on its own nodes, then on others."""
    job = training.submit(script, 2, "--nodelist=n1,n2")
    training.reach_step(25)
    run("scontrol", "requeue", job)
    training.reach_step(45)
    run("scontrol", "requeue", job)
    training.reach(lambda: training.state() == "PENDING", "the requeue")
    run("scontrol", "update", f"jobid={job}", "ReqNodeList=n3,n4")
    return training.end()


#: The scenes by name; those of the second table have a local tier.
SCENES: dict[str, Callable[[Training, str], str]] = {
    scene.__name__: scene
    for scene in (
        finish,
        reach_the_time_limit,
        requeue,
        cancel,
        signal,
        preempt,
        set_a_node_down,
        lose_a_node,
        use_an_array,
        start_twice,
        go_to_other_nodes,
    )
}
SCRIPTS = (TORCHRUN, SRUN)
TIERS = {"go_to_other_nodes": "/dev/shm/rankless-tier"}  # noqa: S108 - of each node


def wait_for_idle_nodes(training: Training) -> None:
    """Wait until all nodes are idle again."""
    names = training.cluster.nodes
    deadline = time.monotonic() + 90
    while training.cluster.states() != dict.fromkeys(names, "idle"):
        if time.monotonic() > deadline:
            raise AssertionError(f"nodes are {training.cluster.states()}")
        time.sleep(0.3)
