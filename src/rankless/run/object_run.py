"""The layout of a run in an object store: which keys are a checkpoint of which tag.

An object store cannot rename, so a checkpoint cannot get its name by a rename. Instead, no two saves ever share a key:

- ``RUN/TAG.ID/…`` has all files of one checkpoint, with its manifest: a whole checkpoint, for any reader. The id is
  that of the manifest; if the checkpoint comes from the local tier, it is that of the attempt to drain it.
- ``RUN/.tags/TAG/N`` is a *pointer*: a small object that names the id. It is created by a conditional write, which one
  of several writers wins. This is the commit of a save (``N`` = 1) and of an overwrite (``N`` = the highest + 1). The
  pointer with the highest ``N`` counts.

A writer that was stopped for hours can only publish its own checkpoint, which is whole. A prefix ``TAG.ID`` without a
pointer is a save in progress, or an interrupted one. A folder ``NAME`` that was copied into the run, and whose name
does not end with an id, is a checkpoint with this tag.

The order of a save must stay: all files, the manifest as the last file, then the pointer
(:mod:`rankless.save.object_publication`). Keys of older versions stay in stores. Loads, clean-ups and lists ask this
module, on rank 0 or in commands.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from rankless.errors import CheckpointReplacedError, CorruptCheckpointError, InvalidArgumentError, RanklessError
from rankless.formats.native import read_manifest
from rankless.ondisk.manifest import NAME
from rankless.run.folder_names import FOLDER, is_saved_folder, tag_of_folder
from rankless.run.ownership import SAVED_FOLDER
from rankless.run.pointers import Pointer, TagEntry, clock_difference, find_tag, is_published
from rankless.storage.object_path import ObjectPath
from rankless.storage.store import ObjectInfo


def check_output_name(final: ObjectPath) -> None:
    """Raise ``InvalidArgumentError`` if a path has a name as saves give them: a clean-up would remove it."""
    if FOLDER.fullmatch(final.name):
        raise InvalidArgumentError(
            f"the name of {final} ends with a dot and 16 hexadecimal digits, as those of saves do: choose another name"
        )


def tag_of(checkpoint: Path) -> str:
    """Return the tag of a checkpoint in a run: the name of its directory, in an object store without the id."""
    return tag_of_folder(checkpoint.name) if isinstance(checkpoint, ObjectPath) else checkpoint.name


class UnpublishedFolder(msgspec.Struct, frozen=True):
    """A folder that no pointer names, of a save in progress or an interrupted one: its last change, and its size.

    The time is that of this host's clock. It ``is_whole`` if it has a manifest, which is written last: perhaps a
    checkpoint that was copied there.
    """

    path: ObjectPath
    time: float
    nbytes: int
    is_whole: bool


def list_unpublished(run: ObjectPath, entries: Sequence[TagEntry]) -> list[UnpublishedFolder]:
    """Return the folders of saves that no pointer names. ``entries`` are all tags of the run.

    Folders of a tag whose pointer cannot be read are left out: it may name any of them. So are the whole folders of a
    run without pointers, which are its checkpoints, and folders of somebody else whose names only look like those of
    saves.
    """
    published = {entry.folder_in(run).name for entry in entries if isinstance(entry.pointer, Pointer)}
    unreadable = {entry.tag for entry in entries if not isinstance(entry.pointer, Pointer)}
    uploads: dict[str, list[float]] = {}
    for upload, began in run.store.list_uploads(run):
        uploads.setdefault(_folder_in(run, upload.path), []).append(began)
    folders, ahead = [], clock_difference(entries)
    for name in sorted({*run.store.list_names(run), *uploads}):
        if name.startswith(".") or name in published or tag_of_folder(name) in unreadable:
            continue
        infos = _list_saved(run / name) if is_saved_folder(name) else []
        changes = [*(info.time for info in infos), *uploads.get(name, [])]
        is_whole = any(info.path == run / name / NAME for info in infos)
        if changes and not (is_whole and not entries):
            folders.append(
                UnpublishedFolder(run / name, max(changes) + ahead, sum(info.size for info in infos), is_whole)
            )
    return folders


def _list_saved(folder: ObjectPath) -> list[ObjectInfo]:
    """Return the objects that a save has written into a folder."""
    owned = SAVED_FOLDER.sort_objects(folder).owned
    return [info for info in folder.store.list_objects(folder) if str(info.path.relative_to(folder)) in owned]


def _folder_in(run: ObjectPath, path: ObjectPath) -> str:
    return path.relative_to(run).parts[0]


def is_named(folder: Path) -> bool:
    """Return whether a pointer names a folder in an object store: so the checkpoint was not replaced or removed."""
    match = FOLDER.fullmatch(folder.name) if isinstance(folder, ObjectPath) else None
    if match is None or not isinstance(folder, ObjectPath):
        return False
    entry = find_tag(folder.parent, match["tag"])
    is_named_by_tag = entry is not None and entry.names_folder(match["id"])
    return is_named_by_tag or is_published(folder.parent, match["tag"], match["id"])


def has_lost_manifest(folder: Path) -> bool:
    """Return whether a pointer names a folder in an object store, although its manifest is missing."""
    if not is_named(folder):
        return False
    try:
        read_manifest(folder)
    except CheckpointReplacedError:
        return True
    except RanklessError:  # it is there
        return False
    return False


def lost_files_error(folder: Path) -> CorruptCheckpointError:
    """Return the error of a checkpoint whose files are missing."""
    return CorruptCheckpointError(
        f"{folder} has no manifest, but its tag still names it: something else than rankless has removed its files"
    )
