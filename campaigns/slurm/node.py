"""A node of the cluster: a ``slurmd`` with a network, processes, a name and memory of its own."""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from pathlib import Path

from campaigns.common.namespaces import NEW_MOUNTS, NEW_NAME, NEW_NETWORK, NEW_PROCESSES, unshare
from campaigns.common.programs import run, start

_BOOT_ID = "/proc/sys/kernel/random/boot_id"

#: The first three numbers of all addresses. The controller has 1.
NETWORK = "10.79.0"

#: A file system in memory for each node, like ``/dev/shm``: the disk that only this node has.
LOCAL = Path("/mnt")


class Node:
    """One node. ``start`` and ``crash`` may alternate."""

    def __init__(self, name: str, number: int, scratch: Path) -> None:
        self.name, self.address = name, f"{NETWORK}.{number}"
        self._link, self._scratch, self._pid = f"link{number}", scratch, 0

    def start(self) -> None:
        """Start the node and its ``slurmd``."""
        boot = self._scratch / f"{self.name}.boot"
        boot.write_text(f"{uuid.uuid4()}\n")
        read, write = os.pipe()
        launcher = os.fork()
        if not launcher:
            os.close(write)
            self._enter(boot, read)
        os.close(read)
        self._pid = launcher
        init = self._wait_for_init(launcher)
        run("ip", "link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", str(init))
        run("ip", "link", "set", self._link, "master", "cluster", "up")
        inside = ("nsenter", "--target", str(init), "--net", "ip")
        run(*inside, "link", "set", "lo", "up")
        run(*inside, "address", "add", f"{self.address}/24", "dev", "eth0")
        run(*inside, "link", "set", "eth0", "up")
        os.write(write, b"x")
        os.close(write)
        self._init = init

    @staticmethod
    def _wait_for_init(launcher: int) -> int:
        children = Path(f"/proc/{launcher}/task/{launcher}/children")
        for _ in range(500):
            if text := children.read_text().strip():
                return int(text)
            time.sleep(0.01)
        raise RuntimeError("the node has not started")

    def _enter(self, boot: Path, ready: int) -> None:
        """Enter the namespaces, and become the parent of the first process in them. Does not return."""
        try:
            unshare(NEW_MOUNTS | NEW_NAME | NEW_PROCESSES | NEW_NETWORK)
            child = os.fork()
            if child:
                os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
            os.read(ready, 1)  # until the network is there
            run("mount", "-t", "proc", "proc", "/proc")
            run("mount", "--bind", str(boot), _BOOT_ID)
            for folder in ("/dev/shm", str(LOCAL)):
                run("mount", "-t", "tmpfs", "-o", "size=2g", "tmpfs", folder)
            run("hostname", self.name)
            self._be_init()
        except BaseException as error:  # noqa: BLE001 - this process must not return into its caller's code
            print(f"{self.name}: {error!r}", file=sys.stderr)
        finally:
            os._exit(1)

    def _be_init(self) -> None:
        """Start the daemon, and reap all that ends in this namespace."""
        daemon = start("slurmd", "-D", "-N", self.name, log=self._scratch / f"{self.name}.out")
        while True:
            pid, _ = os.wait()
            if pid == daemon.pid:
                return

    def crash(self) -> None:
        """End all processes of the node at once, as if its power had failed."""
        os.kill(self._init, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def memory(self) -> Path:
        """Return the path of the ``/dev/shm`` of the node, as this process sees it."""
        return Path(f"/proc/{self._init}/root/dev/shm")

    def cut(self) -> None:
        """Cut the node off the network."""
        run("ip", "link", "set", self._link, "down")

    def connect(self) -> None:
        """End :meth:`cut`."""
        run("ip", "link", "set", self._link, "up")
