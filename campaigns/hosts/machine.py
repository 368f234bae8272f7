"""A host: a User Mode Linux kernel as a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from campaigns.hosts import network
from campaigns.hosts.packages import Packages
from campaigns.hosts.workers import PORT, Worker, connect

#: The folder that has the package ``campaigns``.
REPOSITORY = Path(__file__).parents[2]

_INIT = Path(__file__).with_name("init.py")


@dataclass(frozen=True)
class HostSpec:
    """What a host is: its name, its number on the networks, its memory, its kernel modules, its disk."""

    name: str
    number: int
    modules: tuple[str, ...]
    memory: str = "1200M"
    disk: str = ""
    preload: tuple[str, ...] = ()


@dataclass
class Machine:
    """A running host."""

    spec: HostSpec
    packages: Packages
    scratch: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def address(self) -> str:
        """The address on the data network."""
        return f"{network.DATA}.{self.spec.number}"

    @property
    def log(self) -> Path:
        """The file of the kernel's messages."""
        return self.scratch / f"{self.spec.name}.log"

    def start(self) -> None:
        """Start the kernel. It serves calls after some seconds: see :meth:`worker`."""
        config = self.scratch / f"{self.spec.name}.json"
        facts = {"root": str(self.packages.root), "modules_folder": str(self.packages.modules)}
        config.write_text(json.dumps(asdict(self.spec) | facts | {"repository": str(REPOSITORY)}))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(config), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _command(self, config: Path) -> list[str]:
        devices = [
            f"vec{place}:transport=tap,ifname={network.link_name(name, self.spec.number)},depth=128,gro=1"
            for place, name in enumerate(("data", "control"))
        ]
        disk = [f"ubd0={self.spec.disk}"] if self.spec.disk else []
        return [
            str(self.packages.kernel),
            f"mem={self.spec.memory}",
            f"umid={self.spec.name}",
            f"uml_dir={self.scratch}",
            *("rootfstype=hostfs", "rootflags=/", "ro", "con=null", "con0=null,fd:1", "panic=-1"),
            *devices,
            *disk,
            *(f"init={sys.executable}", "--", "-S", str(_INIT), str(config)),
        ]

    def worker(self, seconds: float = 600.0) -> Worker:
        """Start a process on the host that makes calls. Wait for the host to be up."""
        return connect(f"{network.CONTROL}.{self.spec.number}", PORT, seconds, self.is_running)

    def is_running(self) -> bool:
        """Return whether the kernel runs."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """End the host at once, as a power failure does."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def stop(self) -> None:
        """Stop the kernel: the host does nothing, and its clock stands still."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a stopped kernel go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            os.kill(self._process.pid, number)
