"""A low limit of open files for this process."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def count_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def few_open_files(further: int) -> Iterator[None]:
    """Let this process open at most ``further`` files in addition to those that it has open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(further)]
    for number in opened:
        os.close(number)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(opened) + 1, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
