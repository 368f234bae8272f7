"""What a process does to a disk, a frozen record for each operation, and the history that several ranks make."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import count
from typing import Any, NamedTuple

#: The folder that everything lies under, which is there before and durable.
ROOT = 0


@dataclass(frozen=True, slots=True)
class _Timed:
    """``begin`` and ``end`` are nanoseconds of the host's monotonic clock, around the system call.

    Files and folders are numbers, whatever their names: those of inodes as recorded, unique ones in a history.
    """

    begin: int = field(repr=False)
    end: int = field(repr=False)


@dataclass(frozen=True, slots=True)
class Make(_Timed):
    """A new file or folder, and its entry."""

    folder: int
    name: str
    node: int
    is_folder: bool


@dataclass(frozen=True, slots=True)
class Write(_Timed):
    """Bytes of a file."""

    node: int
    offset: int
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Resize(_Timed):
    """A file's size."""

    node: int
    size: int


@dataclass(frozen=True, slots=True)
class Sync(_Timed):
    """``fsync`` of a file, or of a folder."""

    node: int


@dataclass(frozen=True, slots=True)
class Move(_Timed):
    """An entry gets another name, which nothing had."""

    folder: int
    name: str
    node: int
    target_folder: int
    target_name: str


@dataclass(frozen=True, slots=True)
class Exchange(_Timed):
    """Two entries exchange their names."""

    folder: int
    name: str
    node: int
    target_folder: int
    target_name: str
    target_node: int


@dataclass(frozen=True, slots=True)
class Remove(_Timed):
    """An entry of a file or of a folder goes."""

    folder: int
    name: str
    node: int


Operation = Make | Write | Resize | Sync | Move | Exchange | Remove

#: The fields that hold files and folders.
_NODES = frozenset({"folder", "target_folder", "node", "target_node"})


class Log(NamedTuple):
    """What one rank recorded. ``begun`` and ``ended`` are the moments of each step that it took part in."""

    root: int
    operations: Sequence[Operation]
    begun: Mapping[int, int]
    ended: Mapping[int, int]


@dataclass(frozen=True)
class History:
    """What all ranks did, in the order in which it was done.

    ``begun`` is when the first rank began a step, ``acknowledged`` when the first one was told that it is done.
    """

    operations: tuple[Operation, ...]
    begun: tuple[int, ...]
    acknowledged: tuple[int, ...]


def merge(logs: Sequence[Log]) -> History:
    """One history of the logs of all ranks of one host."""
    ordered = sorted((one for log in logs for one in log.operations), key=operator.attrgetter("end"))
    steps = sorted(logs[0].begun)
    return History(
        _renumbered(ordered, logs[0].root),
        tuple(min(log.begun[step] for log in logs if step in log.begun) for step in steps),
        tuple(min(log.ended[step] for log in logs if step in log.ended) for step in steps),
    )


def _renumbered(operations: Sequence[Any], root: int) -> tuple[Operation, ...]:
    """Inodes are used again; here each file and folder has a number of its own."""
    numbers, known, found = count(ROOT + 1), {root: ROOT}, []
    for one in operations:
        if isinstance(one, Make):
            known[one.node] = next(numbers)
        nodes = {each.name: known[getattr(one, each.name)] for each in fields(one) if each.name in _NODES}
        found.append(replace(one, **nodes))
    return tuple(found)
