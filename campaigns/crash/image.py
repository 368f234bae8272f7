"""The contents of a disk: numbered directories and files, changed by operations in whole or in part."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from campaigns.crash.operations import (
    ROOT,
    Clone,
    Create,
    Exchange,
    Link,
    Operation,
    Remove,
    Rename,
    Resize,
    Write,
)


@dataclass(frozen=True, slots=True)
class SurvivingPart:
    """The part of a write that survives.

    ``zeros`` and ``noise``: the size is there, with zeros or random bytes as the data. ``torn``: some of the sectors of
    ``sector`` bytes survive. ``cut``: the first ones survive, and the size up to there.
    """

    kind: Literal["whole", "zeros", "noise", "torn", "cut"] = "whole"
    sector: int = 512
    seed: int = 0


WHOLE = SurvivingPart()

#: ``{path: bytes}`` of files; ``None`` for a directory.
Tree = dict[str, bytes | None]


class DiskImage:
    """Directories and files by number. An operation changes an entry only if that is in the state it was applied to."""

    def __init__(self) -> None:
        self._folders: dict[int, dict[str, int]] = {ROOT: {}}
        self._files: dict[int, bytearray] = {}

    def apply(self, operation: Operation, part: SurvivingPart) -> None:
        """Apply an operation; of a write, the part that survives."""
        match operation:
            case Clone():
                self._clone(operation)
            case Write():
                _apply_write(self._files.setdefault(operation.node, bytearray()), operation, part)
            case Resize():
                _set_size(self._files.setdefault(operation.node, bytearray()), operation.size)
            case _:
                self._apply_to_entries(operation)

    def _apply_to_entries(self, operation: Operation) -> None:
        match operation:
            case Create():
                self._create(operation)
            case Link():
                self._entries(operation.folder).setdefault(operation.name, operation.node)
            case Remove():
                if self._entries(operation.folder).get(operation.name) == operation.node:
                    del self._entries(operation.folder)[operation.name]
            case Rename():
                self._rename(operation)
            case Exchange():
                self._exchange(operation)
            case _:
                pass

    def build_tree(self) -> Tree:
        """Return the files and directories that are reachable from the root."""
        return dict(self._walk(ROOT, ""))

    def _create(self, operation: Create) -> None:
        if operation.is_folder:
            self._folders.setdefault(operation.node, {})
        else:
            self._files.setdefault(operation.node, bytearray())
        self._entries(operation.folder).setdefault(operation.name, operation.node)

    def _clone(self, operation: Clone) -> None:
        content = self._files.setdefault(operation.node, bytearray())
        if len(content) < operation.stop:
            _set_size(content, operation.stop)
        content[operation.start : operation.stop] = self._files[operation.source][operation.start : operation.stop]

    def _rename(self, operation: Rename) -> None:
        source, target = self._entries(operation.folder), self._entries(operation.target_folder)
        if source.get(operation.name) == operation.node and operation.target_name not in target:
            target[operation.target_name] = source.pop(operation.name)

    def _exchange(self, operation: Exchange) -> None:
        source, target = self._entries(operation.folder), self._entries(operation.target_folder)
        if source.get(operation.name) == operation.node and target.get(operation.target_name) == operation.target_node:
            source[operation.name], target[operation.target_name] = operation.target_node, operation.node

    def _entries(self, folder: int) -> dict[str, int]:
        # If the entry of a directory is lost, its own entries stay, but they cannot be reached.
        return self._folders.setdefault(folder, {})

    def _walk(self, folder: int, prefix: str) -> Iterator[tuple[str, bytes | None]]:
        for name, node in self._folders[folder].items():
            if node in self._folders:
                yield prefix + name, None
                yield from self._walk(node, f"{prefix}{name}/")
            else:
                yield prefix + name, bytes(self._files[node])


def _set_size(content: bytearray, size: int) -> None:
    del content[size:]
    content.extend(bytes(size - len(content)))


def _apply_write(content: bytearray, operation: Write, part: SurvivingPart) -> None:
    stop = operation.offset + len(operation.data)
    source = random.Random(part.seed)
    if part.kind == "cut":
        sectors = range(operation.offset // part.sector, -(-stop // part.sector))
        stop = max(operation.offset, min(stop, source.choice(sectors or [0]) * part.sector))
    if len(content) < stop:
        _set_size(content, stop)
    data = operation.data[: stop - operation.offset]
    match part.kind:
        case "whole" | "cut":
            content[operation.offset : stop] = data
        case "zeros":
            content[operation.offset : stop] = bytes(len(data))
        case "noise":
            content[operation.offset : stop] = source.randbytes(len(data))
        case "torn":
            _tear_sectors(content, operation.offset, data, part.sector, source)


def _tear_sectors(content: bytearray, offset: int, data: bytes, sector: int, source: random.Random) -> None:
    """Choose for each sector between the old and the new bytes."""
    at = offset
    while at < offset + len(data):
        stop = min(offset + len(data), (at // sector + 1) * sector)
        if source.random() < 0.5:
            content[at:stop] = data[at - offset : stop - offset]
        at = stop
