"""The demo: a training on four hosts goes on while a process is killed, a host is destroyed, and a host joins."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from campaigns.hosts.machine import REPOSITORY
from campaigns.tier.hosts import CONTROLLER, Host, running_hosts

SCRIPT = REPOSITORY / "examples/elastic.py"
STEPS, APART = 60, 10

#: What torchrun and the ranks write to stderr.
LOGS = Path("demo_run/hosts").absolute()

#: The largest difference of losses, due to rounding in sums of another order.
_TOLERANCE = 1e-4

_PATIENCE = 400.0

#: The head has the store. Torchrun waits for more hosts for 15 s if it has fewer than four.
_RENDEZVOUS = "is_host=false,last_call_timeout=15"

#: The store that torchrun shares between attempts still has the addresses of the ranks that died.
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "GLOO_SOCKET_IFNAME": "eth0",
    "OMP_NUM_THREADS": "1",
}


class DemoError(Exception):
    """The demo did not go as expected."""


@dataclass
class Training:
    """One training on several hosts: a ``torchrun`` on each, and what the ranks 0 printed."""

    folder: Path
    name: str
    nodes: str
    hosts: Sequence[Host]
    store: TCPStore
    lines: list[dict[str, Any]] = field(default_factory=list)
    _processes: dict[int, subprocess.Popen[str]] = field(default_factory=dict)

    def start_on(self, host: Host) -> None:
        """Start ``torchrun`` on a host."""
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.nodes}", "--nproc-per-node=1"]
        command += ["--max-restarts=100", "--rdzv-backend=c10d", f"--rdzv-endpoint={CONTROLLER}:{self.store.port}"]
        command += [f"--rdzv-id={self.name}", f"--rdzv-conf={_RENDEZVOUS}", f"--local-addr={host.address}"]
        command += [f"--log-dir={LOGS}/torchrun", str(SCRIPT), str(self.folder / self.name)]
        command += [f"--memory=/dev/shm/{self.name}", f"--steps={STEPS}"]
        with (LOGS / f"{self.name}{host.number}.log").open("a") as log:
            process = subprocess.Popen(
                host.enter(*command), env=os.environ | _ENVIRONMENT, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._processes[host.number] = process
        threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            if line.startswith("{"):
                self.lines.append({**json.loads(line), "time": time.monotonic()})

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The lines of steps."""
        return [line for line in self.lines if "step" in line]

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], after: int = 0) -> dict[str, Any]:
        """Wait for a line after the first ``after`` ones. Raises ``DemoError`` if it does not come."""
        ends = time.monotonic() + _PATIENCE
        while time.monotonic() < ends:
            for line in self.lines[after:]:
                if condition(line):
                    return line
            if all(process.poll() is not None for process in self._processes.values()):
                break
            time.sleep(0.02)
        raise DemoError(f"the training did not go on; see {LOGS}/{self.name}*.log")

    def wait(self) -> None:
        """Wait for the end of the training on all hosts that are up. Raises ``DemoError`` if it was no success."""
        for host in self.hosts:
            if self._processes[host.number].wait(_PATIENCE):
                raise DemoError(f"torchrun failed on host {host.number}; see {LOGS}/{self.name}*.log")


def run_demo(folder: Path) -> None:
    """Run the demo. Raises ``DemoError``."""
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    with running_hosts(4) as hosts:
        store = TCPStore(CONTROLLER, 0, is_master=True, wait_for_workers=False)
        print("Four hosts, each with a memory of its own and a link of 2 Gbit/s, and a disk of 250 MB/s.\n")
        print(f"1. An undisturbed training of {STEPS} steps.", flush=True)
        undisturbed = Training(folder, "undisturbed", "4", hosts, store)
        for host in hosts:
            undisturbed.start_on(host)
        undisturbed.wait()
        print("2. The same training, disturbed. Each step is saved in memory, with a copy on another host.", flush=True)
        disturbed = Training(folder, "disturbed", "2:4", hosts, store)
        _disturb(disturbed)
    _compare(undisturbed.steps, disturbed)


def _disturb(training: Training) -> None:
    hosts = training.hosts
    for host in hosts:
        training.start_on(host)
    training.wait_for(lambda line: line.get("step", 0) >= APART and line["ranks"] == 4)
    print("   kill -9 of a rank of host 2:", flush=True)
    _measure_recovery(training, lambda: hosts[1].execute("pkill", "-9", "-f", "-o", f"python -u {SCRIPT}"), 4)
    training.wait_for(lambda line: line.get("step", 0) >= 2 * APART)
    print("   Host 3 is destroyed, with its memory:", flush=True)
    _measure_recovery(training, hosts[2].destroy, 3)
    training.wait_for(lambda line: line.get("step", 0) >= 3 * APART + 5)
    print("   A host joins, with an empty memory:", flush=True)

    def join() -> None:
        hosts[2].start()
        hosts[2].wait_until_up()
        training.start_on(hosts[2])

    _measure_recovery(training, join, 4)
    training.wait()


def _measure_recovery(training: Training, disturb: Callable[[], object], ranks: int) -> None:
    known, began = len(training.lines), time.monotonic()
    disturb()
    loaded = training.wait_for(lambda line: "loaded" in line and line["ranks"] == ranks, known)
    before = training.lines[: training.lines.index(loaded)]
    step = training.wait_for(lambda line: "step" in line, training.lines.index(loaded))
    last = max(line["step"] for line in before if "step" in line)
    saved = next(line for line in reversed(before) if line.get("step") == loaded["loaded"])
    if loaded["source"] != "local tier" or loaded["state"] != saved["state"]:
        raise DemoError(f"the state of step {loaded['loaded']} was loaded as {loaded}, and was saved as {saved}")
    print(
        f"   {ranks} ranks load step {loaded['loaded']} of {last} in {loaded['seconds']:.2f} s from memory, bit for bit"
    )
    print(f"   The next step is complete {step['time'] - began:.1f} s after the event.", flush=True)


def _compare(reference: Sequence[Mapping[str, Any]], training: Training) -> None:
    expected = {line["step"]: line["loss"] for line in reference}
    print("\n step   undisturbed     disturbed   ranks   difference")
    for before, line in zip([{"ranks": 0}, *training.steps], training.steps, strict=False):
        if line["step"] % APART == 0 or line["ranks"] != before["ranks"]:
            gap = abs(line["loss"] - expected[line["step"]])
            print(f"{line['step']:5} {expected[line['step']]:13.6f} {line['loss']:13.6f} {line['ranks']:7} {gap:12.1e}")
    apart = max(abs(line["loss"] - expected[line["step"]]) for line in training.steps)
    if {line["step"] for line in training.steps} != expected.keys() or apart > _TOLERANCE:
        raise DemoError(f"losses differ by up to {apart:.1e}, or steps are missing")
    print(f"\nThe losses of all {STEPS} steps differ by at most {apart:.1e}, which is rounding.")
