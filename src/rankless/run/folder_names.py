"""The names of the folders of checkpoints in an object store: ``TAG.ID``, or ``TAG`` if they were copied there."""

from __future__ import annotations

import re

from rankless.storage.object_path import ObjectPath

#: The name of the folder of a checkpoint.
FOLDER = re.compile(r"(?P<tag>.+)\.(?P<id>[0-9a-f]{16})")


def checkpoint_folder(run: ObjectPath, tag: str, folder_id: str) -> ObjectPath:
    """Return the prefix of the keys of a checkpoint."""
    return run / f"{tag}.{folder_id}"


def is_saved_folder(name: str) -> bool:
    """Return whether a prefix in a run has a name as saves give them."""
    return not name.startswith(".") and FOLDER.fullmatch(name) is not None


def is_copied_folder(name: str) -> bool:
    """Return whether a prefix in a run may be a checkpoint that was copied there: no save gives such a name."""
    return not name.startswith(".") and FOLDER.fullmatch(name) is None


def tag_of_folder(name: str) -> str:
    """Return the tag of a checkpoint in a run from the name of its prefix."""
    match = FOLDER.fullmatch(name)
    return match["tag"] if match else name
