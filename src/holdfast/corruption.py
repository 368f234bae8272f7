"""Checkpoints that a load found corrupt: they make way when the run that goes on without them saves again."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from holdfast.catalog import seen_checkpoints
from holdfast.errors import GoneError, TagExistsError
from holdfast.layout.hidden import Hidden, parse
from holdfast.storage import folders, local
from holdfast.survey import look


class Corrupt(msgspec.Struct, frozen=True, array_like=True):
    """One that was found corrupt: its tag, and the state of all its files then.

    Where a file has changed since, it may have been repaired, or be another checkpoint.
    """

    tag: str
    state: str

    @classmethod
    def of(cls, folder: Path, tag: str) -> Corrupt:
        """What is in a folder now."""
        return cls(tag, local.tree_state(folder))

    def is_in(self, folder: Path) -> bool:
        """Whether a folder holds it, unchanged."""
        return bool(self.state) and local.tree_state(folder) == self.state


def find_corrupt(known: Iterable[Corrupt], path: Path, tag: str) -> Corrupt | None:
    """The one of those known that has a tag in a run's folder."""
    return next((one for one in known if one.tag == tag and one.is_in(path / tag)), None)


def set_aside(known: Iterable[Corrupt], path: Path, run: str) -> Iterator[Path]:
    """Hide those known that the run itself has saved, so that their tags are free. Gives the hidden folders.

    What was renamed, copied or repaired since is left alone.
    """
    for one in known:
        folder, hidden = path / one.tag, path / Hidden(one.tag, run, secrets.token_hex(8), "corrupt").name
        if not one.is_in(folder) or not _is_own(folder, one.tag, run):
            continue
        folders.rename(folder, hidden)
        if one.is_in(hidden):
            yield hidden
        else:  # another checkpoint has taken the name between two looks
            with suppress(TagExistsError):
                folders.publish(hidden, folder)


def _is_own(folder: Path, tag: str, run: str) -> bool:
    with suppress(GoneError):
        info = look(folder, tag)
        return info is not None and info.run == run and info.saved_as == tag
    return False


def outdated_corrupt(path: Path, run: str) -> list[Path]:
    """Hidden corrupt checkpoints of a run that are older than all that retention has left of it."""
    oldest = next((info.age for info in seen_checkpoints(path) if info.status == "complete" and info.run == run), None)
    found = []
    for folder in local.hidden_folders(path):
        hidden = parse(folder.name)
        if oldest is None or hidden is None or hidden.state != "corrupt" or hidden.run != run:
            continue
        with suppress(GoneError):
            info = look(folder, hidden.tag)
            if info is None or info.age < oldest:
                found.append(folder)
    return found
