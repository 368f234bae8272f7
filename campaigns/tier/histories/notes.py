"""What the ranks of a history note, each in a file to which it appends, so that a kill takes nothing away."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class State(NamedTuple):
    """The state that an incarnation has at a step."""

    incarnation: int
    step: int

    @property
    def tag(self) -> str:
        """The tag of its checkpoint."""
        return f"i{self.incarnation}_s{self.step}"

    @property
    def seed(self) -> int:
        """The number from which its elements are computed."""
        return self.incarnation * 10**6 + self.step

    @classmethod
    def of_tag(cls, tag: str) -> State:
        """Return the state of a tag."""
        incarnation, _, step = tag.removeprefix("i").partition("_s")
        return cls(int(incarnation), int(step))


@dataclass(frozen=True)
class Note:
    """One note of a rank.

    The kinds are:

    - ``loaded``: the state was loaded from ``text``; without a state, there was none.
    - ``wrong``: the loaded state has other elements in the tensors that ``text`` lists.
    - ``save``: the state is about to be saved.
    - ``local``: the state is complete in the tier. ``copied``: its copies are made. ``durable``: it is drained.
    - ``warning``: rankless has warned.
    """

    rank: int
    kind: str
    state: State | None
    text: str
    time: float


class NoteWriter:
    """The notes of one rank of an incarnation."""

    def __init__(self, folder: Path, incarnation: int, rank: int) -> None:
        self._descriptor = os.open(folder / f"{incarnation}-{rank}", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def add(self, kind: str, state: State | None = None, text: str = "") -> None:
        """Append a note."""
        line = json.dumps([kind, state, text, time.monotonic()]) + "\n"
        os.write(self._descriptor, line.encode())


def read_notes(folder: Path, incarnation: int) -> Sequence[Note]:
    """Return the notes of all ranks of an incarnation so far, in the order of time."""
    notes = []
    for path in folder.glob(f"{incarnation}-*"):
        rank = int(path.name.partition("-")[2])
        for line in path.read_text().splitlines():
            kind, state, text, at = json.loads(line)
            notes.append(Note(rank, kind, None if state is None else State(*state), text, at))
    return sorted(notes, key=lambda note: note.time)
