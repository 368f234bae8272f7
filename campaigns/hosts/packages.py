"""The Debian packages of the test bed, unpacked into a folder: nothing is installed on this machine."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from campaigns.common.debian_packages import unpack_packages
from campaigns.common.programs import run

#: Where the packages are unpacked if no other folder is given.
DEFAULT_FOLDER = Path.home() / ".cache" / "rankless-hosts"

#: The kernel; the user-space part of NFS with its libraries; FUSE; a server of 9p with its libraries.
PACKAGES = (
    "user-mode-linux",
    *("nfs-kernel-server", "nfs-common", "rpcbind", "libtirpc3", "libtirpc-common", "keyutils"),
    *("libevent-core-2.1-7", "libnfsidmap1"),
    *("libfuse3-3", "libfuse3-dev"),
    *("diod", "liblua5.1-0", "libmunge2", "libwrap0"),
)

#: Programs that this machine must have: ``iproute2``, ``util-linux``, ``e2fsprogs``, ``gcc``.
PROGRAMS = ("ip", "tc", "unshare", "mkfs.ext4", "gcc")


@dataclass(frozen=True)
class Packages:
    """The unpacked packages."""

    folder: Path

    @property
    def root(self) -> Path:
        """The folder whose tree is laid over the root of each host."""
        return self.folder / "root"

    @property
    def kernel(self) -> Path:
        """The program that is a kernel."""
        return self.root / "usr/bin/linux.uml"

    @property
    def modules(self) -> Path:
        """The folder of the kernel's modules."""
        return next((self.root / "usr/lib/uml/modules").iterdir())

    @property
    def mirror(self) -> Path:
        """The program of a FUSE file system that mirrors a folder, with a write-back cache if told so."""
        return self.folder / "mirror"

    @property
    def fuse_examples(self) -> Path:
        """The folder of libfuse's examples, one of which mirrors a folder with a write-back cache."""
        return self.root / "usr/share/doc/libfuse3-dev/examples"


def download_packages(folder: Path) -> None:
    """Download and unpack the packages, and build the file system of FUSE."""
    unpack_packages(folder, PACKAGES)
    _build_mirror(Packages(folder))


def _build_mirror(packages: Packages) -> None:
    source = packages.fuse_examples / "passthrough_ll.c"
    headers, libraries = packages.root / "usr/include/fuse3", packages.root / "usr/lib/x86_64-linux-gnu"
    libfuse = f"-l:{next(libraries.glob('libfuse3.so.3*')).name}"
    run("gcc", "-O2", f"-I{headers}", str(source), f"-L{libraries}", libfuse, "-o", str(packages.mirror))


def missing_parts(folder: Path) -> list[str]:
    """Return why the test bed cannot run here, one reason a line; nothing if it can."""
    reasons = []
    if os.geteuid():
        reasons.append("it needs root (for a network namespace, network devices and mounts)")
    if not Path("/dev/net/tun").exists():
        reasons.append("there is no /dev/net/tun")
    reasons += [f"the program {name} is missing" for name in PROGRAMS if shutil.which(name) is None]
    if not Packages(folder).kernel.exists():
        reasons.append(f"the packages are not in {folder}: run python -m campaigns.hosts setup")
    return reasons
