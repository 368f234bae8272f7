"""Refusing a directory of checkpoints in place of a weights directory.

Publishers call it on rank 0 before their first version, followers and waiting evaluations while there is none:
otherwise checkpoints and versions would be mixed, and a wait for versions in the wrong directory would never end.
"""

from __future__ import annotations

from pathlib import Path

from rankless.errors import InvalidArgumentError
from rankless.formats.detect import is_checkpoint
from rankless.formats.weights.version_files import list_numbers
from rankless.run.catalog import is_run_directory


def check_no_checkpoints(directory: Path) -> None:
    """Raise ``InvalidArgumentError`` if a directory, or its URL, has no versions, and is or has a checkpoint."""
    if not list_numbers(directory) and (is_checkpoint(directory) or is_run_directory(directory)):
        raise InvalidArgumentError(
            f"{directory} has checkpoints, and no published weights: pass the weights directory, which has nothing else"
        )
