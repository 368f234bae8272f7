"""A shared disk of limited speed: a file with ext4 behind a loop device, which all hosts have mounted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from campaigns.common.programs import run

#: The bytes that the disk reads, and those that it writes, in a second.
DISK_BYTES = 250e6

_SECTOR = 512


@dataclass(frozen=True)
class Disk:
    """A mounted disk."""

    path: Path
    device: str

    @property
    def read_bytes(self) -> int:
        """The bytes that were read from it so far. What comes from the page cache does not count."""
        return int(Path(f"/sys/block/{Path(self.device).name}/stat").read_text().split()[2]) * _SECTOR

    def limit(self, rate: float) -> None:
        """Limit its rate of reads and of writes; 0 is no limit."""
        number = Path(self.device).stat().st_rdev
        for name in ("read", "write"):
            limits = _find_cgroup() / f"blkio.throttle.{name}_bps_device"
            limits.write_text(f"{os.major(number)}:{os.minor(number)} {rate:.0f}\n")

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Let all calls that change it wait, until the end of the context."""
        run("fsfreeze", "--freeze", str(self.path))
        try:
            yield
        finally:
            run("fsfreeze", "--unfreeze", str(self.path))


def _find_cgroup() -> Path:
    """Return the folder of this process's cgroup for block devices."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "blkio":
            return Path("/sys/fs/cgroup/blkio", path.lstrip("/"))
    raise RuntimeError("disks can be limited with cgroups of version 1 only")


@contextmanager
def mounted_disk(folder: Path, gigabytes: int = 16) -> Iterator[Disk]:
    """Make a disk in a folder, and mount it in this process's mount namespace."""
    image, path = folder / "disk.image", folder / "disk"
    path.mkdir()
    with image.open("wb") as file:
        file.truncate(gigabytes * 2**30)
    run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard", str(image))
    device = run("losetup", "--find", "--show", "--direct-io=on", str(image)).strip()
    disk = Disk(path, device)
    try:
        run("mount", "-t", "ext4", device, str(path))
        run("losetup", "--detach", device)  # as soon as it is unmounted, even if this process is killed
        disk.limit(DISK_BYTES)
        yield disk
    finally:
        with suppress(OSError):
            disk.limit(0)
        run("umount", "--lazy", str(path))
        image.unlink()
