"""The number of files that may be open at a time.

The pools of readers and writers, and :mod:`rankless.engine.io.write` ask it on each rank.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

#: The most files that one reader or writer of many files keeps open.
_MOST = 192

#: One reader or writer takes this part of the files that the process may still open: each file has up to two
#: descriptors, and a conversion, or two saves at a time, have several readers and writers.
_SHARE = 8

#: Where macOS and Linux show the open files of a process. A root of Linux without udev may lack the first one.
_DESCRIPTORS = (Path("/dev/fd"), Path("/proc/self/fd"))


def max_open_files() -> int:
    """Return how many files one reader or writer of many files may keep open, each with up to two descriptors.

    It depends on the limit of the process (``ulimit -n``), which is 1,024 on most systems, and on the files that the
    process has open now: a job of many ranks has hundreds of sockets.
    """
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == resource.RLIM_INFINITY:
        return _MOST
    open_now = next((len(os.listdir(folder)) for folder in _DESCRIPTORS if folder.is_dir()), 0)  # noqa: PTH208 - quick
    return max(1, min(_MOST, (soft_limit - open_now) // _SHARE))
