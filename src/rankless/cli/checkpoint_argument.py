"""The arguments of commands: a checkpoint of any format, or the folder of a run.

The commands parse their arguments with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankless.errors import (
    InvalidArgumentError,
    NoCheckpointError,
)
from rankless.formats.detect import is_checkpoint
from rankless.run.aliases import list_aliases
from rankless.run.catalog import list_checkpoints
from rankless.run.lookup import checkpoint_path
from rankless.storage.location import parse_location
from rankless.storage.store import store_of

#: The option ``--tag`` of commands that read one checkpoint of a run.
Tag = Annotated[
    str | None, typer.Option("--tag", metavar="TAG", help="The checkpoint of a run with this tag; default: the latest.")
]

#: The option ``--local`` of commands that know the local tier.
Local = Annotated[
    str | None, typer.Option("--local", metavar="FOLDER", help="The folder of the local tier on this host.")
]


def check_run(path: Path) -> None:
    """Check that a path can be a run's folder. Raises ``NoCheckpointError`` or ``InvalidArgumentError``."""
    # Formats are detected last: that looks into each folder of a run, with several requests to an object store.
    if not list_checkpoints(path) and is_checkpoint(path):
        raise InvalidArgumentError(f"{path} is a checkpoint itself, not the folder of a run: use rankless show")
    if not store_of(path).is_directory(path):
        raise NoCheckpointError(f"there is no folder {path}")


def resolve_path(path: str, tag: str | None) -> Path:
    """Return the path of an argument, or of the checkpoint that a tag, or an alias after the run's path, names.

    Raises ``NoCheckpointError`` or ``InvalidArgumentError``.
    """
    resolved = parse_location(path)
    if tag is not None:
        return checkpoint_path(resolved, tag)
    is_alias = not store_of(resolved).path_exists(resolved) and resolved.name in list_aliases(resolved.parent)
    return checkpoint_path(resolved.parent, resolved.name) if is_alias else resolved
