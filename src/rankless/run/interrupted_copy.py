"""Folders that an interrupted copy or removal leaves in a run directory: files of a checkpoint without its manifest.

No save leaves such a folder, because a folder gets its name when it is complete, and no load sees it. But it has the
name of a tag. A job that goes on from the checkpoint before it could never save that step, at no restart. So the save
that needs the tag hides the folder, as it hides a corrupt checkpoint. ``rankless prune --leftovers`` removes it.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path, PurePosixPath

from rankless.errors import StorageError, TagExistsError
from rankless.observe.warning import warn_caller
from rankless.ondisk import manifest, values
from rankless.ondisk.data_files import ADAPTER_CONFIG, CRC_KEY
from rankless.ondisk.header import LENGTH_BYTES
from rankless.ondisk.hidden_names import STATISTICS, HiddenName
from rankless.storage import atomic_rename, directory_trees, posix
from rankless.storage.object_path import ObjectPath
from rankless.storage.store import store_of

#: The bytes at the beginning of a file of tensors in which the key of our checksums is, and how the header begins.
_START_BYTES, _HEADER = 2**16, b'{"__metadata__":{"'

_AT_TOP = frozenset({values.RANKS_FILE, values.SHARED_FILE, STATISTICS})


def hide_interrupted_copy(folder: Path, run: str) -> bool:
    """Give an interrupted copy a hidden name, and warn. Return whether there was one.

    :class:`~rankless.run.pending_dir.PendingDirectory` calls it on rank 0, which publishes a checkpoint of ``run``.
    """
    if not is_interrupted_copy(folder):
        return False
    hidden = folder.parent / HiddenName(folder.name, run, secrets.token_hex(8), "corrupt").name
    atomic_rename.rename_path(folder, hidden)
    if is_interrupted_copy(hidden):
        warn_caller(
            f"{folder} had no manifest, as if a copy or a removal had been interrupted. It is kept as {hidden.name}, "
            "because its tag is needed; rankless prune --leftovers removes it"
        )
        return True
    with suppress(TagExistsError):  # something else took the name between the look and the rename
        atomic_rename.rename_noreplace(hidden, folder)
    return False


def is_interrupted_copy(folder: Path) -> bool:
    """Return whether a folder has only files of a checkpoint, or none, and no manifest.

    Some of them must be next to where the manifest would be. ``save_model(model, folder / "model")`` writes the others,
    too, and what it has written is complete.
    """
    if isinstance(folder, ObjectPath) or posix.path_exists(folder / manifest.NAME):  # mostly so: asked first
        return False
    if posix.is_link(folder) or not posix.is_directory(folder):
        return False
    names = directory_trees.list_tree(folder)
    if not all(_is_of_checkpoint(folder, PurePosixPath(name)) for name in names):
        return False
    return not names or any("/" not in name and name != STATISTICS for name in names)


def _is_of_checkpoint(folder: Path, name: PurePosixPath) -> bool:
    """Return whether a save writes such a file into a checkpoint. Of a file of tensors, the beginning is looked at."""
    if posix.is_link(folder / name) or not posix.is_file(folder / name):
        return False
    is_at_top = len(name.parts) == 1
    if name.name in (_AT_TOP if is_at_top else {ADAPTER_CONFIG}):
        return True
    if is_at_top and not name.name.startswith(("ranks", "state")):
        return False
    return name.name.endswith(".safetensors.index.json") or (
        name.suffix == ".safetensors" and _begins_with_our_checksums(folder / name)
    )


def _begins_with_our_checksums(file: Path) -> bool:
    """Return whether rankless has written a file of tensors, of which the end may be missing, even most of it."""
    with suppress(StorageError), store_of(file).open_reader(file) as reader:
        start = bytearray(min(reader.size, _START_BYTES))
        reader.read(0, memoryview(start))
        return CRC_KEY.encode() in start or _HEADER.startswith(start[LENGTH_BYTES:])
    return False
