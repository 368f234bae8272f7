"""The memory that the cgroup of this process may still use.

The pages of a file in memory count for the cgroup that touched them first. A process that touches more than its cgroup
may have is killed, so they are counted before.

:mod:`rankless.engine.io.staging_memory` and :mod:`rankless.storage.mapped_file` ask it on each rank before they take
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

#: The cgroups of this process, and where their files are.
_SELF, _ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")

#: The entries of ``memory.stat`` that count pages which the kernel takes back when it needs memory.
_RECLAIMABLE = {"inactive_file", "active_file", "total_inactive_file", "total_active_file"}


def free_cgroup_bytes() -> int | None:
    """Return the bytes that the cgroups of this process have left, or ``None`` if they have no limit."""
    rooms = [room for folder in _memory_cgroups() if (room := _free_in(folder)) is not None]
    return min(rooms, default=None)


def _memory_cgroups() -> Iterator[Path]:
    """Yield the folders of the memory cgroups of this process, from its own one to the root.

    For example, ``/sys/fs/cgroup/job`` and ``/sys/fs/cgroup``.
    """
    try:
        lines = _SELF.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, name = line.split(":", 2)
        if number == "0" and not controllers:
            root = _ROOT
        elif "memory" in controllers.split(","):
            root = _ROOT / "memory"
        else:
            continue
        own = root / name.lstrip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))


def _free_in(folder: Path) -> int | None:
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # no such file, or "max"
            limit = int((folder / limit_name).read_text(encoding="ascii"))
            usage = int((folder / usage_name).read_text(encoding="ascii"))
            return max(0, limit - usage + _reclaimable_bytes(folder))
    return None


def _reclaimable_bytes(folder: Path) -> int:
    with suppress(OSError, ValueError):
        entries = (line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        counts = {name: int(value) for name, value in entries}
        names = {name.removeprefix("total_") for name in _RECLAIMABLE}
        return sum(counts.get(f"total_{name}", counts.get(name, 0)) for name in names)
    return 0
