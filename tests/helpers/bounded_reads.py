"""Reads of a whole checkpoint, and a bound for the memory of a call."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import rankless
from rankless.errors import CorruptCheckpointError

#: What a refusal may take of memory: a few buffers, and no more.
MEMORY_LIMIT = 2**30


@contextmanager
def limit_memory() -> Iterator[None]:
    """What asks for more than :data:`ROOM` beside what there is gets a ``MemoryError``."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_LIMIT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def read_checkpoint(folder: Path) -> None:
    """Open a checkpoint and read everything in it."""
    opened = rankless.open(folder)
    for name in opened:
        opened[name]
    assert opened.values is not None
    for check in opened.verify():
        if check.problem is not None:
            raise CorruptCheckpointError(check.problem)
