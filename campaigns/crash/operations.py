"""Records of the disk operations of a process, and the history that several ranks produce."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import count
from typing import Any, NamedTuple

#: The root directory, which exists from the start and is durable.
ROOT = 0


@dataclass(frozen=True, slots=True)
class _TimedOperation:
    """A record with a start and an end, in nanoseconds of the host's monotonic clock, around the system call.

    Files and directories are numbers, independent of their names: inodes in a recorded log, unique numbers in a
    history.
    """

    begin: int = field(repr=False)
    end: int = field(repr=False)


@dataclass(frozen=True, slots=True)
class Create(_TimedOperation):
    """Creation of a file or directory, and of its entry."""

    folder: int
    name: str
    node: int
    is_folder: bool


@dataclass(frozen=True, slots=True)
class Link(_TimedOperation):
    """A further entry of a file."""

    folder: int
    name: str
    node: int


@dataclass(frozen=True, slots=True)
class Clone(_TimedOperation):
    """A range of a file that gets the bytes of another file at the same place."""

    node: int
    source: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Write(_TimedOperation):
    """A write of bytes to a file."""

    node: int
    offset: int
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Resize(_TimedOperation):
    """A change of a file's size."""

    node: int
    size: int


@dataclass(frozen=True, slots=True)
class Sync(_TimedOperation):
    """An ``fsync`` of a file or a directory."""

    node: int


@dataclass(frozen=True, slots=True)
class Rename(_TimedOperation):
    """A rename of an entry to a new name."""

    folder: int
    name: str
    node: int
    target_folder: int
    target_name: str


@dataclass(frozen=True, slots=True)
class Exchange(_TimedOperation):
    """An exchange of the names of two entries."""

    folder: int
    name: str
    node: int
    target_folder: int
    target_name: str
    target_node: int


@dataclass(frozen=True, slots=True)
class Remove(_TimedOperation):
    """The removal of an entry of a file or a directory."""

    folder: int
    name: str
    node: int


Operation = Create | Link | Clone | Write | Resize | Sync | Rename | Exchange | Remove

#: The fields that hold numbers of files and directories.
_NODES = frozenset({"folder", "target_folder", "node", "target_node", "source"})


class Log(NamedTuple):
    """The record of one rank. ``begun`` and ``ended`` are the times of each step that it took part in."""

    root: int
    operations: Sequence[Operation]
    begun: Mapping[int, int]
    ended: Mapping[int, int]


@dataclass(frozen=True)
class History:
    """The operations of all ranks, in the order in which they finished.

    ``begun`` is the time at which the first rank began a step, ``acknowledged`` the one at which a step first returned,
    and ``tidied`` the one at which it returned on rank 0, which removes old checkpoints while no other rank waits.
    """

    operations: tuple[Operation, ...]
    begun: tuple[int, ...]
    acknowledged: tuple[int, ...]
    tidied: tuple[int, ...]


def merge_logs(logs: Sequence[Log]) -> History:
    """Merge the logs of all ranks of one host, rank 0's first, into a history."""
    ordered = sorted((operation for log in logs for operation in log.operations), key=operator.attrgetter("end"))
    steps = sorted(logs[0].begun)
    return History(
        _renumber_nodes(ordered, logs[0].root),
        tuple(min(log.begun[step] for log in logs if step in log.begun) for step in steps),
        tuple(min(log.ended[step] for log in logs if step in log.ended) for step in steps),
        tuple(logs[0].ended[step] for step in steps),
    )


def _renumber_nodes(operations: Sequence[Any], root: int) -> tuple[Operation, ...]:
    """Give each file and directory a unique number, because inode numbers are reused."""
    numbers, known, renumbered = count(ROOT + 1), {root: ROOT}, []
    for operation in operations:
        if isinstance(operation, Create):
            known[operation.node] = next(numbers)
        nodes = {each.name: known[getattr(operation, each.name)] for each in fields(operation) if each.name in _NODES}
        renumbered.append(replace(operation, **nodes))
    return tuple(renumbered)
