"""The first program of a host: it makes a writable root, loads modules, sets up the network, and serves calls.

It runs before the host's root is complete, so it uses the standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

_FINIT_MODULE = 313
_libc = ctypes.CDLL(None, use_errno=True)

#: An empty folder of this machine, which each host covers by a file system in memory.
_BASE = Path("/mnt")


def mount(source: str, target: str | Path, kind: str, options: str = "", flags: int = 0) -> None:
    """Mount a file system."""
    arguments = [os.fsencode(text) for text in (source, str(target), kind)]
    if _libc.mount(*arguments, flags, os.fsencode(options)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), f"{kind} at {target}")


def load_modules(folder: Path, names: list[str]) -> None:
    """Load kernel modules, and first those that they need."""
    needs = {}
    for line in (folder / "modules.dep").read_text().splitlines():
        module, _, others = line.partition(":")
        needs[module] = others.split()
    paths = {Path(module).stem: module for module in needs}
    for name in names:
        for module in (*reversed(needs[paths[name]]), paths[name]):
            fd = os.open(folder / module, os.O_RDONLY)
            if _libc.syscall(_FINIT_MODULE, fd, b"", 0) and ctypes.get_errno() != errno.EEXIST:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), module)
            os.close(fd)


def make_root(packages: str) -> None:
    """Lay the packages and a writable layer over this machine's root, which stays read-only, and enter it."""
    mount("none", _BASE, "tmpfs")
    for name in ("packages", "upper", "work", "root"):
        (_BASE / name).mkdir()
    root = _BASE / "root"
    mount("none", _BASE / "packages", "hostfs", packages)
    layers = f"lowerdir={_BASE}/packages:/,upperdir={_BASE}/upper,workdir={_BASE}/work"
    mount("none", root, "overlay", layers)
    os.chroot(root)
    os.chdir("/")
    mount("proc", "/proc", "proc")
    mount("sysfs", "/sys", "sysfs")
    mount("devtmpfs", "/dev", "devtmpfs")
    for folder in ("/dev/shm", "/run"):
        Path(folder).mkdir(exist_ok=True)
        mount("none", folder, "tmpfs")


def set_up_network(number: int) -> None:
    """Give the devices their addresses. All addresses have names, so that nothing asks a server of names."""
    hosts = [f"10.{network}.0.{host} host{host}.{network}\n" for network in (77, 78) for host in range(1, 33)]
    Path("/etc/hosts").write_text("127.0.0.1 localhost\n" + "".join(hosts))
    for command in (
        "link set lo up",
        f"address add 10.77.0.{number}/24 dev vec0",
        "link set vec0 up",
        f"address add 10.78.0.{number}/24 dev vec1",
        "link set vec1 up",
    ):
        subprocess.run(["ip", *command.split()], check=True)  # noqa: S607 - fixed commands


def print_by_pipe() -> None:
    """Let this process print through a pipe. The console is a terminal, on which rankless shows its progress."""
    reader, writer = os.pipe()
    subprocess.Popen(["cat"], stdin=reader)  # noqa: S607 - a fixed command
    for stream in (1, 2):
        os.dup2(writer, stream)


def main() -> None:
    """Set the host up. The agent's process is a child of this one, which collects ended processes."""
    started = time.monotonic()
    config = json.loads(Path(sys.argv[1]).read_text())
    os.environ["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"
    load_modules(Path(config["modules_folder"]), ["overlay", *config["modules"]])
    make_root(config["root"])
    _libc.sethostname(config["name"].encode(), len(config["name"]))
    set_up_network(config["number"])
    print(f"{config['name']} is up after {time.monotonic() - started:.1f} s", flush=True)
    if not os.fork():
        os.chdir(config["repository"])
        print_by_pipe()
        os.environ["PYTHONPATH"] = f"{config['repository']}/src"
        agent = [sys.executable, "-m", "campaigns.hosts.agent", str(config["number"]), *config["preload"]]
        os.execv(sys.executable, agent)  # noqa: S606 - the agent
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(1)


if __name__ == "__main__":
    main()
