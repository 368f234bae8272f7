"""Debian packages, unpacked into a folder: nothing is installed on this machine. Campaigns with daemons call it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from campaigns.common.programs import run

#: A merged /usr has links of these names, which a package's folder must not hide.
_MERGED = ("bin", "sbin", "lib", "lib64")


def unpack_packages(folder: Path, packages: Sequence[str]) -> Path:
    """Download and unpack packages with apt and dpkg, as this machine's sources of packages say.

    Return the folder whose tree is that of the packages, with a merged ``/usr``. What was unpacked before is replaced.
    """
    archives, root = folder / "archives", folder / "root"
    archives.mkdir(parents=True, exist_ok=True)
    run("apt-get", "download", *packages, cwd=archives)
    shutil.rmtree(root, ignore_errors=True)
    unpacked = folder / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    for archive in sorted(archives.glob("*.deb")):
        run("dpkg", "-x", str(archive), str(unpacked))
    for name in _MERGED:
        if (unpacked / name).is_dir():
            shutil.copytree(unpacked / name, unpacked / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(unpacked / name)
    unpacked.rename(root)
    return root
