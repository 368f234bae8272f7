"""The number of files that may be open at a time."""

from __future__ import annotations

import resource
from pathlib import Path

#: The most files that one reader or writer of many files keeps open.
_MOST = 192

#: The part of what the process may still open that one reader or writer takes: each file has up to two descriptors,
#: and a conversion, or two saves at a time, have several readers and writers.
_SHARE = 8


def max_open_files() -> int:
    """Return how many files one reader or writer of many files may keep open, each with up to two descriptors.

    It depends on the limit of the process (``ulimit -n``), which is 1,024 on most systems, and on what the process has
    open now: a job of many ranks has hundreds of sockets.
    """
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == resource.RLIM_INFINITY:
        return _MOST
    open_now = sum(1 for _ in Path("/dev/fd").iterdir())
    return max(1, min(_MOST, (soft_limit - open_now) // _SHARE))
