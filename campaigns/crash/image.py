"""What a disk holds: folders and files by number, changed by one operation after another, in whole or in part."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from campaigns.crash.operations import ROOT, Exchange, Make, Move, Operation, Remove, Resize, Sync, Write


@dataclass(frozen=True, slots=True)
class Form:
    """How much of a write is there.

    ``zeros`` and ``noise``: the size, with nothing or anything in the place of the bytes. ``torn``: some of the sectors
    of ``sector`` bytes. ``cut``: the first ones, and the size so far.
    """

    kind: Literal["whole", "zeros", "noise", "torn", "cut"] = "whole"
    sector: int = 512
    seed: int = 0


WHOLE = Form()

#: ``{path: bytes}`` of files; ``None`` for a folder.
Tree = dict[str, bytes | None]


class Image:
    """Folders and files by number. An entry changes only where it is what the operation found."""

    def __init__(self) -> None:
        self._folders: dict[int, dict[str, int]] = {ROOT: {}}
        self._files: dict[int, bytearray] = {}

    def apply(self, one: Operation, form: Form) -> None:
        """Do it; of a write, as much as the form says."""
        match one:
            case Make():
                self._make(one)
            case Write():
                _write(self._files.setdefault(one.node, bytearray()), one, form)
            case Resize():
                _resize(self._files.setdefault(one.node, bytearray()), one.size)
            case Remove():
                if self._entries(one.folder).get(one.name) == one.node:
                    del self._entries(one.folder)[one.name]
            case Move():
                self._move(one)
            case Exchange():
                self._exchange(one)
            case Sync():
                pass

    def tree(self) -> Tree:
        """What can be reached from the root."""
        return dict(self._below(ROOT, ""))

    def _make(self, one: Make) -> None:
        if one.is_folder:
            self._folders.setdefault(one.node, {})
        else:
            self._files.setdefault(one.node, bytearray())
        self._entries(one.folder).setdefault(one.name, one.node)

    def _move(self, one: Move) -> None:
        source, target = self._entries(one.folder), self._entries(one.target_folder)
        if source.get(one.name) == one.node and one.target_name not in target:
            target[one.target_name] = source.pop(one.name)

    def _exchange(self, one: Exchange) -> None:
        source, target = self._entries(one.folder), self._entries(one.target_folder)
        if source.get(one.name) == one.node and target.get(one.target_name) == one.target_node:
            source[one.name], target[one.target_name] = one.target_node, one.node

    def _entries(self, folder: int) -> dict[str, int]:
        # Of a folder whose own entry is lost, the entries are kept all the same: nobody can reach them.
        return self._folders.setdefault(folder, {})

    def _below(self, folder: int, prefix: str) -> Iterator[tuple[str, bytes | None]]:
        for name, node in self._folders[folder].items():
            if node in self._folders:
                yield prefix + name, None
                yield from self._below(node, f"{prefix}{name}/")
            else:
                yield prefix + name, bytes(self._files[node])


def _resize(content: bytearray, size: int) -> None:
    del content[size:]
    content.extend(bytes(size - len(content)))


def _write(content: bytearray, one: Write, form: Form) -> None:
    stop = one.offset + len(one.data)
    source = random.Random(form.seed)
    if form.kind == "cut":
        sectors = range(one.offset // form.sector, -(-stop // form.sector))
        stop = max(one.offset, min(stop, source.choice(sectors or [0]) * form.sector))
    if len(content) < stop:
        _resize(content, stop)
    data = one.data[: stop - one.offset]
    match form.kind:
        case "whole" | "cut":
            content[one.offset : stop] = data
        case "zeros":
            content[one.offset : stop] = bytes(len(data))
        case "noise":
            content[one.offset : stop] = source.randbytes(len(data))
        case "torn":
            _tear(content, one.offset, data, form.sector, source)


def _tear(content: bytearray, offset: int, data: bytes, sector: int, source: random.Random) -> None:
    """Of each sector either what was there or what was written."""
    at = offset
    while at < offset + len(data):
        stop = min(offset + len(data), (at // sector + 1) * sector)
        if source.random() < 0.5:
            content[at:stop] = data[at - offset : stop - offset]
        at = stop
