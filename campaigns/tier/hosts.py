"""Hosts as namespaces of one kernel, joined by a network with links of limited rate."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from campaigns.common.programs import run
from campaigns.hosts.workers import PORT, Worker, connect

#: The rate of each link, as ``tc`` writes it and in bytes a second.
LINK, LINK_BYTES = "2gbit", 250e6

#: The first three numbers of the addresses. The last one is the host's number; this machine has 254.
_NETWORK = "10.80.0"
CONTROLLER = f"{_NETWORK}.254"

_NAMESPACES = ("--net", "--mount", "--uts", "--pid")


def create_network() -> None:
    """Create the bridge, in this process's network namespace."""
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "switch", "type", "bridge")
    run("ip", "address", "add", f"{CONTROLLER}/24", "dev", "switch")
    run("ip", "link", "set", "switch", "up")


@dataclass
class Host:
    """A host. Its memory is its ``/dev/shm``, which ends with it."""

    number: int
    modules: Sequence[str] = ()
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _pid: int = 0

    @property
    def address(self) -> str:
        """Its address."""
        return f"{_NETWORK}.{self.number}"

    def start(self) -> None:
        """Start the host with an empty memory, and connect it."""
        first = (sys.executable, "-m", "campaigns.tier.init", str(self.number), *self.modules)
        # Its processes die with the first one, and that one with this process.
        options = (*_NAMESPACES, "--fork", "--kill-child", "--mount-proc", "--propagation", "private")
        self._process = subprocess.Popen(
            ["/usr/bin/unshare", *options, "--", *first], env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        self._pid = self._find_first_process(self._process.pid)
        device = f"link{self.number}"
        run("ip", "link", "add", device, "type", "veth", "peer", "name", "eth0", "netns", str(self._pid))
        run("ip", "link", "set", device, "master", "switch", "up")
        self.execute("ip", "link", "set", "lo", "up")
        self.execute("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.execute("ip", "link", "set", "eth0", "up")
        shaping = ("root", "tbf", "rate", LINK, "burst", "512kb", "latency", "100ms")
        run("tc", "qdisc", "add", "dev", device, *shaping)
        self.execute("tc", "qdisc", "add", "dev", "eth0", *shaping)

    @staticmethod
    def _find_first_process(parent: int) -> int:
        children = Path(f"/proc/{parent}/task/{parent}/children")
        ends = time.monotonic() + 30
        while time.monotonic() < ends:
            if pids := children.read_text().split():
                return int(pids[0])
            time.sleep(0.01)
        raise TimeoutError("the host did not start")

    def wait_until_up(self) -> None:
        """Wait until it serves calls."""
        self.worker().close()

    def enter(self, *command: str) -> list[str]:
        """Return a command that runs another one on the host."""
        return ["nsenter", f"--target={self._pid}", *_NAMESPACES, "--", *command]

    def execute(self, *command: str) -> str:
        """Run a command on the host, and return what it printed."""
        return run(*self.enter(*command))

    def worker(self) -> Worker:
        """Start a process on the host that makes calls."""
        process = self._process
        return connect(self.address, PORT, 120.0, lambda: process is not None and process.poll() is None)

    @property
    def is_up(self) -> bool:
        """Whether it was started and not destroyed."""
        return self._process is not None

    @property
    def received_bytes(self) -> int:
        """The bytes that were sent to it over its link."""
        devices = dict(line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:])
        counters = {name.strip(): values.split() for name, values in devices.items()}
        return int(counters[f"link{self.number}"][8])  # what its end on the bridge has transmitted

    def destroy(self) -> None:
        """End the host as a power failure does: no process and no connection can tell others."""
        if self._process is None:
            return
        run("ip", "link", "delete", f"link{self.number}")
        self._process.kill()
        self._process.wait()
        os.waitpid(self._pid, 0)  # it has become a child of this process, the first one of its namespace
        self._process = None


@contextmanager
def running_hosts(count: int, modules: Sequence[str] = ()) -> Iterator[list[Host]]:
    """Start hosts, which import these modules once. At the end of the context they are destroyed."""
    create_network()
    hosts = [Host(number + 1, modules) for number in range(count)]
    try:
        for host in hosts:
            host.start()
        for host in hosts:
            host.wait_until_up()
        yield hosts
    finally:
        for host in hosts:
            host.destroy()
