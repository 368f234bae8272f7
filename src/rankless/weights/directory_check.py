"""Refusing a file, or a directory of checkpoints, in place of a weights directory.

Publishers call it on rank 0 before their first version, followers and waiting evaluations while there is none:
otherwise checkpoints and versions would be mixed, and a wait for versions in the wrong directory would never end.
"""

from __future__ import annotations

from pathlib import Path

from rankless.errors import InvalidArgumentError
from rankless.formats.detect import is_checkpoint
from rankless.formats.weights.version_files import list_numbers
from rankless.run.catalog import is_run_directory
from rankless.storage.store import store_of


def check_weights_directory(directory: Path) -> None:
    """Raise ``InvalidArgumentError`` if a path, or URL, is a file, or has no versions and is or has a checkpoint."""
    if store_of(directory).is_file(directory):
        raise InvalidArgumentError(f"{directory} is a file: pass the weights directory")
    if list_numbers(directory) or not (is_checkpoint(directory) or is_run_directory(directory)):
        return
    if not list_numbers(directory):  # else the first version, which is a checkpoint, too, has appeared meanwhile
        raise InvalidArgumentError(
            f"{directory} has checkpoints, and no published weights: pass the weights directory, which has nothing else"
        )
