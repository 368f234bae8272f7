"""The test bed: one host that serves files, and clients, which end with the process that started them."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from campaigns.hosts import guest, network
from campaigns.hosts.commands import run
from campaigns.hosts.machine import HostSpec, Machine
from campaigns.hosts.packages import Packages

_SERVER_MODULES = ("nfsd", "nfsv4", "nfsv3")
_CLIENT_MODULES = ("nfsv4", "nfsv3", "fuse", "9pnet_fd", "9p")
_SERVER_NUMBER, _FIRST_CLIENT = 2, 11

#: Says that this process is in namespaces of its own.
_INSIDE = "--inside-namespace"


def enter_namespaces(arguments: Sequence[str]) -> None:
    """Run this command again in network, mount and process namespaces of its own.

    All hosts end with them, so nothing is left on the machine. Return if this process is in them already.
    """
    if _INSIDE in arguments:
        return
    command = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    os.execvp(command[0], [*command, sys.executable, "-m", "campaigns.hosts", _INSIDE, *arguments])  # noqa: S606


@dataclass
class Testbed:
    """The running hosts."""

    packages: Packages
    scratch: Path
    server: Machine
    clients: list[Machine]

    def start_server(self) -> None:
        """Boot the server, and serve its disk."""
        self.server.start()
        with self.server.worker() as worker:
            worker.call(guest.start_nfs_server, "/dev/ubda")


@contextmanager
def running_testbed(folder: Path, clients: int, preload: Sequence[str] = (), disk_gigabytes: int = 8) -> Iterator[Testbed]:
    """Boot a server and clients. At the end of the context they are ended at once, and their disks removed."""
    packages = Packages(folder)
    network.create_networks()
    scratch = Path(tempfile.mkdtemp(prefix="holdfast-hosts-"))
    disk = scratch / "disk"
    with disk.open("wb") as file:
        file.truncate(disk_gigabytes * 2**30)
    run("mkfs.ext4", "-q", "-F", str(disk))
    specs = [HostSpec("server", _SERVER_NUMBER, _SERVER_MODULES, "512M", str(disk))]
    specs += [
        HostSpec(f"client{place + 1}", _FIRST_CLIENT + place, _CLIENT_MODULES, preload=tuple(preload))
        for place in range(clients)
    ]
    machines = [Machine(spec, packages, scratch) for spec in specs]
    testbed = Testbed(packages, scratch, machines[0], machines[1:])
    try:
        for machine in machines:
            network.create_links(machine.spec.number)
        for client in testbed.clients:
            client.start()
        testbed.start_server()
        yield testbed
    finally:
        for machine in machines:
            machine.kill()
        if os.environ.get("KEEP") is None: shutil.rmtree(scratch)
