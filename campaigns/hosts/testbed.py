"""The test bed: one host that serves files, and clients, which end with the process that started them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from campaigns.common.programs import run
from campaigns.hosts import guest, network
from campaigns.hosts.machine import HostSpec, Machine
from campaigns.hosts.packages import Packages

_SERVER_MODULES = ("nfsd", "nfsv4", "nfsv3")
_CLIENT_MODULES = ("nfsv4", "nfsv3", "fuse", "9pnet_fd", "9p")
_SERVER_NUMBER, _FIRST_CLIENT = 2, 11

#: The kinds of mounts that the test bed knows.
KINDS = ("nfs4.2", "nfs3", "9p", "9p-loose", "fuse", "fuse-writeback")


def mount_point(kind: str) -> Path:
    """Return where clients mount a kind."""
    return guest.MOUNTS / kind


def _mount(kind: str, server: str, mirror: Path, nfs_options: Sequence[str]) -> str:
    target = mount_point(kind)
    if kind.startswith("nfs"):
        return guest.mount_nfs(server, kind.removeprefix("nfs"), target, nfs_options)
    if kind.startswith("9p"):
        return guest.mount_9p(server, target, "loose" if kind == "9p-loose" else "none")
    source = guest.MOUNTS / f"{kind}-source"  # the mirror's own view of the server
    guest.mount_nfs(server, "4.2", source)
    options = "cache=auto,writeback" if kind == "fuse-writeback" else "cache=auto,no_writeback"
    return guest.mount_fuse(mirror, source, target, options)


@dataclass
class Testbed:
    """The running hosts. ``first_seed`` is for scenes that draw histories."""

    packages: Packages
    scratch: Path
    server: Machine
    clients: list[Machine]
    nfs_options: Sequence[str] = ()
    first_seed: int = 0
    mounted: list[str] = field(default_factory=list)

    def mount(self, *kinds: str) -> None:
        """Mount the server's folder on all clients at :func:`mount_point`, in each of these :data:`KINDS`."""
        self.mounted += kinds
        for client in self.clients:
            self._mount_on(client, kinds)

    def restart(self, client: Machine) -> None:
        """Boot a client that was killed, and mount what was mounted."""
        client.start()
        self._mount_on(client, self.mounted)

    def _mount_on(self, client: Machine, kinds: Iterable[str]) -> None:
        with client.worker() as worker:
            for kind in kinds:
                worker.call(_mount, kind, self.server.address, self.packages.mirror, self.nfs_options)

    def start_server(self) -> None:
        """Boot the server, and serve its disk."""
        self.server.start()
        with self.server.worker() as worker:
            worker.call(guest.start_nfs_server, "/dev/ubda")


@contextmanager
def running_testbed(
    folder: Path, clients: int, preload: Sequence[str], server_preload: Sequence[str], disk_gigabytes: int = 8
) -> Iterator[Testbed]:
    """Boot a server and clients, which import modules.

    At the end of the context they are ended at once, and their disks removed.
    """
    packages = Packages(folder)
    network.create_networks()
    scratch = Path(tempfile.mkdtemp(prefix="rankless-hosts-"))
    in_memory = Path(tempfile.mkdtemp(prefix="rankless-hosts-", dir="/dev/shm"))  # hosts cannot read this folder
    disk = in_memory / "disk"
    with disk.open("wb") as file:
        file.truncate(disk_gigabytes * 2**30)
    run("mkfs.ext4", "-q", "-F", str(disk))
    specs = [HostSpec("server", _SERVER_NUMBER, _SERVER_MODULES, "512M", str(disk), tuple(server_preload))]
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
        shutil.rmtree(in_memory)
        shutil.rmtree(scratch)
