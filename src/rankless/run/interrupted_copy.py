"""Folders that an interrupted copy or removal leaves in a run directory: files of a checkpoint without its manifest.

No save leaves such a folder, because a folder gets its name when it is complete, and no load sees it. But it has the
name of a tag. A job that goes on from the checkpoint before it could never save that step, at no restart. So the save
that needs the tag hides the folder, as it hides a corrupt checkpoint. ``rankless prune --leftovers`` removes it.

The save asks :func:`is_interrupted_copy` on rank 0 in its first vote, and hides the folder on rank 0 in the commit. In
doubt a folder is no copy, and keeps its name.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath

from rankless.errors import (
    CorruptCheckpointError,
    FormatError,
    NoCheckpointError,
    StorageError,
    TagExistsError,
)
from rankless.formats.native import is_native, read_manifest
from rankless.observe.warning import warn_caller
from rankless.ondisk import manifest, values
from rankless.ondisk.data_files import ADAPTER_CONFIG, CONFIG, CRC_KEY, GENERATION_CONFIG, HUB_LAYOUT
from rankless.ondisk.header import LENGTH_BYTES
from rankless.ondisk.hidden_names import STATISTICS, HiddenName
from rankless.storage import atomic_rename, directory_trees, posix
from rankless.storage.store import store_of

#: The bytes at the beginning of a file that are looked at: in a file of tensors, the key of our checksums is there.
_START_BYTES = 2**16

#: The first bytes of a file of tensors, after the length of its header.
_HEADER = b'{"__metadata__":{"'

#: The first bytes of each file of values. Files of ``save_lr_scheduler`` begin in another way.
_VALUES = {
    values.SHARED_FILE: tuple(
        b'{"%s' % name for name in (b"model", b"optimizer", b"scheduler", b"stateful", b"user_content")
    ),
    values.RANKS_FILE: (b'{"ranks":[',),
}

#: The files of tensors next to the manifest, and their indexes.
_AT_TOP = re.compile(r"(state|ranks)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")

#: Files of a model for other libraries.
_OF_MODEL = frozenset({ADAPTER_CONFIG, CONFIG, GENERATION_CONFIG, HUB_LAYOUT})

#: The name of a file that ``rsync`` writes, until it has all of it: for example ``.state.json.a1B2c3``.
_OF_RSYNC = re.compile(r"\.(?P<name>.+)\.[A-Za-z0-9]{6}")


def hide_interrupted_copy(folder: Path, run: str, new_names: Collection[str]) -> bool:
    """Give an interrupted copy a hidden name, and warn. Return whether there was one, or an empty folder.

    :class:`~rankless.run.pending_dir.PendingDirectory` calls it on rank 0, which publishes a checkpoint of ``run``.
    """
    if not is_interrupted_copy(folder, new_names):
        return False
    if _remove_if_empty(folder):
        return True
    hidden = folder.parent / HiddenName(folder.name, run, secrets.token_hex(8), "corrupt").name
    try:
        atomic_rename.rename_path(folder, hidden)
    except StorageError:  # a mount point keeps its name, and so does another user's folder
        return False
    try:
        is_copy = is_interrupted_copy(hidden, new_names)
    except StorageError:
        _give_back(hidden, folder)
        raise
    if not is_copy:
        _give_back(hidden, folder)
        return False
    warn_caller(
        f"{folder} had no manifest, or a part of one, as if a copy or a removal had been interrupted. It is kept as "
        f"{hidden.name}, because its tag is needed; rankless prune --leftovers removes it"
    )
    return True


def _remove_if_empty(folder: Path) -> bool:
    try:
        posix.remove_empty_directory(folder)
    except StorageError:
        return False
    return True


def _give_back(hidden: Path, folder: Path) -> None:
    """Give a folder its name again that took the name between the look and the rename."""
    try:
        atomic_rename.rename_noreplace(hidden, folder)
    except TagExistsError:
        warn_caller(f"{folder} was replaced several times during this save; what had the name is kept as {hidden}")


def is_interrupted_copy(folder: Path, new_names: Collection[str] = ()) -> bool:
    """Return whether a folder has only files of a checkpoint, or none, and no manifest, or a part of one.

    Some of them must be next to where the manifest would be. ``save_model(model, folder / "model")`` writes the others,
    too, and its files are complete. ``new_names`` are the files of the checkpoint that needs the tag: the copy is one
    of the same job, and may have any of them. Raises ``StorageError`` if the folder cannot be listed.
    """
    if store_of(folder).is_remote or (is_native(folder) and not _is_cut(folder)):  # mostly so: asked first
        return False
    if posix.is_link(folder) or not posix.is_directory(folder):
        return False
    names = directory_trees.list_tree(folder)
    if names <= {STATISTICS}:
        return bool(names) or directory_trees.has_no_files(folder)
    return all(_is_of_checkpoint(folder, PurePosixPath(name), new_names) for name in names) and any(
        "/" not in name and name != STATISTICS for name in names
    )


def list_parts_of_checkpoints(run: Path, tags: Collection[str]) -> list[str]:
    """Return the names of folders in a run directory, other than ``tags``, with values of a checkpoint and no manifest.

    For example, a folder with ``state.json`` and without ``manifest.json``. For people to look at: nothing is removed
    because of it. In an object store no tag means such a folder.
    """
    if store_of(run).is_remote:
        return []
    names = (name for name in sorted(posix.list_names(run)) if not name.startswith(".") and name not in tags)
    return [name for name in names if not is_native(run / name) and any(map(partial(_has_values, run / name), _VALUES))]


def _has_values(folder: Path, name: str) -> bool:
    with suppress(StorageError):
        return _is_of_checkpoint(folder, PurePosixPath(name), ())
    return False


def _is_cut(folder: Path) -> bool:
    """Return whether a manifest cannot be read, because its end is missing: the copy ended there, or the disk was full.

    Its end is its checksum. Any other fault of a manifest may be one of a disk, and the checkpoint is left alone.
    """
    with suppress(FormatError, NoCheckpointError):  # another program's file, or it was removed meanwhile
        try:
            read_manifest(folder)
        except CorruptCheckpointError:
            return not manifest.has_end(store_of(folder).read_small(folder / manifest.NAME))
    return False


def _is_of_checkpoint(folder: Path, path: PurePosixPath, new_names: Collection[str]) -> bool:
    """Return whether a save writes such a file into a checkpoint. Of most files, the beginning is looked at."""
    file = folder / path
    if posix.is_link(file) or not posix.is_file(file):
        return False
    draft = _OF_RSYNC.fullmatch(path.name)
    name = draft["name"] if draft else path.name
    is_at_top = len(path.parts) == 1
    if is_at_top and name in _VALUES:
        return _begins_as(_read_start(file), _VALUES[name])
    if str(path.with_name(name)) in new_names or name in ({manifest.NAME, STATISTICS} if is_at_top else _OF_MODEL):
        return True
    if is_at_top and not _AT_TOP.fullmatch(name):
        return False
    return name.endswith(".safetensors.index.json") or (
        name.endswith(".safetensors") and _has_our_checksums(_read_start(file))
    )


def _read_start(file: Path) -> bytes:
    with store_of(file).open_reader(file) as reader:
        start = bytearray(min(reader.size, _START_BYTES))
        reader.read(0, memoryview(start))
        return bytes(start)


def _has_our_checksums(start: bytes) -> bool:
    """Return whether rankless has written a file of tensors. Its end may be missing, even most of it."""
    return CRC_KEY.encode() in start or _HEADER.startswith(start[LENGTH_BYTES:])


def _begins_as(start: bytes, beginnings: Collection[bytes]) -> bool:
    return any(start.startswith(beginning) or beginning.startswith(start) for beginning in beginnings)
