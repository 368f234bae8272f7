"""Checkpoints that a load found corrupt: they make way when the run that goes on without them saves again."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from holdfast.errors import CheckpointReplacedError, TagExistsError
from holdfast.ondisk.hidden_names import HiddenName, parse_hidden_name
from holdfast.run.catalog import cached_checkpoints
from holdfast.run.scan import read_info
from holdfast.storage import directories, posix


class CorruptRecord(msgspec.Struct, frozen=True, array_like=True):
    """One that was found corrupt: its tag, and the state of all its files then.

    Where a file has changed since, it may have been repaired, or be another checkpoint.
    """

    tag: str
    state: str

    @classmethod
    def of(cls, folder: Path, tag: str) -> CorruptRecord:
        """What is in a folder now."""
        return cls(tag, posix.tree_state(folder))

    def is_in(self, folder: Path) -> bool:
        """Whether a folder holds it, unchanged."""
        return bool(self.state) and posix.tree_state(folder) == self.state


def find_corrupt(known: Iterable[CorruptRecord], path: Path, tag: str) -> CorruptRecord | None:
    """The one of those known that has a tag in a run's folder."""
    return next((one for one in known if one.tag == tag and one.is_in(path / tag)), None)


def set_aside_corrupt(known: Iterable[CorruptRecord], path: Path, run: str) -> Iterator[Path]:
    """Hide those known that the run itself has saved, so that their tags are free. Gives the hidden folders.

    What was renamed, copied or repaired since is left alone.
    """
    for one in known:
        folder, hidden = path / one.tag, path / HiddenName(one.tag, run, secrets.token_hex(8), "corrupt").name
        if not one.is_in(folder) or not _is_own(folder, one.tag, run):
            continue
        directories.rename_path(folder, hidden)
        if one.is_in(hidden):
            yield hidden
        else:  # another checkpoint has taken the name between two looks
            with suppress(TagExistsError):
                directories.rename_noreplace(hidden, folder)


def _is_own(folder: Path, tag: str, run: str) -> bool:
    with suppress(CheckpointReplacedError):
        info = read_info(folder, tag)
        return info is not None and info.run == run and info.saved_as == tag
    return False


def outdated_corrupt(path: Path, run: str) -> list[Path]:
    """Hidden corrupt checkpoints of a run that are older than all that retention has left of it."""
    oldest = next(
        (info.age for info in cached_checkpoints(path) if info.status == "complete" and info.run == run), None
    )
    found = []
    for folder in posix.list_hidden_directories(path):
        hidden = parse_hidden_name(folder.name)
        if oldest is None or hidden is None or hidden.state != "corrupt" or hidden.run != run:
            continue
        with suppress(CheckpointReplacedError):
            info = read_info(folder, hidden.tag)
            if info is None or info.age < oldest:
                found.append(folder)
    return found
