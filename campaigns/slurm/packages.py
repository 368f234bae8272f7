"""The Debian packages of Slurm and MUNGE, unpacked, and laid over the file system of this process's namespace."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from campaigns.common.debian_packages import unpack_packages
from campaigns.common.programs import run

#: Where the packages are unpacked if no other folder is given.
DEFAULT_FOLDER = Path.home() / ".cache" / "rankless-slurm"

PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins"),
    *("munge", "libmunge2", "libhwloc15", "libnuma1", "libjson-c5", "liblua5.1-0", "libdbus-1-3"),
)

#: Programs that this machine must have: ``iproute2``, ``util-linux``.
PROGRAMS = ("ip", "nsenter", "mount")

#: The programs that have these names by an alternative of Debian, which an unpacked package does not set.
_ALTERNATIVES = ("slurmctld", "slurmd", "slurmstepd")


def download_packages(folder: Path) -> None:
    """Download and unpack the packages."""
    root = unpack_packages(folder, PACKAGES)
    for name in _ALTERNATIVES:
        (root / "usr/sbin" / name).symlink_to(f"{name}-wlm")
    for plugin in root.glob("usr/lib/*/slurm-wlm/mpi_pmix*"):  # they need a library that nothing here uses
        plugin.unlink()


def missing_parts(folder: Path) -> list[str]:
    """Return why the cluster cannot run here, one reason a line; nothing if it can."""
    reasons = ["it needs root (for namespaces and mounts)"] if os.geteuid() else []
    reasons += [f"the program {name} is missing" for name in PROGRAMS if shutil.which(name) is None]
    if not (folder / "root/usr/sbin/slurmctld").exists():
        reasons.append(f"the packages are not in {folder}: run python -m campaigns.slurm setup")
    return reasons


def lay_over(folder: Path, scratch: Path) -> None:
    """Mount the tree of the packages over ``/usr`` and ``/etc``, in the mount namespace of this process."""
    for name in ("usr", "etc"):
        upper, work = scratch / f"{name}-upper", scratch / f"{name}-work"
        upper.mkdir()
        work.mkdir()
        layers = f"lowerdir={folder / 'root' / name}:/{name},upperdir={upper},workdir={work}"
        run("mount", "-t", "overlay", "overlay", "-o", layers, f"/{name}")
