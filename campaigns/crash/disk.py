"""A model of the states that a disk may have after a crash, given the weak guarantees of POSIX for unsynced data.

It follows ALICE (Pillai et al., *All File Systems Are Not Created Equal*, OSDI 2014), and is weaker than ext4, XFS or
Btrfs. ``fsync`` of a file persists its bytes and its size, but not its directory entry; ``fsync`` of a directory
persists its entries. Any other operation that was begun may be persistent or lost, independently of the others, and its
bytes may be there in part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

from campaigns.crash.image import WHOLE, DiskImage, SurvivingPart, Tree
from campaigns.crash.operations import Create, Exchange, History, Link, Operation, Remove, Rename, Sync

#: The unsynced operations that survive, by their index in the history, each with the part that survives.
Choice = Mapping[int, SurvivingPart]


class Disk:
    """A history, and the conditions under which each operation is durable."""

    def __init__(self, history: History) -> None:
        self.operations = history.operations
        self._syncs: dict[int, list[Sync]] = defaultdict(list)
        for operation in self.operations:
            if isinstance(operation, Sync):
                self._syncs[operation.node].append(operation)
        self._durable = [self._find_durable_time(operation) for operation in self.operations]

    def list_unsynced(self, moment: int) -> list[int]:
        """Return the operations that were begun, but that no finished sync has made durable."""
        return [
            place
            for place, operation in enumerate(self.operations)
            if operation.begin <= moment < self._durable[place] and not isinstance(operation, Sync)
        ]

    def build_tree(self, moment: int, choice: Choice) -> Tree:
        """Return the tree after a crash at a moment: all durable operations, and the chosen unsynced ones."""
        image = DiskImage()
        for place, operation in enumerate(self.operations):
            if self._durable[place] <= moment:
                image.apply(operation, WHOLE)
            elif place in choice:
                image.apply(operation, choice[place])
        return image.build_tree()

    def find_prerequisites(self, place: int) -> Iterator[int]:
        """Yield the operations that created the files and directories of an operation, and their parents."""
        wanted = {self.operations[place].node, *_list_changed_directories(self.operations[place])}
        for earlier in range(place - 1, -1, -1):
            operation = self.operations[earlier]
            if isinstance(operation, Create) and operation.node in wanted:
                wanted.add(operation.folder)
                yield earlier

    def _find_durable_time(self, operation: Operation) -> float:
        """Return the end of the first sync that began after the operation; of both directories if there are two."""
        objects = _list_changed_directories(operation) or {operation.node}
        return max(self._find_sync_end(node, operation.end) for node in objects)

    def _find_sync_end(self, node: int, done: int) -> float:
        return min((sync.end for sync in self._syncs[node] if sync.begin >= done), default=math.inf)


def replay_history(history: History) -> Tree:
    """Return the tree if no operation is lost."""
    image = DiskImage()
    for operation in history.operations:
        image.apply(operation, WHOLE)
    return image.build_tree()


def _list_changed_directories(operation: Operation) -> set[int]:
    """Return the directories whose entries an operation changes."""
    if isinstance(operation, Create | Link | Remove):
        return {operation.folder}
    if isinstance(operation, Rename | Exchange):
        return {operation.folder, operation.target_folder}
    return set()
