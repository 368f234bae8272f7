"""Checkpoints of a run in an object store that has no pointer at all, such as a copy that lacks hidden names.

:mod:`rankless.run.catalog` calls it on rank 0 when a job looks at the run before it claims or saves. It creates the
pointer first, and looks at the folder after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from rankless.formats.native import read_manifest
from rankless.observe.warning import warn_caller
from rankless.run.checkpoint_info import CheckpointInfo
from rankless.run.folder_names import FOLDER
from rankless.run.object_removal import is_still_whole
from rankless.run.pointers import TAGS, Pointer, pointer_path
from rankless.storage.object_path import as_object


def name_checkpoints(path: Path, unnamed: Sequence[CheckpointInfo]) -> None:
    """Create the pointers of checkpoints in a run that has none. The first save does so before it creates its own.

    Otherwise that one would be the only checkpoint of the run. If another process names them at the same time, or their
    own save does, its pointer has the same content.
    """
    run, named = as_object(path), []
    for info in unnamed:
        match = FOLDER.fullmatch(info.path.name)
        if info.status == "complete" and match is not None:
            pointer = Pointer.of(read_manifest(info.path), match["id"])
            path = pointer_path(run, info.tag, 1)
            run.store.create_object(path, msgspec.json.encode(pointer))
            if is_still_whole(run / info.path.name):  # its own save may be about to give it up
                named.append(info.tag)
            else:
                run.store.remove_file(path)
    if named:
        warn_caller(
            f"{run} has no pointers in {TAGS}, as a copy without hidden names: wrote those of its {len(named)} whole "
            f"checkpoint(s), the latest is {named[-1]}"
        )
