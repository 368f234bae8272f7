"""What a disk may hold after a crash: the weak model that POSIX allows, of what was not synced.

After ALICE (Pillai et al., *All File Systems Are Not Created Equal*, OSDI 2014), and weaker than ext4, XFS or Btrfs
are: ``fsync`` of a file keeps its bytes and its size, and not its entry; ``fsync`` of a folder keeps its entries. All
else that was begun may be there or not, each operation by itself, and bytes may be there in part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

from campaigns.crash.image import WHOLE, Form, Image, Tree
from campaigns.crash.operations import Exchange, History, Make, Move, Operation, Remove, Sync

#: What is there, by the operation's place in the history, of what was not synced.
Choice = Mapping[int, Form]


class Disk:
    """A history, and what each operation needs to be durable."""

    def __init__(self, history: History) -> None:
        self.operations = history.operations
        self._syncs: dict[int, list[Sync]] = defaultdict(list)
        for one in self.operations:
            if isinstance(one, Sync):
                self._syncs[one.node].append(one)
        self._durable = [self._durable_from(one) for one in self.operations]

    def unsynced(self, moment: int) -> list[int]:
        """The operations that were begun, of which no sync that has ended promises anything."""
        return [
            place
            for place, one in enumerate(self.operations)
            if one.begin <= moment < self._durable[place] and not isinstance(one, Sync)
        ]

    def after(self, moment: int, choice: Choice) -> Tree:
        """What is there after a crash at a moment: all that is durable, and what was chosen of the rest."""
        image = Image()
        for place, one in enumerate(self.operations):
            if self._durable[place] <= moment:
                image.apply(one, WHOLE)
            elif place in choice:
                image.apply(one, choice[place])
        return image.tree()

    def needs(self, place: int) -> Iterator[int]:
        """What made the files and folders of an operation, and those that they are in."""
        wanted = {self.operations[place].node, *_folders(self.operations[place])}
        for earlier in range(place - 1, -1, -1):
            one = self.operations[earlier]
            if isinstance(one, Make) and one.node in wanted:
                wanted.add(one.folder)
                yield earlier

    def _durable_from(self, one: Operation) -> float:
        """The end of the first sync that began when this was done; of each folder where there are two."""
        objects = _folders(one) or {one.node}
        return max(self._synced(node, one.end) for node in objects)

    def _synced(self, node: int, done: int) -> float:
        return min((sync.end for sync in self._syncs[node] if sync.begin >= done), default=math.inf)


def replay(history: History) -> Tree:
    """What is there when nothing is lost."""
    image = Image()
    for one in history.operations:
        image.apply(one, WHOLE)
    return image.tree()


def _folders(one: Operation) -> set[int]:
    """The folders whose entries an operation changes."""
    if isinstance(one, Make | Remove):
        return {one.folder}
    if isinstance(one, Move | Exchange):
        return {one.folder, one.target_folder}
    return set()
