"""The layout of a run in an object store: the keys of each checkpoint, and of its tag.

An object store cannot rename, so a checkpoint cannot get its name by a rename. Instead, no two saves ever share a key:

- ``RUN/TAG.ID/…`` has all files of one checkpoint, with its manifest: a whole checkpoint, for any reader. The manifest
  has the same id; if the checkpoint comes from the local tier, the attempt to drain it has an own id. For example,
  ``runs/a/step_10.0123456789abcdef/manifest.json``.
- ``RUN/.tags/TAG/N`` is a *pointer*: a small object that names the id. It is created by a conditional write, which one
  of several writers wins. This is the commit of a save (``N`` = 1) and of an overwrite (``N`` = the highest + 1). The
  pointer with the highest ``N`` counts.

A writer that was stopped for hours can only publish its own checkpoint, which is whole. A prefix ``TAG.ID`` without a
pointer is a save in progress, or an interrupted one. A folder ``NAME`` that was copied into the run is a checkpoint
with this tag, if its name does not end with an id: for example ``step_10``.

The order of a save must stay: all files, the manifest as the last file, then the pointer
(:mod:`rankless.save.object_publication`). Keys of older versions stay in stores. Loads, clean-ups and lists ask this
module, on rank 0 or in commands.
"""

from __future__ import annotations

from collections.abc import Sequence

from rankless.errors import InvalidArgumentError
from rankless.ondisk.manifest import NAME
from rankless.run.folder_names import FOLDER, is_saved_folder, tag_of_folder
from rankless.run.ownership import SAVED_FOLDER
from rankless.run.pointers import Pointer, TagEntry, clock_difference, find_tag, is_published
from rankless.run.run_store import StaleDirectory
from rankless.storage.object_path import ObjectPath
from rankless.storage.store import ObjectInfo


def check_output_name(final: ObjectPath) -> None:
    """Raise ``InvalidArgumentError`` if a path has a name as saves give them: a clean-up would remove it."""
    if FOLDER.fullmatch(final.name):
        raise InvalidArgumentError(
            f"the name of {final} ends with a dot and 16 hexadecimal digits, as those of saves do: choose another name"
        )


def list_unpublished(run: ObjectPath, entries: Sequence[TagEntry]) -> list[StaleDirectory]:
    """Return the folders of saves that no pointer names, and uploads in progress. ``entries`` are all tags of the run.

    Folders of a tag are left out if its pointer cannot be read: it may name any of them. So are the whole folders of a
    run without pointers, which are its checkpoints, and folders of somebody else that only have names as saves give
    them.
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
            changed, nbytes = max(changes) + ahead, sum(info.size for info in infos)
            tag = tag_of_folder(name)
            folders.append(StaleDirectory(name, tag, run / name, changed, nbytes, is_whole=is_whole))
    return folders


def _list_saved(folder: ObjectPath) -> list[ObjectInfo]:
    """Return the objects that a save has written into a folder."""
    owned = SAVED_FOLDER.sort_objects(folder).owned
    return [info for info in folder.store.list_objects(folder) if str(info.path.relative_to(folder)) in owned]


def _folder_in(run: ObjectPath, path: ObjectPath) -> str:
    return path.relative_to(run).parts[0]


def is_named(folder: ObjectPath) -> bool:
    """Return whether a pointer names a folder: so the checkpoint was not replaced or removed."""
    match = FOLDER.fullmatch(folder.name)
    if match is None:
        return False
    entry = find_tag(folder.parent, match["tag"])
    is_named_by_tag = entry is not None and entry.names_folder(match["id"])
    return is_named_by_tag or is_published(folder.parent, match["tag"], match["id"])
