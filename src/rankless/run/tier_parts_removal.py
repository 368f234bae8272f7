"""Parts of checkpoints that hosts have put into a run directory from their local tiers, and when they are removed.

They are in the hidden folder ``.parts``, until all parts of a checkpoint are there and it is written from them. The
names of their files begin with the epoch, the sequence number and the id of the checkpoint.

A save cleans up with it on rank 0, in the vote on its preparation; :mod:`rankless.tier.parts_in_run` calls it on rank 0
of a load with a local tier, and in a drain without a job. :mod:`rankless.tier.part_names` makes the names, which are on
disks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path

from rankless.run.catalog import cached_checkpoints
from rankless.run.run_store import run_store_of

#: The folder in a run directory.
FOLDER = ".parts"

#: The file that the process locks that writes a checkpoint from parts.
LOCK = "publish.lock"

_NAME = re.compile(r"\d{8}\.(?P<sequence>\d{20})\.(?P<id>[0-9a-f]{16})\..+", re.DOTALL)


def remove_superseded_parts(run: Path) -> list[Path]:
    """Remove the parts of checkpoints that are in the run directory, or older than one there. Return their paths.

    The folder is removed if nothing else is in it.
    """
    complete = [info for info in cached_checkpoints(run) if info.status == "complete"]
    newest = max((info.sequence for info in complete), default=0)
    ids = {info.id for info in complete}
    return remove_parts(run, lambda sequence, identity: sequence < newest or identity in ids)


def remove_parts(run: Path, is_unwanted: Callable[[int, str], bool]) -> list[Path]:
    """Remove the parts of the checkpoints, given by sequence number and id, that are not wanted."""
    return run_store_of(run).remove_parts(is_unwanted)


def select_parts(names: Collection[str], is_unwanted: Callable[[int, str], bool]) -> list[str]:
    """Return the names of the files with parts that are not wanted, of those in the folder. Called by both layouts."""
    matches = (match for name in sorted(names) if (match := _NAME.fullmatch(name)))
    return [match.string for match in matches if is_unwanted(int(match["sequence"]), match["id"])]
