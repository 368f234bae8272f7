"""The version to go to, and refusing a directory of checkpoints in place of a weights directory.

Followers and the command ask on rank 0 at each update. Publishers check the directory before their first version, and
waiting evaluations before they wait: otherwise checkpoints and versions would be mixed, and a wait in the wrong
directory would never end.
"""

from __future__ import annotations

from pathlib import Path

from rankless.errors import InvalidArgumentError, NoCheckpointError, StateError
from rankless.formats.detect import is_checkpoint
from rankless.formats.weights.version_files import list_numbers, read_manifest
from rankless.ondisk.weight_versions import VersionKey
from rankless.run.catalog import is_run_directory


def check_no_checkpoints(directory: Path) -> None:
    """Raise ``InvalidArgumentError`` if a directory, or its URL, has no versions, and is or has a checkpoint."""
    if not list_numbers(directory) and (is_checkpoint(directory) or is_run_directory(directory)):
        raise InvalidArgumentError(
            f"{directory} has checkpoints, and no published weights: pass the weights directory, which has nothing else"
        )


def choose_version(directory: Path, own: VersionKey | None) -> int:
    """Return the number of the newest version; that of the ``own`` one if there is no newer one, 0 if there is none.

    A list of an object store may be late: the own version is asked for by its name. Raises ``StateError`` if the
    directory has other versions than those that were followed so far: it was made anew.
    """
    newest = max(list_numbers(directory), default=0)
    if own is None:
        if not newest:
            check_no_checkpoints(directory)
        return newest
    if newest > own.number:
        return newest
    try:
        is_same = read_manifest(directory, own.number).key == own
    except NoCheckpointError:
        is_same = False
    if is_same or not newest:
        return own.number
    raise StateError(
        f"{directory} was made anew: it has version {newest}, and no longer the version {own} that was followed. To "
        "follow the new versions, begin with a new follower and an empty folder"
    )
