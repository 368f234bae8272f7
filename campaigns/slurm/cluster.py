"""The cluster: the configuration, MUNGE, the controller and the nodes, and what the scenes ask them."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from campaigns.common.programs import ask, run, start
from campaigns.slurm.node import NETWORK, Node

#: Two partitions over the same nodes: jobs of the second one preempt jobs of the first.
CONFIGURATION = """
ClusterName=rankless
SlurmctldHost=head({network}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
SlurmctldPidFile={scratch}/slurmctld.pid
SlurmdPidFile={scratch}/%n.pid
SlurmdSpoolDir={scratch}/spool-%n
StateSaveLocation={scratch}/state
SlurmctldLogFile={scratch}/slurmctld.log
SlurmdLogFile={scratch}/%n.log
SlurmctldTimeout=120
SlurmdTimeout=45
InactiveLimit=0
MinJobAge=86400
KillWait=60
MessageTimeout=60
Waittime=0
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=100000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
MaxArraySize=1000
NodeName={nodes} CPUs=8 RealMemory=64000 Gres=gpu:8 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=90
PartitionName=urgent Nodes=ALL Default=NO MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=off
"""


class Cluster:
    """A running cluster. It ends with the process namespace of its caller."""

    def __init__(self, scratch: Path, count: int = 4) -> None:
        self._scratch = scratch
        self.nodes = {f"n{number}": Node(f"n{number}", number + 1, scratch) for number in range(1, count + 1)}

    def start(self) -> None:
        """Start all daemons, and wait until all nodes are idle."""
        run("hostname", "head")
        run("mount", "-t", "tmpfs", "tmpfs", "/run")
        self._write_configuration()
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "cluster", "type", "bridge")
        run("ip", "address", "add", f"{NETWORK}.1/24", "dev", "cluster")
        run("ip", "link", "set", "cluster", "up")
        start("munged", "--foreground", "--force", "--num-threads=4", log=self._scratch / "munged.out")
        self._wait_for(lambda: Path("/run/munge/munge.socket.2").exists(), "MUNGE")
        start("slurmctld", "-D", "-c", log=self._scratch / "slurmctld.out")
        for node in self.nodes.values():
            node.start()
        self._wait_for(lambda: self.states() == dict.fromkeys(self.nodes, "idle"), "nodes")

    def _write_configuration(self) -> None:
        for folder in ("/etc/slurm", "/etc/munge", "/run/munge", "/var/lib/munge", "/var/log/munge"):
            Path(folder).mkdir(mode=0o755, parents=True, exist_ok=True)
        for folder in ("/var/lib/munge", "/var/log/munge"):
            run("mount", "-t", "tmpfs", "-o", "mode=0755", "tmpfs", folder)
        key = Path("/etc/munge/munge.key")
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        names = [f"{NETWORK}.1 head", *(f"{node.address} {node.name}" for node in self.nodes.values())]
        Path("/etc/hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        nodes = f"n[1-{len(self.nodes)}]"
        text = CONFIGURATION.format(network=NETWORK, scratch=self._scratch, nodes=nodes)
        Path("/etc/slurm/slurm.conf").write_text(text)
        for number in range(8):  # Slurm counts devices that exist, whatever they are
            (self._scratch / f"gpu{number}").touch()
        Path("/etc/slurm/gres.conf").write_text(f"Name=gpu File={self._scratch}/gpu[0-7]\n")

    def _wait_for(self, is_reached: Callable[[], bool], what: str, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not is_reached():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what} not ready after {seconds} s: see {self._scratch}")
            time.sleep(0.2)

    def states(self) -> dict[str, str]:
        """Return the states of the nodes; nothing if the controller does not answer."""
        return dict(line.split() for line in ask("sinfo", "-h", "-N", "-o", "%N %t").splitlines())

    def submit(self, script: Path, *options: str, environment: Mapping[str, str] | None = None) -> str:
        """Submit a script with ``sbatch``, in its folder. Return the number of the job."""
        command = ["sbatch", "--parsable", *options, script.name]
        done = subprocess.run(
            command,
            cwd=script.parent,
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
        return done.stdout.strip().split(";")[0]

    def submit_command(self, command: str, *options: str) -> str:
        """Submit a command in a script of its own. Return the number of the job."""
        return run("sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={command}").strip()

    def is_known(self, job: str) -> bool:
        """Return whether there is a job of this number; elements of an array get theirs late."""
        return f"ArrayTaskId={job.partition('_')[2]} " in ask("scontrol", "show", "job", job)

    def describe(self, job: str) -> dict[str, str]:
        """Return what ``scontrol show job`` says of a job."""
        return dict(re.findall(r"(\S+?)=(\S*)", run("scontrol", "show", "job", job)))
