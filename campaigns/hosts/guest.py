"""Functions that run on a host: a server of files, mounts, and the host's clock."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

#: The folder that the server exports, and the folder of the clients' mounts.
_DISK = Path("/srv/disk")
EXPORT, MOUNTS = _DISK / "export", Path("/shared")

_USERS = ("_rpc", "statd")


def execute(command: str) -> str:
    """Run a command of the shell, and return what it printed. Raises ``RuntimeError`` if it fails."""
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command!r} failed with status {done.returncode}: {done.stderr or done.stdout}")
    return done.stdout


def start_rpc(statd_options: str = "--no-notify") -> None:
    """Start what NFS version 3 needs on servers and clients: the port mapper, and the monitor of locks."""
    with Path("/etc/passwd").open("a") as users:
        users.writelines(f"{name}:x:{800 + place}:65534::/:/bin/false\n" for place, name in enumerate(_USERS))
    for folder in ("/run/rpcbind", "/var/lib/nfs/sm", "/var/lib/nfs/sm.bak", "/var/lib/nfs/rpc_pipefs"):
        Path(folder).mkdir(parents=True, exist_ok=True)
    execute("rpcbind -w")
    execute(f"rpc.statd {statd_options}")


def start_nfs_server(device: str, lease_seconds: int = 10) -> None:
    """Mount the server's disk, and serve a folder of it by NFS 3, NFS 4.2 and 9p.

    The server's own records are on the disk too. After a restart it waits for ``lease_seconds`` for clients that
    reclaim their locks; the kernel's default is 90.
    """
    _DISK.mkdir(parents=True, exist_ok=True)
    execute(f"mount -t ext4 {device} {_DISK}")
    is_new = not EXPORT.exists()
    for folder in (EXPORT, _DISK / "nfs", Path("/var/lib/nfs")):
        folder.mkdir(parents=True, exist_ok=True)
    execute(f"mount --bind {_DISK}/nfs /var/lib/nfs")
    start_rpc("" if not is_new else "--no-notify")
    execute("mount -t nfsd nfsd /proc/fs/nfsd")
    for name in ("nfsv4leasetime", "nfsv4gracetime"):
        Path("/proc/fs/nfsd", name).write_text(f"{lease_seconds}\n")
    Path("/proc/sys/fs/nfs/nlm_grace_period").write_text(f"{lease_seconds}\n")
    Path("/etc/exports").write_text(f"{EXPORT} *(rw,no_root_squash,no_subtree_check,insecure,fsid=0)\n")
    Path("/var/lib/nfs/etab").touch()
    execute("exportfs -r")
    execute("rpc.mountd")
    execute("rpc.nfsd 8")
    if is_new:
        for name in ("nfsd/v4_end_grace", "lockd/nlm_end_grace"):
            Path("/proc/fs", name).write_text("Y\n")
    execute(
        f"setsid diod --foreground --no-auth --export {EXPORT} --listen 0.0.0.0:564 </dev/null >/dev/console 2>&1 &"
    )


def mount_nfs(server: str, version: str, target: Path, options: Iterable[str] = ()) -> str:
    """Mount the server's folder by NFS. Return the options that the kernel shows."""
    target.mkdir(parents=True)
    if version == "3":
        start_rpc()
    joined = ",".join((f"vers={version}", *options))
    exported = EXPORT if version == "3" else "/"  # the export is the root of the server's names in version 4
    execute(f"mount.nfs {server}:{exported} {target} -o {joined}")
    return mount_options(target)


def mount_9p(server: str, target: Path, cache: str) -> str:
    """Mount the server's folder by 9p, which writes back whole pages with ``cache="loose"``."""
    target.mkdir(parents=True)
    options = f"trans=tcp,version=9p2000.L,aname={EXPORT},cache={cache},uname=root,access=user"
    execute(f"mount -i -t 9p -o {options} {server} {target}")
    return mount_options(target)


def mount_fuse(program: Path, source: Path, target: Path, options: str) -> str:
    """Mirror a folder by libfuse's own example of a file system, which caches writes with ``options="writeback"``."""
    target.mkdir(parents=True)
    arguments = f"-f -o source={source} -o {options} -o allow_other {target}"
    execute(f"setsid {program} {arguments} </dev/null >/dev/console 2>&1 &")
    ends = time.monotonic() + 30
    while not mount_options(target):
        if time.monotonic() > ends:
            raise TimeoutError(f"{target} was not mounted")
        time.sleep(0.1)
    return mount_options(target)


def mount_options(target: Path) -> str:
    """Return the options of a mount, as the kernel shows them."""
    lines = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return next((f"{line[2]} {line[3]}" for line in reversed(lines) if line[1] == str(target)), "")


def set_clock_ahead(seconds: float) -> None:
    """Move this host's clock."""
    time.clock_settime(time.CLOCK_REALTIME, time.time() + seconds)
