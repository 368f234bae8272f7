"""What saves that never ended left in a run's folder."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.storage import local

#: A save in progress; see ``engine.commit.draft_name``.
_DRAFT = re.compile(r"\.(?P<tag>.+)\.(?P<id>[0-9a-f]{16})\.partial")


@dataclass(frozen=True, slots=True)
class Leftover:
    """What a save that never ended left behind, or one that is under way: nobody can tell from here.

    ``nbytes`` is what its files take of the disk now, ``time`` when its folder last changed.
    """

    name: str
    tag: str
    path: Path
    time: float
    nbytes: int


def leftovers(run: Path) -> list[Leftover]:
    """The hidden folders of saves that did not end."""
    found = []
    with local.reported("list", run):
        for folder in sorted(run.iterdir()):
            draft = _DRAFT.fullmatch(folder.name)
            with suppress(FileNotFoundError):  # it was committed or removed meanwhile
                if draft and folder.is_dir():
                    found.append(Leftover(folder.name, draft["tag"], folder, folder.stat().st_mtime, _used(folder)))
    return found


def _used(folder: Path) -> int:
    return sum(file.lstat().st_blocks * 512 for file in folder.rglob("*"))
